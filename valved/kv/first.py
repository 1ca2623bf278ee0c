"""What the next reclaim takes first: chosen and packed by a look, so that the need itself only sends it.

Most of the time from a need to its first order goes into code that has not run for a while. A look knows which columns
go first if a service needs more than is free. While those are being taken, the rest is decided and planned.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain

from valved.abi.kv_link import KvHow
from valved.kv.books import KvBooks
from valved.kv.engines import STALE_NS, Engine
from valved.kv.moves import Moves
from valved.kv.orders import Order
from valved.kv.slots import Ints
from valved.kv.supply import Supply
from valved.kv.turn import GateTurn
from valved.kv.victims import Victims, choose
from valved.kv.ways import Ways
from valved.machine.clock import Clock
from valved.model.ids import GpuIndex, Remap
from valved.policy.eviction import EvictionSettings

SIZES = (32, 8)
"""Handles of each GPU. To take the most of these that are needed lasts longer than to decide on the rest."""


@dataclass(slots=True, kw_only=True, eq=False)
class First:
    """It stands in no book before it is sent."""

    above_blocks: int  # a wish for more takes all of it
    gpus: frozenset[GpuIndex]
    victims: list[Victims]
    handles: dict[GpuIndex, int]
    began_ns: int = 0
    told_ns: int = 0
    orders: list[Order] = field(default_factory=list)


@dataclass(slots=True, kw_only=True, eq=False)
class Foreseen:
    """By a look, for the next need of an engine."""

    engine: Engine
    had_blocks: int  # a wish for more stops ...
    gpus: frozenset[GpuIndex]  # ... these
    losers: list[Engine]
    firsts: list[First] = field(default_factory=list)  # the largest first, and what they are good for: as long as ...
    made_by: object = None  # ... this stays


@dataclass(eq=False, repr=False)
class Firsts:
    _books: KvBooks
    _supply: Supply
    _turn: GateTurn
    _ways: Ways
    _moves: Moves
    _clock: Clock
    _costs: EvictionSettings
    sizes: tuple[int, ...] = SIZES

    def __post_init__(self) -> None:
        self._sent: First | None = None  # no reclaim has taken it over yet

    def would_stop(self, gpus: frozenset[GpuIndex]) -> frozenset[GpuIndex]:
        """What a reclaim of memory that is missing there stops; nothing where no engine loses any in such a way."""
        engines = self._supply.losers(gpus)
        if not engines or self._ways.way_of(engines) is Remap.COOPERATIVE:
            return frozenset()
        return gpus.union(*(engine.gpus for engine in engines))

    def foreseen_by(self, engine: Engine) -> object:
        """What that goes by, beside the columns that are free. To be compared."""
        losers = self._supply.losers(engine.gpus)
        ways = [(one.gpus, one.changes, one.queue, self._ways.way_of([one])) for one in losers]
        return engine.changes, self._supply.within_reach(engine), ways

    def foresee(self, engine: Engine, mapped: int, free: int, most: int) -> Foreseen | None:
        """For a need of more columns than are mapped and free. `most`: that it could get."""
        bare, within_reach = engine.bare_columns(), self._supply.within_reach(engine)
        gpus = self.would_stop(frozenset(_missing(engine, bare[: free + 1], within_reach)))
        if most <= free or not gpus:
            return None
        losers, had_blocks = self._supply.losers(engine.gpus), (mapped + free) * engine.blocks_per_column
        seen = Foreseen(engine=engine, had_blocks=had_blocks, gpus=gpus, losers=losers)
        for columns in sorted({free - (-size // engine.handles_per_column) for size in self.sizes}, reverse=True):
            missing = _missing(engine, bare[:columns], within_reach)
            if columns <= most and all(one.is_queue_new for one in losers):  # to make one takes long
                victims = choose(self._supply.losers(missing), missing, self._costs)
                above_blocks = (mapped + columns - 1) * engine.blocks_per_column
                handles = {gpu: sum(one.engine.handles_in(one.columns, gpu) for one in victims) for gpu in gpus}
                for one in victims:
                    one.plan = self._moves.plan_taking(one.engine, one.columns, KvHow.AT_STEP)  # in one stage
                seen.firsts.append(First(above_blocks=above_blocks, gpus=gpus, victims=victims, handles=handles))
        seen.made_by = self._made_by(seen)
        return seen

    def _made_by(self, seen: Foreseen) -> object:
        ways = [(one.changes, self._ways.way_of([one])) for one in seen.losers]
        return seen.engine.changes, self._supply.within_reach(seen.engine), ways

    def send(self, seen: Foreseen, wanted_blocks: int) -> None:
        """Precondition: its GPUs are held for it, and no other reclaim is under way. Not where anything has changed, or
        something does not stand yet."""
        first = next((one for one in seen.firsts if wanted_blocks > one.above_blocks), None)
        if first is None or self._supply.oldest is not None or not self._turn.are_proven(seen.gpus):
            return
        now_ns = self._clock.now_ns()
        if all(self._may_take(one.engine, now_ns) for one in first.victims) and seen.made_by == self._made_by(seen):
            self._sent, first.began_ns = first, now_ns
            self._supply.ordered = first.handles
            for one in first.victims:
                self._moves.lose(one.engine, one.columns)
            first.told_ns = self._clock.now_ns()
            stages = chain(*(one.plan.stages for one in first.victims if one.plan is not None))
            try:
                first.orders = self._moves.take(chain(*stages), KvHow.AT_ONCE)
            except Exception:
                clients = frozenset(chain(*(one.engine.ranks for one in first.victims)))
                first.orders = self._books.orders.leaving(clients)
                raise

    def _may_take(self, engine: Engine, now_ns: int) -> bool:
        return self._books.may_take(engine) and (engine.indexed_ns + STALE_NS >= now_ns or engine.is_index_new)

    def take_over(self) -> First | None:
        """What was sent is the caller's from now on."""
        first, self._sent = self._sent, None
        self._supply.ordered = {}
        if first is not None:
            for one in first.victims:
                one.orders = [order for order in first.orders if order.client in one.engine.ranks]
                one.engine.leave_queue(one.columns)
        return first


def _missing(engine: Engine, columns: Ints, within_reach: Mapping[GpuIndex, int]) -> dict[GpuIndex, int]:
    lacking = engine.lacking(columns)
    return {gpu: count - within_reach[gpu] for gpu, count in lacking.items() if count > within_reach[gpu]}
