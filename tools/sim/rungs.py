"""The ways in which the product takes memory from an offline process, as settings of a simulated world.

What a way asks of the engines comes from the product (`valved.kv.rungs`, `valved.config`). What taking a handle costs
is measured: docs/results/memory.md, one column of 1 GiB in handles of 16 MiB, own share and driver time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from valve_tools.sim.machine import Settings, timing
from valve_tools.sim.world import OfflineSide, train_step_ns

from valved.config import Config
from valved.kv.beside import LET_REST_NS
from valved.kv.rungs import step_tokens
from valved.model.ids import Remap

MEASURED_HANDLES = 64
"""In the column that was measured."""
TAKE_MS = {Remap.SPARSE: 5.7 + 5.1, Remap.HELPER: 6.1 + 9.3, Remap.COOPERATIVE: 6.1 + 9.3}
"""A column from an offline process to an online one; cooperative sends the orders that helper sends."""
MAP_NS = 40_000
"""A free handle."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RungTimes:
    """One way on one machine, for columns of so many handles."""

    take_ns: int
    map_ns: int
    pressure_ratio: float
    step_tokens: int = 0
    """An offline step has at most so many; 0: nothing is asked."""
    let_ns: int = 0
    """How long a step runs at a time while a request waits for the memory; 0: memory is taken under the gate."""


def rung_of(way: Remap, handles: int, config: Config | None = None) -> RungTimes:
    """By the product's settings; `auto` is what a process that has passed its trial gets."""
    table = (config or Config()).memory
    way = Remap.SPARSE if way is Remap.AUTO else way
    rung = RungTimes(
        take_ns=round(handles * TAKE_MS[way] * 1e6 / MEASURED_HANDLES),
        map_ns=handles * MAP_NS,
        pressure_ratio=table.pressure_ratio,
    )
    if way is not Remap.COOPERATIVE:
        return rung
    return replace(
        rung,
        pressure_ratio=min(table.pressure_ratio, table.cooperative_ratio),
        step_tokens=step_tokens(table),
        let_ns=round(table.let_ms * 1e6),
    )


def cut(job: OfflineSide, tokens: int) -> OfflineSide:
    """The job with steps of at most so many tokens; a training step has no such limit."""
    return job if job.is_training or not tokens else replace(job, budget_tokens=min(job.budget_tokens, tokens))


def step_ns(job: OfflineSide, settings: Settings) -> int:
    """The longest step of the job: what a request may have to wait for."""
    if job.is_training:
        return train_step_ns(job, settings.gpu)
    engine = timing(job.model, job.tp, settings, budget_tokens=job.budget_tokens, max_seqs=settings.offline_max_seqs)
    linear = engine.prefill_token_ns * job.budget_tokens
    return round(max(engine.base_ns, linear) + engine.fixed_ns + engine.seq_ns * engine.max_seqs)


def waited_ns(left_ns: float, let_ns: int) -> int:
    """Until a step is over that has `left_ns` left: beside online work it takes twice as long, and only so much of it
    is let run at a time, with rests between."""
    beside = 2 * left_ns
    lets = math.ceil(beside / let_ns) if let_ns else 1
    return round(beside) + max(0, lets - 1) * LET_REST_NS
