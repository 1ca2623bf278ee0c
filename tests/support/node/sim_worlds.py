"""Small worlds for the simulator's tests: round timings, no randomness unless asked for."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from valve_tools.sim.machine import MODELS, Settings
from valve_tools.sim.traces import JobLengths, Trace
from valve_tools.sim.world import Compute, HostGap, OfflineSide, OnlineSide, StopTimes, World

MS = 1_000_000
GAP_MS = 1.0
STOP_MS = 0.5
RESUME_MS = 0.2


def trace_of(rows: Sequence[tuple[float, int, int]], name: str = "made") -> Trace:
    """Rows of (milliseconds, prompt tokens, output tokens)."""
    return Trace(
        name=name,
        arrive_ns=np.array([round(at * MS) for at, _, _ in rows], dtype=np.int64),
        in_tok=np.array([row[1] for row in rows], dtype=np.int64),
        out_tok=np.array([row[2] for row in rows], dtype=np.int64),
    )


def lengths_of(prompt: int, answer: int) -> JobLengths:
    return JobLengths(name="made", in_tok=np.array([prompt]), out_tok=np.array([answer]))


def world_of(rows: Sequence[tuple[float, int, int]], **changes: object) -> World:
    """An 8B service beside an 8B batch job; every host gap is 1 ms, every stop takes 0.5 ms."""
    fields: dict[str, object] = {
        "trace": trace_of(rows),
        "service": OnlineSide(model=MODELS["8B"], gap=HostGap(median_ns=GAP_MS * MS, sigma=0.0)),
        "job": OfflineSide(model=MODELS["8B"], lengths=lengths_of(1000, 200)),
        "settings": Settings(),
        "compute": Compute.CHANNEL,
        "stop": StopTimes(median_ns=STOP_MS * MS, sigma=0.0, max_ns=1e9, resume_ns=int(RESUME_MS * MS)),
        "seconds": 2.0,
        **changes,
    }
    return World(**fields)  # type: ignore[arg-type]
