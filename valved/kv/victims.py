"""Whose columns go: the eviction policy over one or more engines, for handles that several GPUs may miss at once.

A column of a tensor-parallel engine frees handles on each of its GPUs, so columns are taken until the GPU that misses
most is served. The greedy order is the policy's; only its end is decided here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np

from valved.kv.engines import Engine
from valved.kv.orders import Order
from valved.kv.pool import Ints
from valved.model.ids import GpuIndex
from valved.model.memory import ReclaimDecision
from valved.policy.eviction import EvictionSettings, decision_of, select


@dataclass(slots=True, kw_only=True)
class Victims:
    engine: Engine
    columns: Ints
    decision: ReclaimDecision
    orders: list[Order] = field(default_factory=list)


def choose(engines: Iterable[Engine], missing: dict[GpuIndex, int], settings: EvictionSettings) -> list[Victims]:
    """Engines in the order of what they have: the richest gives first, and as a rule it is the only one."""
    left = dict(missing)
    chosen = []
    for engine in sorted(engines, key=lambda one: (-int(one.takeable().sum()), one.service)):
        wanted = {gpu: count for gpu, count in left.items() if count > 0 and gpu in engine.gpus}
        if not wanted:
            continue
        victims = _of_engine(engine, wanted, settings)
        if len(victims.columns):
            chosen.append(victims)
        for gpu in wanted:
            left[gpu] -= int(engine.handles_of(gpu)[victims.columns].sum())
    return chosen


def _of_engine(engine: Engine, wanted: dict[GpuIndex, int], settings: EvictionSettings) -> Victims:
    if engine.index is None:
        engine.refresh_index(settings, 0)
    assert engine.index is not None
    takeable = engine.takeable()
    index = replace(engine.index, column_cost=np.where(takeable, engine.index.column_cost, np.inf))
    most = 0
    for gpu, count in wanted.items():
        per_column = engine.handles_of(gpu)[takeable]
        smallest = int(per_column[per_column > 0].min(initial=count))
        most = max(most, -(-count // max(1, smallest)))
    per_index = int(index.column_map.handles_of_column.max(initial=1))
    picks = select(index, min(most, engine.columns) * per_index).picks
    columns = np.array([pick.column_id for pick in picks], dtype=np.int64)
    enough = 0
    for gpu, count in wanted.items():
        reached = np.cumsum(engine.handles_of(gpu)[columns])
        enough = max(enough, int(np.searchsorted(reached, count)) + 1)
    columns = columns[:enough]
    freed = sum(int(engine.handles_of(gpu)[columns].sum()) for gpu in wanted)
    decision = decision_of("selective", index.cost, list(picks[:enough]), sum(wanted.values()), freed)
    return Victims(engine=engine, columns=columns, decision=decision)
