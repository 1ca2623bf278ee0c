"""Who should have how much: the loop around the reservation policy, and the lending of what nobody needs.

Looks are cheap and come whenever something changed: a hook rang, an order came back, a client left, the tick. One look:
read the books, let valved/policy/reservation.py decide for each online engine, and start what it says; then take what
online engines offer; then, if nobody is short, lend free memory to offline engines.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from valved.config import MIB, Config
from valved.kv.budget import ReclaimBudget
from valved.kv.engines import Engine
from valved.kv.journey import start
from valved.kv.memory import Memory
from valved.kv.pool import Ints
from valved.kv.reclaim import Mover
from valved.kv.whole import Whole
from valved.machine.cards import CardUse
from valved.machine.clock import Clock, TimerHandle
from valved.model.events import EventKind
from valved.model.figures import total
from valved.model.ids import GpuIndex, Role, ServiceId
from valved.model.memory import OnlineMemory, ReservationAction, ReservationDecision, ReservationState
from valved.policy.reservation import ReservationSettings, decide
from valved.policy.reservation import start as first_state
from valved.state.journal import Journal
from valved.state.registry import ClientEntry

SECOND_NS = 1_000_000_000
RETRY_NS = SECOND_NS  # after a growth that got less than it asked for
REST_NS = 60 * SECOND_NS  # the longest between two tries to lend that bring nothing: each may cost a stop of the GPU
INDEX_REST = 20  # times as long as an index took nobody makes another
LEND_HANDLES = 64  # at a time and GPU: one packet of orders, a stop of a millisecond


@dataclass(slots=True, kw_only=True)
class Online:
    """What is remembered about an online engine between looks."""

    state: ReservationState
    settings: ReservationSettings
    decision: ReservationDecision | None = None
    growing: bool = False
    giving: bool = False
    blocked_until_ns: int = 0
    target_columns: int = 0


@dataclass(slots=True, kw_only=True)
class Offline:
    """The same about an offline engine. What brings nothing is tried again ever later."""

    lending: bool = False
    rest_ns: int = 0
    blocked_until_ns: int = 0

    def note(self, came: int, now_ns: int) -> None:
        self.rest_ns = 0 if came else min(REST_NS, max(RETRY_NS, 2 * self.rest_ns))
        self.blocked_until_ns = now_ns + self.rest_ns


class Reserve:
    def __init__(
        self,
        memory: Memory,
        mover: Mover,
        journal: Journal,
        clock: Clock,
        config: Config,
        uuids: Mapping[GpuIndex, bytes],
    ) -> None:
        self.online: dict[ServiceId, Online] = {}
        self._offline: dict[ServiceId, Offline] = {}
        self.saved: dict[ServiceId, ReservationState] = {}  # of a predecessor, until their engines attach again
        self.ceiling: Callable[[ServiceId], float] = lambda service: 1.0  # share of its columns offline is lent at most
        self._memory = memory
        self._mover = mover
        self._journal = journal
        self._clock = clock
        self._config = config
        self._uuids = dict(uuids)
        self.budget = ReclaimBudget(uuids)
        self._soon: TimerHandle | None = None
        self._tick: TimerHandle | None = None
        self.cards: Mapping[bytes, CardUse] = {}
        self._full_until_ns: dict[GpuIndex, int] = {}
        memory.changed = self.look_soon
        whole = Whole(memory, mover, clock)
        memory.wants_whole = lambda book, seq: start(whole.back_whole(book, seq))
        memory.unheeded.back_held = lambda book: start(whole.back_held(book))
        memory.make_way = self.make_way
        memory.engine_left = self._engine_left
        memory.budget_bytes = self._budget_bytes
        mover.full = self._full
        self.see_cards({})

    # When to look

    def look_soon(self) -> None:
        """Once in this turn of the loop, however many things changed."""
        if self._soon is None:
            self._soon = self._clock.call_at_ns(self._clock.now_ns(), self.look)

    def look(self) -> None:
        if self._soon is not None:
            self._soon.cancel()
            self._soon = None
        for engine in self._memory.engines_with(Role.ONLINE):
            self._serve(engine)
        for engine in self._memory.engines_with(Role.OFFLINE):
            if not self._mover.is_pressed(engine.gpus):
                self._lend(engine)
        self._arm()

    def _arm(self) -> None:
        if self._tick is None and self.is_in_use:
            after_ns = round(self._config.memory.tick_ms * 1e6)
            self._tick = self._clock.call_at_ns(self._clock.now_ns() + after_ns, self._on_tick)

    def _on_tick(self) -> None:
        self._tick = None
        try:
            for engine in self._memory.engines_with(Role.OFFLINE):
                self._refresh_index(engine)
            self.look()
        finally:
            self._arm()

    def _refresh_index(self, engine: Engine) -> None:
        """Ahead of need, and no more than a share of the loop: a reclaim may choose by an older one."""
        began_ns = self._clock.now_ns()
        if began_ns < engine.index_after_ns or not self._is_reclaim_near(engine):
            return
        try:
            engine.refresh_index(self._mover.costs, began_ns)
        finally:
            ended_ns = self._clock.now_ns()
            engine.index_after_ns = ended_ns + INDEX_REST * (ended_ns - began_ns)

    def _is_reclaim_near(self, engine: Engine) -> bool:
        """An online engine beside it could not double its reserve from what is free, or nobody knows what is."""
        if not self.cards and not self._config.memory.pool_mib:
            return True
        return any(
            self._mover.affordable(gpu) < online.state.headroom_handles * int(other.handles_of(gpu).max(initial=0))
            for other in self._memory.engines_with(Role.ONLINE)
            for gpu in other.gpus & engine.gpus
            if (online := self.online.get(other.service)) is not None
        )

    # Room for new handles

    @property
    def is_in_use(self) -> bool:
        return bool(self._memory.engines or self._memory.pool.total or self._memory.pool.ranges)

    def see_cards(self, cards: Mapping[bytes, CardUse]) -> None:
        """How many handles may still be made on each GPU, by what the cards say now and by the settings."""
        self.cards = cards
        now_ns = self._clock.now_ns()
        settings, size = self._config.memory, self._memory.pool.handle_bytes
        for gpu, uuid in self._uuids.items():
            room = 1 << 30
            card = self.cards.get(uuid)
            if card is not None:
                self._return_to_driver(gpu, card, settings.spare_mib * MIB)
                room = (card.total_bytes - card.used_bytes - settings.spare_mib * MIB) // size
            if settings.pool_mib:
                room = min(room, settings.pool_mib * MIB // size - self._memory.pool.count(gpu))
            is_full = self._full_until_ns.get(gpu, 0) > now_ns
            self._mover.room[gpu] = 0 if is_full else max(0, room - self._memory.orders.creating(gpu))
        self._memory.tell_budgets()

    def _return_to_driver(self, gpu: GpuIndex, card: CardUse, spare_bytes: int) -> None:
        """Free handles are nobody's but the pool's: where the card is short, ordinary memory goes before them."""
        short = spare_bytes - (card.total_bytes - card.used_bytes)
        self._memory.pool.trim(gpu, max(0, -(-short // self._memory.pool.handle_bytes)))

    def make_way(self, entry: ClientEntry) -> None:
        """An offline process joins: its weights are ordinary memory, and free handles can be made anew."""
        if entry.role is not Role.OFFLINE:
            return
        for gpu in self._uuids:
            if not self._mover.is_pressed(frozenset({gpu})):
                self._memory.pool.trim(gpu, self._memory.pool.free_handles(gpu))

    def used_bytes(self, uuid: bytes) -> int:
        card = self.cards.get(uuid)
        return card.used_bytes if card is not None else 0

    def _full(self, gpu: GpuIndex) -> None:
        """The driver had less than it said."""
        self._mover.room[gpu] = 0
        self._full_until_ns[gpu] = self._clock.now_ns() + RETRY_NS

    def _budget_bytes(self, entry: ClientEntry) -> int:
        """On the scarcest of its GPUs: what it holds, what is free, and for online what offline work could give."""
        if not self.cards:
            return 0
        gpus = entry.gpus() or set(self._uuids)
        return min(self._hope(entry, gpu) for gpu in gpus) * self._memory.pool.handle_bytes

    def _hope(self, entry: ClientEntry, gpu: GpuIndex) -> int:
        hope = self._memory.pool.mapped(gpu, (entry.id,)) + self._mover.affordable(gpu)
        if entry.role is Role.ONLINE:
            hope += self._mover.takeable(gpu)
        return max(1, hope)

    # Online

    def _serve(self, engine: Engine) -> None:
        online = self.online.get(engine.service) or self._first(engine)
        self._accept_offers(engine, online)
        now_ns = self._clock.now_ns()
        if online.growing or now_ns < online.blocked_until_ns:
            return
        memory = self._observe(engine)
        bare = memory.pool_handles - memory.mapped_handles
        if memory.mapped_handles < min(online.state.headroom_handles, memory.pool_handles):  # it has just begun
            self._grow(engine, online, min(bare, online.state.headroom_handles - memory.mapped_handles))
            return
        reclaims_ns = self.budget.seen_by(engine.gpus, now_ns - online.settings.window_ns)
        state = replace(online.state, reclaims_ns=reclaims_ns)
        online.state, decision = decide(state, memory, now_ns, online.settings)
        if decision.is_reclaim:
            self.budget.note(engine.gpus, now_ns)
        self._note(engine, online, decision)
        if decision.action is ReservationAction.TAKE:
            self._grow(engine, online, min(bare, decision.handles))
        elif decision.action is ReservationAction.GIVE:
            self._set_target(engine, online, memory.mapped_handles - decision.handles)

    def _first(self, engine: Engine) -> Online:
        """In columns: nothing smaller moves."""
        column_bytes = engine.handles_per_column * self._memory.pool.handle_bytes
        settings = self._config.reservation_settings(column_bytes)
        state = self.saved.pop(engine.service, None) or first_state(self._clock.now_ns(), settings)
        online = self.online[engine.service] = Online(state=state, settings=settings)
        self._trim(engine, online)
        return online

    def _trim(self, engine: Engine, online: Online) -> None:
        """Its ranges were backed as far as memory went when they were made: keep what it needs, in whole columns."""
        partial = engine.partial_columns()
        if len(partial):
            online.giving = True
            start(self._giving(engine, online, partial))
        view = engine.view()
        needed = max(-(-max(view.used_blocks, view.wanted_blocks) // engine.blocks_per_column), 0)
        if online.state.headroom_handles + needed < int(engine.backed_columns().sum()):
            self._set_target(engine, online, online.state.headroom_handles + needed)

    def _engine_left(self, engine: Engine) -> None:
        counters = self._mover.counters
        counters.lost_tokens = total((counters.lost_tokens, engine.view().lost_tokens))
        self._offline.pop(engine.service, None)
        online = self.online.pop(engine.service, None)
        if online is not None:
            self.saved[engine.service] = online.state

    def _observe(self, engine: Engine) -> OnlineMemory:
        view, per_column = engine.view(), engine.blocks_per_column
        mapped = int((engine.backed_columns() & ~engine.lost | engine.going & ~engine.lost).sum())
        used = min(engine.columns, -(-view.used_blocks // per_column))
        wanted = min(engine.columns, -(-view.wanted_blocks // per_column))
        bare = engine.bare_columns()
        return OnlineMemory(
            used_handles=max(used, min(wanted, mapped)),  # what waits for the engine's next step is as good as used
            mapped_handles=mapped,
            unmet_handles=max(0, wanted - mapped),
            free_handles=self._mover.fitting(engine, bare),
            pool_handles=min(engine.columns, mapped + self._obtainable(engine)),
        )

    def _obtainable(self, engine: Engine) -> int:
        """Columns that could be had, from whomever: asking for more would count as a reclaim and bring nothing."""
        found = engine.columns
        for gpu in engine.gpus:
            most = max(1, int(engine.handles_of(gpu).max(initial=1)))
            found = min(found, (self._mover.affordable(gpu) + self._mover.takeable(gpu)) // most)
        return found

    def _grow(self, engine: Engine, online: Online, columns: int) -> None:
        bare = engine.bare_columns()[:columns]
        if not len(bare):
            return
        online.growing = True
        start(self._growing(engine, online, bare))

    async def _growing(self, engine: Engine, online: Online, columns: Ints) -> None:
        came = 0
        try:
            came = await self._mover.grow(engine, columns)
        finally:
            online.growing = False
            if came < len(columns):
                online.blocked_until_ns = self._clock.now_ns() + RETRY_NS
        if self.online.get(engine.service) is online and engine.is_complete:
            self._set_target(engine, online, int((engine.backed_columns() & ~engine.lost).sum()))
        self.look_soon()

    def _set_target(self, engine: Engine, online: Online, columns: int) -> None:
        """Up to here the engine may use; beyond it offers whole columns."""
        online.target_columns = columns
        engine.table.set_target(min(engine.table.blocks, columns * engine.blocks_per_column))

    def _accept_offers(self, engine: Engine, online: Online) -> None:
        backed = engine.backed_columns() & ~engine.lost
        surplus = int(backed.sum()) - online.target_columns
        if surplus <= 0 or online.giving or online.growing or not online.target_columns:
            return
        offered = engine.offered_columns(backed)[-surplus:]
        if len(offered):
            online.giving = True
            start(self._giving(engine, online, offered))

    async def _giving(self, engine: Engine, online: Online, columns: Ints) -> None:
        try:
            await self._mover.give_back(engine, columns)
        finally:
            online.giving = False
        self.look_soon()

    def _note(self, engine: Engine, online: Online, decision: ReservationDecision) -> None:
        before, online.decision = online.decision, decision
        if before is not None and says_the_same(before, decision):
            return
        memory = decision.memory
        self._journal.emit(
            EventKind.RESERVED,
            service=engine.service,
            gpus=tuple(sorted(engine.gpus)),
            reason=decision.reason,
            action=decision.action.value,
            columns=decision.handles,
            is_reclaim=int(decision.is_reclaim),
            headroom=decision.headroom_handles,
            tau_ms=decision.tau_ns // 1_000_000,
            per_hour=round(decision.reclaims_per_hour),
            used=memory.used_handles,
            mapped=memory.mapped_handles,
            unmet=memory.unmet_handles,
            free=memory.free_handles,
        )

    # Offline

    def _lend(self, engine: Engine) -> None:
        """What nobody needs goes to offline work, a packet of orders at a time, while its GPUs are open."""
        offline = self._offline.setdefault(engine.service, Offline())
        if offline.lending or self._clock.now_ns() < offline.blocked_until_ns or not self._mover.can_lend(engine):
            return
        bare = engine.bare_columns()
        least = max(1, LEND_HANDLES // engine.handles_per_column)
        columns = bare[: min(least, max(0, self.short_of_ceiling(engine)), self._mover.fitting(engine, bare))]
        if len(columns):
            offline.lending = True
            start(self._lending_to(engine, offline, columns))

    async def _lending_to(self, engine: Engine, offline: Offline, columns: Ints) -> None:
        came = 0
        try:
            came = await self._mover.lend(engine, columns)
        finally:
            offline.lending = False
            offline.note(came, self._clock.now_ns())
        if came:
            self.look_soon()

    def short_of_ceiling(self, engine: Engine) -> int:
        """Columns up to the ceiling of an offline engine; negative when it has more."""
        return math.ceil(self.ceiling(engine.service) * engine.columns) - int(engine.backed_columns().sum())

    def withheld(self, engine: Engine) -> dict[GpuIndex, int]:
        """Bytes that only its ceiling keeps from an offline engine."""
        bare = engine.bare_columns()
        could = bare[max(0, self.short_of_ceiling(engine)) : self._mover.fitting(engine, bare)]
        size = self._memory.pool.handle_bytes
        return {gpu: int(engine.handles_of(gpu)[could].sum()) * size for gpu in engine.gpus}

    def can_have_more(self, engine: Engine) -> bool:
        """Without taking it from anybody."""
        return self._mover.fitting(engine, engine.bare_columns()) > 0


def says_the_same(before: ReservationDecision, now: ReservationDecision) -> bool:
    """A hold for the same reason; or a give that is asked of the engine again, because it has not offered yet."""
    if (before.action, before.reason) != (now.action, now.reason):
        return False
    if now.action is ReservationAction.GIVE:
        return (before.handles, before.memory) == (now.handles, now.memory)
    return now.action is ReservationAction.HOLD
