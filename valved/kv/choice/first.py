"""The first part of the next reclaim, worked out at rest: which columns go, and the packets that order it.

In the flow: a look foresees the need of an online engine (kv/reserve.py) -> here -> the need comes, and its GPUs are
being stopped -> once they stand, this part is told and taken -> kv/reclaim.py plans the rest while the driver is busy.

Until then it is in no book, and nobody was told of it. Where the books have changed since, it is not used.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import chain

from valved.abi.kv_link import KvHow
from valved.kv.books import KvBooks
from valved.kv.choice.victims import Victims, choose
from valved.kv.choice.ways import Ways
from valved.kv.engines import STALE_NS, Engine
from valved.kv.moves import Moves
from valved.kv.orders import Order
from valved.kv.supply import Supply
from valved.kv.turn import GateTurn
from valved.machine.clock import Clock
from valved.model.ids import GpuIndex, Remap, ServiceId
from valved.policy.eviction import CostIndex, EvictionSettings

HANDLES = (8, 32)  # of a part: fewer are soon planned; the driver takes 32 while the rest is planned


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstPart:
    wanted: dict[GpuIndex, int]  # handles for which it was chosen
    losers: list[Engine]  # among these
    how: Remap
    victims: list[Victims]
    by: list[tuple[CostIndex | None, int]]  # the index of each, and when that was begun


@dataclass(slots=True, kw_only=True, eq=False)
class BegunPart:
    """One that is being taken, and belongs to no reclaim yet."""

    service: ServiceId  # of the engine that needs it
    part: FirstPart
    began_ns: int
    stopped_ns: int
    told_ns: int = 0
    stages: list[list[Order]] = field(default_factory=list)
    is_whole: bool = False  # else a step of it failed

    @property
    def handles(self) -> dict[GpuIndex, int]:
        found: dict[GpuIndex, int] = {}
        for one in self.part.victims:
            for gpu in one.engine.gpus:
                found[gpu] = found.get(gpu, 0) + int(one.engine.handles_of(gpu)[one.columns].sum())
        return found

    @property
    def gpus(self) -> frozenset[GpuIndex]:
        return gpus_of(self.part)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartsMade:
    """When parts were made, and by what."""

    books: list[object]
    indexes: list[tuple[Engine, CostIndex | None]]
    at_ns: int

    @property
    def is_newest(self) -> bool:
        return all(one.index is index for one, index in self.indexes)


@dataclass(eq=False, repr=False)
class FirstParts:
    _books: KvBooks
    _supply: Supply
    _turn: GateTurn
    _ways: Ways
    _moves: Moves
    _costs: EvictionSettings
    _clock: Clock

    def __post_init__(self) -> None:
        self._parts: dict[frozenset[GpuIndex], list[FirstPart]] = {}  # by the GPUs of who needs; the largest first
        self._made: dict[frozenset[GpuIndex], PartsMade] = {}
        self._seen: dict[frozenset[GpuIndex], list[object]] = {}  # books, as the last look found them
        self.begun: BegunPart | None = None

    # At rest

    def prepare(self, gpus: frozenset[GpuIndex]) -> None:
        """For a need on these that free memory will not serve."""
        losers = self._supply.losers(gpus)
        how = self._ways.way_of(losers)
        made, now_ns = self._made.get(gpus), self._clock.now_ns()
        books: list[object] = [how, *((one, one.changes) for one in losers)]
        before, self._seen[gpus] = self._seen.get(gpus), books
        if made is not None and made.books == books and (now_ns - made.at_ns < STALE_NS // 2 or made.is_newest):
            return
        self._parts.pop(gpus, None)
        if books == before and all(one.index is not None for one in losers):  # else memory moves, or an index is made
            self._made[gpus] = PartsMade(books=books, indexes=[(one, one.index) for one in losers], at_ns=now_ns)
            self._parts[gpus] = self._plan(gpus, losers, how) if how is not Remap.COOPERATIVE else []

    def _plan(self, gpus: frozenset[GpuIndex], losers: list[Engine], how: Remap) -> list[FirstPart]:
        parts: list[FirstPart] = []
        for handles in HANDLES:
            wanted = dict.fromkeys(gpus, handles)
            victims = choose(losers, wanted, self._costs)
            if not victims or (parts and lengths(victims) == lengths(parts[0].victims)):
                continue
            for one in victims:
                one.plan = self._moves.plan_taking(one.engine, one.columns, KvHow.AT_ONCE)
            by = [(one.engine.index, one.engine.indexed_ns) for one in victims]
            parts.insert(0, FirstPart(wanted=wanted, losers=losers, how=how, victims=victims, by=by))
        return parts

    # A need

    def begin(self, service: ServiceId, gpus: frozenset[GpuIndex], missing: dict[GpuIndex, int]) -> None:
        """Precondition: its engine, on these GPUs, asks for so much next, in this turn of the loop, and the stop of
        what that concerns was ordered. Who does not ask after all carries on what has begun (kv/grow.py)."""
        part = next((one for one in self._parts.get(gpus, []) if is_within(one.wanted, missing)), None)
        if part is None or not self._turn.is_ahead or not self._is_good(part):
            return
        began_ns = self._clock.now_ns()
        if not self._turn.stand_soon(gpus_of(part)) or not self._is_good(part):
            return
        begun = BegunPart(service=service, part=part, began_ns=began_ns, stopped_ns=self._clock.now_ns())
        self.begun = begun
        self._parts.pop(gpus)
        for one in part.victims:
            one.is_told = True
            self._moves.lose(one.engine, one.columns, one.plan.blocks if one.plan is not None else None)
        begun.told_ns = self._clock.now_ns()
        for stage in self._moves.take_planned([one.plan for one in part.victims if one.plan], KvHow.AT_ONCE):
            begun.stages.append(stage)
        for one in part.victims:
            one.engine.skip_in_queue(one.columns)
        begun.is_whole = True

    def _is_good(self, part: FirstPart) -> bool:
        losers = self._supply.losers(part.wanted)
        return (
            losers == part.losers
            and self._ways.way_of(losers) is part.how
            and all(self._stands(one) for one in part.victims)
            and all(self._is_recent(one.engine, *by) for one, by in zip(part.victims, part.by, strict=True))
        )

    def _stands(self, victims: Victims) -> bool:
        plan = victims.plan
        return self._books.may_take(victims.engine) and plan is not None and plan.takes(victims.columns)

    def _is_recent(self, engine: Engine, index: CostIndex | None, indexed_ns: int) -> bool:
        """What is known of an index that is still the engine's may be known again since."""
        now_ns = self._clock.now_ns()
        return not engine.is_index_stale(now_ns) if engine.index is index else now_ns - indexed_ns < STALE_NS

    def adopt(self) -> BegunPart | None:
        """For the reclaim that is about to be made: it goes on with this."""
        begun, self.begun = self.begun, None
        if begun is not None:
            for one in begun.part.victims:
                one.orders = [order for order in chain(*begun.stages) if order.client in one.engine.clients]
        return begun


def gpus_of(part: FirstPart) -> frozenset[GpuIndex]:
    return frozenset(part.wanted).union(*(one.engine.gpus for one in part.victims))


def is_within(wanted: dict[GpuIndex, int], missing: dict[GpuIndex, int]) -> bool:
    return all(count <= missing.get(gpu, 0) for gpu, count in wanted.items())


def lengths(victims: list[Victims]) -> list[tuple[Engine, int]]:
    return [(one.engine, len(one.columns)) for one in victims]
