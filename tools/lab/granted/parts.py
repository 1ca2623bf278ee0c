"""Which traces are swept, so much of each, and the work spread over processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from valve_tools.lab.granted.engine import Bench, Load
from valve_tools.lab.granted.sweep import COSTS_MS, GAPS_MS, OURS, TARGETS, CellResult, sweep
from valve_tools.replay.code import sources_of
from valve_tools.replay.work import Workers, silent, spread
from valve_tools.sim.generator import generate
from valve_tools.sim.traces import NS, Trace, TraceError, read_file

Gaps = tuple[float | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """So much of a trace from `start_s` on, thinned to one replica's share."""

    trace: str
    thin: int = 1
    start_s: float = 0.0
    seconds: float
    think_s: float | None = None
    """A closed loop with so long a pause between two rounds."""

    @property
    def label(self) -> str:
        return self.trace if self.thin == 1 else f"{self.trace}/{self.thin}"

    def of(self, trace: Trace, seed: int) -> Load:
        """Seed n: the n-th replica's share where several share the trace, the n-th stretch elsewhere."""
        share, stretch = (seed - 1, 0) if self.thin > 1 else (0, seed - 1)
        begins = int((self.start_s + stretch * self.seconds) * NS)
        keep = slice(share % self.thin, None, self.thin)
        at = trace.arrive_ns[keep] - begins
        inside = (at >= 0) & (at < int(self.seconds * NS))
        if not inside.any():
            raise TraceError(f"{trace.name} holds no request for seed {seed} in {self.seconds:g} s")
        part = replace(
            trace,
            arrive_ns=at[inside],
            in_tok=trace.in_tok[keep][inside],
            out_tok=trace.out_tok[keep][inside],
            thin=self.thin,
        )
        return Load.of(part, self.seconds, self.think_s and self.think_s * 1e3)


PARTS = (
    Part(trace="azure2023_conv_first2100s", thin=16, seconds=700),
    Part(trace="azure2023_conv_first2100s", thin=4, seconds=400),
    Part(trace="azure2023_code_first2100s", thin=4, seconds=1050),
    Part(trace="inst02_deepseekr1_c65_t0", start_s=12600, seconds=1200),
    Part(trace="mooncake_conv_first2100s", thin=8, seconds=600),
    Part(trace="inst06_msmall_c31_t432000", seconds=400),
    Part(trace="inst07_msmall_c18_t561600", start_s=16800, seconds=300),
    Part(trace="inst10_msmall_c7_t129600", seconds=600),
    Part(trace="rl_rollout_p180", seconds=720, think_s=60),
)
"""So long that one GPU sees some hundred requests, and so short that all of it takes minutes. inst02 and inst07 begin
where they are busy: the first hours hold a handful of requests, too few for a trial."""
QUICK = (("chat", 1, 400.0), ("tiny", 1, 300.0), ("rollout", 1, 600.0))
QUICK_COSTS_MS = (0.5, 4.0)
ROW = (2.0, 100.0, 0.5)
"""Target, gap and cost of the row that more seeds are run for."""
SEEDS, ROW_SEEDS = 2, 5
"""Of a page: for every cell, and for that row."""


def load_of(folder: Path, part: Part, seed: int = 1) -> Load:
    file = next(
        (folder / f"{part.trace}{end}" for end in (".csv.gz", ".csv") if (folder / f"{part.trace}{end}").is_file()),
        None,
    )
    trace = read_file(file) if file is not None else None
    if not isinstance(trace, Trace):
        raise TraceError(f"{folder} holds no request trace {part.trace}")
    return part.of(trace, seed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Cells of one load: one load a seed."""

    loads: tuple[Load, ...]
    costs: tuple[float, ...] = COSTS_MS
    targets: tuple[float, ...] = TARGETS
    gaps: Gaps = GAPS_MS

    def run(self) -> list[CellResult]:
        return sweep(self.loads, Bench.h100(), self.costs, self.targets, self.gaps)


def swept(folder: Path, parts: Sequence[Part], seeds: int, row_seeds: int, jobs: int) -> dict[str, list[CellResult]]:
    """All cells of these parts, and the row that more seeds are run for."""
    target, gap, cost_ms = ROW
    tasks, rows = [], []
    for part in parts:
        loads = tuple(load_of(folder, part, seed) for seed in range(1, max(seeds, row_seeds) + 1))
        tasks.append(Task(loads=loads[:seeds]))
        rows.append(Task(loads=loads[:row_seeds], costs=(cost_ms,), targets=(target,), gaps=(gap,)))
    return {"cells": figures(tasks, jobs), "row": [cell for cell in figures(rows, jobs) if cell.rule == OURS]}


def figures(tasks: Sequence[Task], jobs: int) -> list[CellResult]:
    found = spread(Task.run, tasks, silent, Workers(processes=jobs))
    return [cell for cells in found for cell in cells]


def quick() -> list[CellResult]:
    """A part of the sweep over generated traces: what a test can wait for."""
    traces = {trace.name: trace for trace in generate().traces}
    loads = [Load.of(traces[name].thinned(thin), seconds) for name, thin, seconds in QUICK]
    return figures([Task(loads=(load,), costs=QUICK_COSTS_MS, gaps=(100.0,)) for load in loads], 1)


def sources() -> str:
    """A hash of what decided and simulated: another word about it, or another page of it, makes no figure stale."""
    return sources_of(__name__)
