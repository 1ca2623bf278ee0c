"""How much each online engine should have: the reservation policy asked about each, and what it says carried out.

One look at an engine: read its books, let valved/policy/reservation.py decide, start what it says, and take what the
engine offers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import InitVar, dataclass, replace

from valved.abi.kv_files import BookView
from valved.config import Config
from valved.kv.books import KvBooks
from valved.kv.changes import Changes, Look
from valved.kv.engines import Engine
from valved.kv.first import Firsts, Foreseen
from valved.kv.grow import Grown, Growth
from valved.kv.journey import start
from valved.kv.lend import Lending
from valved.kv.rungs import Rungs
from valved.kv.slots import NOTHING, Ints
from valved.kv.supply import Supply
from valved.machine.clock import Clock
from valved.model.events import EventKind
from valved.model.ids import GpuIndex, Role, ServiceId
from valved.model.memory import OnlineMemory, ReservationAction, ReservationDecision, ReservationState
from valved.policy import sharing
from valved.policy.reservation import REMEMBERED_RECLAIMS, ReservationSettings, decide
from valved.policy.reservation import start as first_state
from valved.policy.resuming import resume
from valved.state.journal import Journal

RETRY_NS = 1_000_000_000  # after a growth that got less than it asked for
PARTS_REST_NS = 60 * RETRY_NS


class ReclaimBudget:
    """When memory was reclaimed on each GPU: the target counts per GPU, however many engines share one. Every engine
    decides by the reclaims of its busiest GPU, its own and those of others; they outlive engines.
    """

    def __init__(self, uuids: Mapping[GpuIndex, bytes]) -> None:
        self._uuids = dict(uuids)
        self._at_ns: dict[GpuIndex, tuple[int, ...]] = {}

    def seen_by(self, gpus: Iterable[GpuIndex], since_ns: int) -> tuple[int, ...]:
        """Of the GPU that had most since then."""
        recent = [tuple([at for at in self._at_ns.get(gpu, ()) if at > since_ns]) for gpu in sorted(gpus)]
        return max(recent, key=len, default=())

    def note(self, gpus: Iterable[GpuIndex], now_ns: int) -> None:
        for gpu in gpus:
            self._at_ns[gpu] = (*self._at_ns.get(gpu, ()), now_ns)[-REMEMBERED_RECLAIMS:]

    def forget(self, gpus: Iterable[GpuIndex], at_ns: int) -> None:
        """That one took nothing."""
        for gpu in gpus:
            noted = list(self._at_ns.get(gpu, ()))
            if at_ns in noted:
                noted.remove(at_ns)
            self._at_ns[gpu] = tuple(noted)

    def saved(self) -> dict[str, tuple[int, ...]]:
        return {self._uuids[gpu].hex(): at for gpu, at in self._at_ns.items()}

    def restore(self, saved: Mapping[str, tuple[int, ...]], now_ns: int) -> None:
        """Without those of another boot, whose clock was another: they would be recent for as long as it had run."""
        told = {gpu: saved.get(uuid.hex(), ()) for gpu, uuid in self._uuids.items()}
        self._at_ns = {gpu: tuple(at for at in known if 0 <= at <= now_ns) for gpu, known in told.items() if known}


@dataclass(slots=True, kw_only=True)
class Online:
    """What is remembered about an online engine between looks."""

    state: ReservationState
    settings: ReservationSettings
    decision: ReservationDecision | None = None
    growing: bool = False
    before: tuple[int, ReservationState] | None = None  # a reclaim was decided then, in this state, and is under way
    giving: bool = False
    blocked_until_ns: int = 0
    foreseen: Foreseen | None = None  # the next reclaim, as a look foresaw it ...
    foreseen_by: object = None  # ... and foresees it again if this has changed
    target_columns: int = 0
    parts_rest_ns: int = 0  # columns in part that it did not give back are asked for again after ever longer pauses ...
    parts_after_ns: int = 0  # ... and not before


@dataclass(eq=False, repr=False)
class Reserve:
    _books: KvBooks
    _supply: Supply
    _firsts: Firsts
    _growth: Growth
    _lending: Lending
    _rungs: Rungs
    _journal: Journal
    _clock: Clock
    _config: Config
    uuids: InitVar[Mapping[GpuIndex, bytes]]
    _changes: Changes

    def __post_init__(self, uuids: Mapping[GpuIndex, bytes]) -> None:
        self.online: dict[ServiceId, Online] = {}
        self.saved: dict[ServiceId, ReservationState] = {}  # of a predecessor, until their engines attach again
        self.budget = ReclaimBudget(uuids)
        self.target_per_hour = self._config.memory.target_per_hour

    def rung(self, engine: Engine, wanted_blocks: int) -> None:
        """Its hook waits for memory. Offline work that must give is stopped before all else, by what the last look
        foresaw. Of what is wanted only that counts which the decision goes by, too."""
        online, view = self.online.get(engine.service), engine.view()
        try:
            if online is not None and online.foreseen is not None and not self._rests(online):
                self._growth.hurry_foreseen(online.foreseen, min(wanted_blocks, view.wanted_blocks))
            self.serve(engine, view)
        finally:
            self._growth.calm()

    def serve(self, engine: Engine, view: BookView | None = None) -> None:
        """One look at an online engine."""
        online = self.online.get(engine.service) or self._first(engine)
        if online.growing:
            return
        view, now_ns = view or engine.view(), self._clock.now_ns()
        self._accept_offers(engine, online, view)
        self._let_parts_go(engine, online, now_ns)
        if self._rests(online):
            return
        memory = self._observe(engine, view)
        bare = memory.pool_handles - memory.mapped_handles
        begins = max(0, min(bare, online.state.headroom_handles - memory.mapped_handles))
        try:
            if memory.unmet_handles > memory.free_handles and not self._growth.is_hurrying:
                self._growth.hurry(self._growth.would_stop(engine, min(memory.unmet_handles, begins or bare)))
            self._decide(engine, online, memory, begins, now_ns)
        finally:
            self._growth.calm()
        if not online.growing:
            self._foresee(engine, online, memory, begins or bare)

    def _rests(self, online: Online) -> bool:
        """What grows is asked for, and what was short a moment ago is not asked for again."""
        return online.growing or self._clock.now_ns() < online.blocked_until_ns

    def _foresee(self, engine: Engine, online: Online, memory: OnlineMemory, most: int) -> None:
        """What a request for more columns than are free would stop and take. `most`: columns that one could get."""
        free = memory.free_handles
        seen = most, free, self._firsts.foreseen_by(engine)
        if seen != online.foreseen_by:
            online.foreseen_by = seen
            online.foreseen = self._firsts.foresee(engine, memory.mapped_handles, free, most)

    def _decide(self, engine: Engine, online: Online, memory: OnlineMemory, begins: int, now_ns: int) -> None:
        """`begins`: columns of its headroom that have not come yet."""
        rung_ns, engine.rung_ns = engine.rung_ns, None
        if begins:
            self._grow(engine, online, begins, rung_ns)
            return
        reclaims_ns = self.budget.seen_by(engine.gpus, now_ns - online.settings.window_ns)
        state = online.state
        if reclaims_ns != state.reclaims_ns:
            state = replace(state, reclaims_ns=reclaims_ns)
        usual = self._rungs.settings(engine, online.settings)
        engines = sharing.sharers(engine.gpus, [one.gpus for one in self._books.engines_with(Role.ONLINE)])
        online.state, decision = decide(state, memory, now_ns, sharing.shared(usual, engines))
        decision = sharing.last(decision, memory, len(reclaims_ns), engines, usual)
        online.before = (now_ns, state) if decision.is_reclaim else None
        if decision.is_reclaim:
            self.budget.note(engine.gpus, now_ns)
        if decision.action is ReservationAction.TAKE:
            bare = memory.pool_handles - memory.mapped_handles
            self._grow(engine, online, min(bare, decision.handles), rung_ns)
        elif decision.action is ReservationAction.GIVE:
            self._set_target(engine, online, memory.mapped_handles - decision.handles)
        else:
            self._keep(engine, online, memory)
        self._note(engine, online, decision)  # last: a service that waits for memory waits for no file

    def accept(self, per_hour: float | None) -> None:
        """Reclaims an hour and GPU that the cluster accepts on this node from now on; None: as configured."""
        self.target_per_hour = self._config.memory.target_per_hour if per_hour is None else per_hour
        for online in self.online.values():
            online.settings = replace(online.settings, target_per_hour=self.target_per_hour)
        self._changes.put(Look())

    def restore(self, states: Mapping[ServiceId, ReservationState], reclaims: Mapping[str, tuple[int, ...]]) -> None:
        """Of a predecessor."""
        now_ns = self._clock.now_ns()
        self.saved = {service: state for service, state in states.items() if state.newest_ns <= now_ns}
        self.budget.restore(reclaims, now_ns)

    def engine_left(self, engine: Engine) -> None:
        online = self.online.pop(engine.service, None)
        if online is not None:
            self.saved[engine.service] = online.state

    def _first(self, engine: Engine) -> Online:
        """In columns: nothing smaller moves."""
        column_bytes = engine.handles_per_column * self._books.pool.handle_bytes
        settings = self._config.reservation_settings(column_bytes)
        settings = replace(settings, target_per_hour=self.target_per_hour)
        state = self.saved.pop(engine.service, None) or first_state(self._clock.now_ns(), settings)
        state = resume(state, column_bytes, settings)
        state = replace(state, history=replace(state.history, noted_ns=0))  # what was used since, nobody saw
        online = self.online[engine.service] = Online(state=state, settings=settings)
        self._trim(engine, online)
        return online

    def _trim(self, engine: Engine, online: Online) -> None:
        """Its ranges were backed as far as memory went when they were made: keep what it needs."""
        view = engine.view()
        needed = max(-(-max(view.used_blocks, view.wanted_blocks) // engine.blocks_per_column), 0)
        if online.state.headroom_handles + needed < int(engine.backed_columns().sum()):
            self._set_target(engine, online, online.state.headroom_handles + needed)

    def _observe(self, engine: Engine, view: BookView) -> OnlineMemory:
        per_column, mapped, bare = engine.blocks_per_column, engine.mapped_columns(), engine.bare_columns()
        used = min(engine.columns, -(-view.used_blocks // per_column))
        wanted = min(engine.columns, -(-view.wanted_blocks // per_column))
        within_reach = self._supply.within_reach(engine)
        return OnlineMemory(
            used_handles=max(used, min(wanted, mapped)),  # what waits for the engine's next step is as good as used
            mapped_handles=mapped,
            unmet_handles=max(0, wanted - mapped),
            free_handles=engine.fitting(bare, within_reach),
            pool_handles=mapped + min(len(bare), self._supply.obtainable(engine, within_reach)),
        )

    def _grow(self, engine: Engine, online: Online, columns: int, rung_ns: int | None) -> None:
        bare = engine.bare_columns()[:columns]
        if len(bare):
            online.growing = True
            start(self._growing(engine, online, bare, rung_ns))

    async def _growing(self, engine: Engine, online: Online, columns: Ints, rung_ns: int | None) -> None:
        grown = Grown()
        try:
            grown = await self._growth.grow(engine, columns, rung_ns)
        finally:
            online.growing = False
            if grown.came < len(columns):
                online.blocked_until_ns = self._clock.now_ns() + RETRY_NS
            if not grown.has_cost:
                self._uncount(engine, online)
            online.before = None
        if self.online.get(engine.service) is online and engine.is_complete:
            self._set_target(engine, online, engine.standing_count())
        self._changes.put(Look())

    def _uncount(self, engine: Engine, online: Online) -> None:
        """It was decided as a reclaim, and offline work lost nothing: the GPU could not be stopped, or all came from
        what was free by then. It is asked for again, and would count each time."""
        if online.before is not None:
            at_ns, state = online.before
            self.budget.forget(engine.gpus, at_ns)
            moved = {
                name: getattr(state, name) for name in ("headroom_handles", "exact_handles", "tau_ns", "reclaims_ns")
            }
            online.state = replace(online.state, **moved)

    def _set_target(self, engine: Engine, online: Online, columns: int) -> None:
        """Up to here the engine may use; beyond it offers whole columns."""
        online.target_columns = columns
        engine.table.set_target(min(engine.table.blocks, columns * engine.blocks_per_column))

    def _keep(self, engine: Engine, online: Online, memory: OnlineMemory) -> None:
        """What it was asked to offer it needs itself by now."""
        before = online.decision
        kept = memory.mapped_handles
        if before is None or before.action is not ReservationAction.GIVE:
            kept = min(kept, memory.used_handles + online.state.headroom_handles)
        if 0 < online.target_columns < kept:
            self._set_target(engine, online, kept)

    def _let_parts_go(self, engine: Engine, online: Online, now_ns: int) -> None:
        """Columns in part are of no use: a growth ended half way, for its hook came anew, or so the range was told."""
        partial = engine.partial_columns()
        if partial.size:
            partial = partial[~engine.going[partial]]
        if not partial.size:
            online.parts_rest_ns = 0
        elif not online.giving and now_ns >= online.parts_after_ns:
            online.parts_rest_ns = min(PARTS_REST_NS, max(RETRY_NS, 2 * online.parts_rest_ns))
            online.parts_after_ns = now_ns + online.parts_rest_ns
            online.giving = True
            start(self._giving(engine, online, partial))

    def _accept_offers(self, engine: Engine, online: Online, view: BookView) -> None:
        if online.giving or not online.target_columns:
            return
        surplus = engine.standing_count() - online.target_columns
        waits = view.wanted_blocks > view.used_blocks
        if (surplus <= 0 and not waits) or view.epoch_seen < engine.table.epoch:
            return  # what it offers was said of an older table: a block may have come since, and be in use
        if waits and len(blocks := engine.offered_though_wanted(view.wanted_blocks)):
            engine.table.record(blocks, False, self._clock.now_ns())
            self._books.tell(engine)  # its hook hands them out again: they have changed, and are there
            return
        offered = engine.offered_columns()[-surplus:] if surplus > 0 else NOTHING
        if len(offered):
            online.giving = True
            start(self._giving(engine, online, offered))

    async def _giving(self, engine: Engine, online: Online, columns: Ints) -> None:
        try:
            await self._lending.give_back(engine, columns)
        finally:
            online.giving = False
        self._changes.put(Look())

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


def says_the_same(before: ReservationDecision, now: ReservationDecision) -> bool:
    """A hold for the same reason; or a give that is asked of the engine again, because it has not offered yet."""
    if (before.action, before.reason) != (now.action, now.reason):
        return False
    if now.action is ReservationAction.GIVE:
        return (before.handles, before.memory) == (now.handles, now.memory)
    return now.action is ReservationAction.HOLD
