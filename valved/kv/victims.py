"""Chooses the engines that lose columns: the eviction policy over several engines and GPUs at once.

A column of a tensor-parallel engine frees handles on each of its GPUs, so columns are taken until the GPU that misses
most is served. The greedy order of an engine is the policy's; how engines are merged, and its end, is decided here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from valved.kv.columns import Queue, queue_of
from valved.kv.engines import Engine
from valved.kv.moves import MovePlan
from valved.kv.orders import Order
from valved.kv.slots import Ints
from valved.model.ids import GpuIndex
from valved.model.memory import ColumnPick, EvictionCost, ReclaimDecision
from valved.policy.eviction import EvictionSettings, decision_of


@dataclass(slots=True, kw_only=True)
class Victims:
    engine: Engine
    columns: Ints
    picks: tuple[ColumnPick, ...]
    cost: EvictionCost
    freed: int
    plan: MovePlan | None = None
    orders: list[Order] = field(default_factory=list)

    @property
    def decision(self) -> ReclaimDecision:
        return decision_of("selective", self.cost, list(self.picks), self.freed, self.freed)


@dataclass(slots=True, kw_only=True)
class Stream:
    """The columns of one engine in the order in which the policy would take them, and how many are taken."""

    engine: Engine
    queue: Queue
    gains: dict[GpuIndex, Ints]  # handles of each pick
    taken: int = 0

    def price(self, left: dict[GpuIndex, int]) -> float:
        """Of the next column, for each handle that is still missing; infinite if there is none to gain."""
        if self.taken == len(self.queue.picks):
            return math.inf
        gain = sum(min(int(gains[self.taken]), max(0, left[gpu])) for gpu, gains in self.gains.items())
        return self.queue.picks[self.taken].marginal_cost / gain if gain else math.inf

    def take(self, left: dict[GpuIndex, int]) -> None:
        for gpu, gains in self.gains.items():
            left[gpu] -= int(gains[self.taken])
        self.taken += 1

    def victims(self) -> Victims:
        freed = sum(int(gains[: self.taken].sum()) for gains in self.gains.values())
        return _victims(self.engine, self.queue, self.taken, freed)


def choose(engines: Iterable[Engine], missing: dict[GpuIndex, int], settings: EvictionSettings) -> list[Victims]:
    """The cheapest handles first, whose they may be: the engines' greedy orders, merged by cost for each handle."""
    able: list[tuple[Engine, Queue, dict[GpuIndex, int]]] = []
    for engine in engines:
        wanted = {gpu: count for gpu, count in missing.items() if count > 0 and gpu in engine.gpus}
        able += [(engine, _queue(engine, wanted, settings), wanted)] if wanted else []
    if len(able) == 1:  # as a rule
        engine, queue, wanted = able[0]
        taken, freed = engine.gains.reach(queue.columns, wanted)
        return [_victims(engine, queue, taken, freed)] if taken else []
    streams = [
        Stream(engine=engine, queue=queue, gains={gpu: engine.handles_of(gpu)[queue.columns] for gpu in wanted})
        for engine, queue, wanted in able
    ]
    streams.sort(key=lambda one: (-int(one.engine.takeable().sum()), one.engine.service))
    left = dict(missing)
    while streams and any(count > 0 for count in left.values()):
        best = min(streams, key=lambda stream: stream.price(left))  # of equals the richest
        if math.isinf(best.price(left)):
            break
        best.take(left)
    return [stream.victims() for stream in streams if stream.taken]


def joined(first: list[Victims], later: list[Victims]) -> list[Victims]:
    """Each engine once."""
    of = {one.engine: one for one in first}
    for one in later:
        if (before := of.get(one.engine)) is not None:
            one.columns, one.picks = np.concatenate([before.columns, one.columns]), before.picks + one.picks
            one.freed, one.orders = before.freed + one.freed, before.orders + one.orders
        of[one.engine] = one
    return list(of.values())


def _victims(engine: Engine, queue: Queue, taken: int, freed: int) -> Victims:
    return Victims(
        engine=engine,
        columns=queue.columns[:taken],
        picks=queue.picks[:taken],
        cost=queue.index.cost,
        freed=freed,
    )


def _queue(engine: Engine, wanted: dict[GpuIndex, int], settings: EvictionSettings) -> Queue:
    if engine.index is None:
        engine.index_now(settings, 0)
    assert engine.index is not None
    most = 0
    for gpu, count in wanted.items():
        most = max(most, -(-count // engine.least_handles[gpu]))
    handles = min(most, engine.columns) * engine.column_handles
    queue, takeable = engine.queue, engine.takeable()
    if queue is None or not queue.serves(engine.index, takeable, handles):
        queue = engine.queue = queue_of(engine.index, takeable, handles)
    return queue
