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

    def take_all(self, left: dict[GpuIndex, int]) -> None:
        """As far as anything is missing: what `price` and `take` do one by one, for an engine that has no rival."""
        brings = np.zeros(len(self.queue.picks) + 1, np.bool_)  # the last one is no pick
        for gpu, gains in self.gains.items():
            brings[:-1] |= (gains > 0) & (gains.cumsum() - gains < left[gpu])
        self.taken = int(brings.argmin())

    def take(self, left: dict[GpuIndex, int]) -> None:
        for gpu, gains in self.gains.items():
            left[gpu] -= int(gains[self.taken])
        self.taken += 1

    def victims(self) -> Victims:
        return Victims(
            engine=self.engine,
            columns=self.queue.columns[: self.taken],
            picks=self.queue.picks[: self.taken],
            cost=self.queue.index.cost,
            freed=sum(int(gains[: self.taken].sum()) for gains in self.gains.values()),
        )


def choose(engines: Iterable[Engine], missing: dict[GpuIndex, int], settings: EvictionSettings) -> list[Victims]:
    """The cheapest handles first, whose they may be: the engines' greedy orders, merged by cost for each handle."""
    streams: list[Stream] = []
    for engine in engines:
        wanted = {gpu: count for gpu, count in missing.items() if count > 0 and gpu in engine.gpus}
        streams += [_stream(engine, wanted, settings)] if wanted else []
    left = dict(missing)
    if len(streams) == 1:
        streams[0].take_all(left)
    else:
        streams.sort(key=lambda one: (-int(one.engine.takeable().sum()), one.engine.service))
    while len(streams) > 1 and any(count > 0 for count in left.values()):
        best = min(streams, key=lambda stream: stream.price(left), default=None)  # of equals the richest
        if best is None or math.isinf(best.price(left)):
            break
        best.take(left)
    return [stream.victims() for stream in streams if stream.taken]


def _stream(engine: Engine, wanted: dict[GpuIndex, int], settings: EvictionSettings) -> Stream:
    if engine.index is None:
        engine.put_index(engine.make_index(settings), engine.view().steps, 0)
    assert engine.index is not None
    most = 0
    for gpu, count in wanted.items():
        most = max(most, -(-count // engine.least_handles[gpu]))
    handles = min(most, engine.columns) * engine.column_handles
    queue, takeable = engine.queue, engine.takeable()
    if queue is None or not queue.serves(engine.index, takeable, handles):
        queue = engine.queue = queue_of(engine.index, takeable, handles)
    gains = {gpu: engine.handles_of(gpu)[queue.columns] for gpu in wanted}
    return Stream(engine=engine, queue=queue, gains=gains)
