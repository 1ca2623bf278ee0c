"""The measured shape of a trace, and which trace a pair gets: by shape alone, never by name.

The shape is what one reference GPU (8B on H100, the service alone) sees of it. Traces that overload the reference are
also offered thinned, as the share of one of several replicas.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from valve_tools.sim.machine import MODELS, blocks_per_handle
from valve_tools.sim.memory_policies import NoShare
from valve_tools.sim.traces import NS, Trace
from valve_tools.sim.world import Compute, OnlineSide, World, run

REFERENCE = OnlineSide(model=MODELS["8B"])
HARVESTABLE_NS = 20_000_000
"""Idle periods above 20 ms count as harvestable."""
THINNING = (4, 8, 16)
OVERLOAD_TTFT_MS = 1000.0
OVERLOAD_BUSY = 0.8
LONGEST_S = 6 * 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadShape:
    harvestable: float
    """Share of time in idle periods above 20 ms."""
    idle_per_hour: float
    kv_peak_tokens: float

    def distance(self, other: LoadShape) -> float:
        """0.1 of harvestable share weighs as much as a factor of 1.5 in idle periods or in KV peak."""
        return math.hypot(
            (self.harvestable - other.harvestable) / 0.1,
            _log_ratio(self.idle_per_hour, other.idle_per_hour),
            _log_ratio(self.kv_peak_tokens, other.kv_peak_tokens),
        )


def _log_ratio(a: float, b: float) -> float:
    return math.log(max(a, 1.0) / max(b, 1.0)) / math.log(1.5)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ShapedTrace:
    trace: Trace
    shape: LoadShape


def window_s(trace: Trace) -> float:
    """All of a short slice or of a sample, six hours of a long one."""
    if trace.sample is not None:
        return trace.sample.seconds
    return min(LONGEST_S, math.floor(trace.duration_s) + 1.0)


def measure(trace: Trace) -> tuple[LoadShape, bool]:
    """The shape, and whether the trace is more than one reference GPU can serve."""
    seconds = window_s(trace)
    world = World(trace=trace, service=REFERENCE, job=None, compute=Compute.ALONE, seconds=seconds)
    result = run(world, NoShare())
    idle = result.idle_ns[:, 1] - result.idle_ns[:, 0]
    per_handle = blocks_per_handle(REFERENCE.model, 1, world.settings) * world.settings.block_tokens
    busy = result.totals["online_busy_ns"] / NS / seconds
    ttft = float(np.nanmean(result.ttft_ms)) if np.isfinite(result.ttft_ms).any() else math.inf
    shape = LoadShape(
        harvestable=float(idle[idle > HARVESTABLE_NS].sum()) / NS / seconds,
        idle_per_hour=len(idle) / seconds * 3600,
        kv_peak_tokens=float(result.usage[:, 1].max(initial=0)) * per_handle,
    )
    return shape, ttft > OVERLOAD_TTFT_MS or busy > OVERLOAD_BUSY


def candidates(traces: Iterable[Trace]) -> list[ShapedTrace]:
    """Every trace, and thinned forms of those that overload the reference; empty traces are left out."""
    found = []
    for trace in traces:
        if trace.requests == 0:
            continue
        shape, is_overload = measure(trace)
        found.append(ShapedTrace(trace=trace, shape=shape))
        if is_overload:
            for thin in THINNING:
                thinned = trace.thinned(thin)
                found.append(ShapedTrace(trace=thinned, shape=measure(thinned)[0]))
    return found


def assign(wanted: Mapping[str, LoadShape], offered: Sequence[ShapedTrace]) -> dict[str, ShapedTrace]:
    """Nearest shapes first, each trace once while there are enough traces, then the nearest again."""
    ranked = sorted(
        (
            (target.distance(candidate.shape), pair, index)
            for pair, target in wanted.items()
            for index, candidate in enumerate(offered)
        ),
    )
    chosen: dict[str, ShapedTrace] = {}
    used: set[str] = set()
    for is_fresh in (True, False):
        for _, pair, index in ranked:
            candidate = offered[index]
            if pair in chosen or (is_fresh and candidate.trace.name in used):
                continue
            chosen[pair] = candidate
            used.add(candidate.trace.name)
    return {pair: chosen[pair] for pair in wanted if pair in chosen}
