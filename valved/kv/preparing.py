"""A reclaim that stands ready: at rest it is worked out what the first part of the next one stops, tells and orders.

In the flow: a look foresees the need of an online engine (kv/reserve.py) -> here -> while the loop sleeps, the native
gate hears that need, stops offline work, tells the loss and sends the orders (native/prepared.c) -> the loop wakes, and
first of all the books say that it has begun -> the need is read, and its reclaim has that part in it (kv/reclaim.py).

It may begin only while the loop sleeps and all that it rests on is as it was. From then on its columns are going and
its orders under way, whether they are sent yet or not. What the native gate did not do, because a GPU does not stand or
a client does not read, is done or taken back here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import chain

import numpy as np

from valved.abi.kv_link import KvHow, KvOp
from valved.kv.books import KvBooks
from valved.kv.engines import Engine
from valved.kv.moves import MovePlan, Moves
from valved.kv.orders import Draft, Order
from valved.kv.outside import Outside, Packed
from valved.kv.supply import Supply
from valved.kv.turn import GateTurn
from valved.kv.victims import Victims, choose
from valved.kv.ways import Ways
from valved.machine.clock import Clock
from valved.machine.prepared import PreparedPort, PreparedTake
from valved.model.ids import ClientId, GpuIndex, Remap, ServiceId
from valved.policy.eviction import EvictionSettings

FEWEST = 8  # handles of the part: the driver takes them while the rest is planned
STALE_NS = 1_000_000_000  # victims are chosen anew: the engine has stepped
log = logging.getLogger(__name__)
Key = tuple[int, Engine, tuple[int, int], list[tuple[Engine, tuple[int, int], int]]]


@dataclass(slots=True, kw_only=True, eq=False)
class Ahead:
    """The first part of a reclaim."""

    online: Engine  # whose need begins it
    key: Key  # the books on which it rests
    way: Remap
    victims: Victims
    plan: MovePlan
    orders: list[tuple[Packed, Draft, Order]]  # in no book until it has begun
    take: PreparedTake
    ended: tuple[int, int] | None = None  # by the native gate: packets sent, and when it told

    @property
    def told_ns(self) -> int:
        return self.ended[1] if self.ended is not None else 0

    @property
    def engine(self) -> Engine:
        return self.victims.engine

    @property
    def handles(self) -> dict[GpuIndex, int]:
        columns = self.victims.columns
        return {gpu: int(self.engine.handles_of(gpu)[columns].sum()) for gpu in self.engine.gpus}

    @property
    def stages(self) -> list[list[Order]]:
        parts = [{id(part) for part in stage} for stage in self.plan.stages]
        return [[order for part, _, order in self.orders if id(part) in of] for of in parts]


@dataclass(eq=False, repr=False)
class Preparing:
    _books: KvBooks
    _supply: Supply
    _turn: GateTurn
    _ways: Ways
    _outside: Outside
    _moves: Moves
    _costs: EvictionSettings
    _clock: Clock
    _port: PreparedPort
    _link_of: Callable[[ClientId], int]

    def __post_init__(self) -> None:
        self._all: dict[ServiceId, Ahead] = {}
        self._put: list[Ahead] = []  # the native gate knows these
        self._looked: dict[ServiceId, tuple[Key, int]] = {}  # by which books, and until when that is good
        self._rests = False
        self.begun: Ahead | None = None  # and belongs to no reclaim yet

    # At rest

    def look(self, online: Engine, had: int, free: int, most: int) -> None:
        """`had`: columns that it has, or could have without anybody's loss. Of what more it could get `free` need no
        loss, and `most` are all."""
        now_ns, key, service = self._clock.now_ns(), self._key(online, had), online.service
        known_key, until_ns = self._looked.get(service, (None, 0))
        if known_key == key and now_ns < until_ns:
            return
        self._looked[service] = key, now_ns + STALE_NS
        self._all.pop(service, None)
        ahead = self._prepare(online, had, free, most, key)
        if ahead is not None:
            self._all[service] = ahead

    def _key(self, online: Engine, had: int) -> Key:
        losers = self._supply.losers(online.gpus)
        return had, online, online.changes, [(one, one.changes, one.table.epoch) for one in losers]

    def _prepare(self, online: Engine, had: int, free: int, most: int, key: Key) -> Ahead | None:
        more = max(1, -(-FEWEST // online.handles_per_column))
        bare, hook = online.bare_columns()[: free + more], self._link_of(online.hook)
        if min(most, len(bare)) < free + more or hook < 0 or not self._port.listen(hook):
            return None
        short = {gpu: self._short(online, bare, gpu) for gpu in online.gpus}
        missing = {gpu: count for gpu, count in short.items() if count > 0}
        losers = self._supply.losers(missing)
        way = self._ways.way_of(losers)
        if not losers or way is Remap.COOPERATIVE or any(one.index is None for one in losers):
            return None
        chosen = choose(losers, missing, self._costs)
        if len(chosen) != 1:
            return None
        [victims] = chosen
        plan = self._moves.plan_taking(victims.engine, victims.columns, KvHow.AT_ONCE)
        orders = self._orders(plan)
        links = [self._link_of(order.client) for _, _, order in orders]
        if min(links) < 0 or not all(self._outside.has_room(part) for part, _, _ in orders):
            return None
        table = victims.engine.table
        raw = [self._books.orders.packet(draft, order) for _, draft, order in orders]
        lost = int(table.is_backed()[plan.blocks].sum())
        take = PreparedTake(
            gpus=frozenset(missing) | victims.engine.gpus,
            wanted=online.book.word("wanted_blocks"),
            had=(had + more - 1) * online.blocks_per_column,
            mode=victims.engine.book.word("mode"),
            table=table.memory(),
            blocks=plan.blocks.astype(np.uint32).tobytes(),
            backed=table.backed_blocks - lost,
            packets=tuple(zip(links, raw, strict=True)),
        )
        victims.orders = [order for _, _, order in orders]
        return Ahead(online=online, key=key, way=way, victims=victims, plan=plan, orders=orders, take=take)

    def _short(self, online: Engine, bare: np.ndarray, gpu: GpuIndex) -> int:
        return int(online.bare_handles(gpu)[bare].sum()) - self._supply.affordable(gpu, online.service)

    def _orders(self, plan: MovePlan) -> list[tuple[Packed, Draft, Order]]:
        found = []
        for part in chain(*plan.stages):
            how = KvHow.OUTSIDE if self._is_sparse(part) else KvHow.AT_ONCE
            number = self._books.orders.number
            found += [(part, draft, number(draft, KvOp.QUARANTINE, how)) for draft in part.drafts]
        return found

    def _is_sparse(self, part: Packed) -> bool:
        return self._ways.best(part.slots.book) is Remap.SPARSE

    # The loop sleeps and wakes

    def rests(self) -> None:
        """Never raises."""
        try:
            self._rest()
        except Exception:
            log.exception("no reclaim stands ready")
            self._all = {}

    def _rest(self) -> None:
        if self.begun is not None or not self._turn.is_free or self._supply.is_waited_for:
            return
        stands = [one for one in self._all.values() if self._stands(one)]
        if len(stands) != len(self._all):
            self._all = {one.online.service: one for one in stands}
        if stands != self._put:
            self._put = []
            self._port.put([one.take for one in stands])
            self._put = stands
        if stands:
            self._port.rest()
            self._rests = True

    def _stands(self, ahead: Ahead) -> bool:
        engine = ahead.engine
        links = [
            (order.client, link) for (_, _, order), (link, _) in zip(ahead.orders, ahead.take.packets, strict=True)
        ]
        return (
            self._books.is_attached(ahead.online)
            and self._books.is_attached(engine)
            and self._ways.way_of([engine]) is ahead.way
            and engine.can_lose
            and self._key(ahead.online, ahead.key[0]) == ahead.key
            and all(self._link_of(client) == link for client, link in links)
        )

    def wakes(self) -> bool:
        """Whether one has begun meanwhile: the books say so from here on. Never raises."""
        at = -1
        if self._rests:
            self._rests = False
            at = self._port.wake()
        if at < 0:
            return False
        self.begun = ahead = self._put[at]
        self._all = {}
        try:
            self._begin(ahead)
        except Exception:
            log.exception("a step of a reclaim that has begun failed")
        return True

    def _begin(self, ahead: Ahead) -> None:
        engine = ahead.engine
        self._turn.take(ahead.take.gpus)
        engine.table.lend(partial(self._interrupt, ahead))
        engine.mark(ahead.victims.columns, going=True, lost=True)
        engine.skip_in_queue(ahead.victims.columns)
        self._books.orders.begun(order for _, _, order in ahead.orders)
        self._supply.coming = ahead.handles
        for part in chain(*ahead.plan.stages):
            if self._is_sparse(part):
                self._outside.make_when_heard(part, [order for of, _, order in ahead.orders if of is part])

    # It has begun

    def adopt(self) -> Ahead | None:
        """For the reclaim that is about to be made, whose turn it is: it carries this one out."""
        ahead, self.begun = self.begun, None
        self._supply.coming = {}
        return ahead

    def carry_out(self, ahead: Ahead, *, go: bool) -> list[list[Order]]:
        """Do what the native gate has not done; or, where the GPUs do not stand (`go`), take it back: no orders."""
        sent = self._end(ahead, go=go)
        engine, columns = ahead.engine, ahead.victims.columns
        engine.table.take_back()
        if sent < 0 and not (go and self._books.is_attached(engine)):
            for _, _, order in ahead.orders:
                self._books.orders.withdraw(order)
            self._moves.lost(engine, columns)
            return []
        if sent < 0:
            self._moves.lose(engine, columns, ahead.plan.blocks)
        for number, (_, draft, order) in enumerate(ahead.orders):
            if number < sent:
                order.arrived.set()
            else:
                self._books.orders.send(draft, order)
        return ahead.stages

    def _interrupt(self, ahead: Ahead) -> None:
        self._end(ahead, go=False)

    def _end(self, ahead: Ahead, *, go: bool) -> int:
        """How many packets the native gate has sent, -1: it has not told of it, either. It does no more."""
        if ahead.ended is None:
            ahead.ended = self._port.end(go=go)
            if ahead.ended[0] >= 0 and self._books.engines.get(ahead.engine.service) is ahead.engine:
                ahead.engine.table.reread()
        return ahead.ended[0]
