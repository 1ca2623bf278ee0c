"""`valve replay eviction`: the page of the eviction experiment (tools/sim/eviction.py runs it)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from valve_tools.replay import svg
from valve_tools.replay.report import Cell, Chart, Report, ReportTable
from valve_tools.replay.work import TellProgress, Workers, spread
from valve_tools.sim.eviction import (
    BOUND,
    LEAST_CUT,
    MAIN_HANDLE_MIB,
    PRODUCT,
    RIVALS,
    EvictionPlan,
    EvictionResult,
    Which,
    claims_of,
    run_eviction,
    run_part,
)

ALLOCATORS = ("affine", "stock")


def run(traces: Path | None, seeds: Sequence[int], progress: TellProgress, workers: Workers, share: float) -> Report:
    """`share` below 1: a smoke run of some cells, for so much of the time."""
    plan = smoke_plan(share) if share < 1 else EvictionPlan()
    worked_off = partial(spread, run_part, progress=progress, workers=workers, label="eviction")
    return report(run_eviction(traces, seeds, plan, worked_off))


def smoke_plan(share: float) -> EvictionPlan:
    """Six cells of two reclaims and one handle size, after so much of the churn; a minute at least of each."""
    plan = EvictionPlan()
    return replace(
        plan,
        intervals_s=plan.intervals_s[1:4:2],
        sizes=plan.sizes[1::2],
        other_handles_mib=(),
        churn_s=max(60.0, share * plan.churn_s),
        reclaims=2,
        min_s=60.0,
    )


def from_data(data: Mapping[str, Any]) -> Report:
    """The same page from the figures of an `eviction.json`."""
    result = msgspec.convert({**data, "claims": []}, EvictionResult)
    return report(replace(result, claims=claims_of(result)))


def report(result: EvictionResult) -> Report:
    """Also for a result that was computed elsewhere."""
    return Report(
        name="eviction",
        title="Eviction: which columns to take, and in which order blocks are handed out",
        summary=(
            "An engine with a full pool loses a share of it again and again and gets it back five seconds later. "
            "Loss is against the same engine left alone; the cut against FIFO on the same allocator, affine (column by "
            "column) or stock (a queue). Claims are judged by the worse end of the 95 % interval over the seeds. "
            f"Lengths: {result.lengths}." + ("" if len(result.seeds) > 1 else " One seed: there is no interval."),
        ),
        claims=result.claims,
        tables=(
            _policies(result),
            *(_grid(result, allocator) for allocator in ALLOCATORS),
            _handle_sizes(result),
        ),
        charts=tuple(_chart(result, allocator) for allocator in ALLOCATORS),
        data=dataclasses.asdict(result),
        seeds=result.seeds,
    )


def _chart(result: EvictionResult, allocator: str) -> Chart:
    cut = result.over_seeds(Which(policy=PRODUCT, allocator=allocator), "reduction")
    every, sizes = _axes(cut)
    return Chart(
        title=f"Throughput loss cut against FIFO, {allocator} hand-out",
        svg=svg.heatmap(
            [f"every {interval_s} s" for interval_s in every],
            [f"{size:.0%}" for size in sizes],
            [[100 * cut[interval_s, size].mean for size in sizes] for interval_s in every],
            unit="% of FIFO's loss",
        ),
        note="Columns: share of the pool taken.",
    )


def _grid(result: EvictionResult, allocator: str) -> ReportTable:
    """FIFO's loss, ours, the cut with half its interval, and what the smaller pool costs whatever is chosen."""
    fifo, ours, least = (
        result.over_seeds(Which(policy=policy, allocator=allocator), "loss") for policy in ("fifo", PRODUCT, BOUND)
    )
    cut = result.over_seeds(Which(policy=PRODUCT, allocator=allocator), "reduction")
    every, sizes = _axes(fifo)

    def cell(key: tuple[int, float]) -> str:
        losses = f"{100 * fifo[key].mean:.1f} → {100 * ours[key].mean:.1f}"
        smaller = f" [{100 * least[key].mean:.1f}]" if least else ""
        half = f" ± {100 * cut[key].half:.0f}" if cut[key].n > 1 else ""
        return f"{losses} ({100 * cut[key].mean:.0f}{half}){smaller}"

    return ReportTable(
        title=f"Loss of throughput, {allocator} hand-out, %",
        columns=("every", *(f"{size:.0%} taken" for size in sizes)),
        rows=tuple((f"{interval_s} s", *(cell((interval_s, size)) for size in sizes)) for interval_s in every),
        note="FIFO → ours (cut against FIFO, ± half its 95 % interval) [what a smaller pool alone costs]. Marked: "
        "FIFO loses more than 2 % and the worse end of the cut is under its mark.",
        marks=frozenset(
            (i, 1 + j)
            for i, interval_s in enumerate(every)
            for j, size in enumerate(sizes)
            if fifo[interval_s, size].mean > 0.02 and cut[interval_s, size].low < LEAST_CUT
        ),
    )


def _policies(result: EvictionResult) -> ReportTable:
    rows = []
    for rival in RIVALS:
        row: list[Cell] = [rival.name]
        for allocator in ALLOCATORS:
            which = Which(policy=rival.name, allocator=allocator)
            for figure in ("loss", "reduction"):
                found = result.median_over_seeds(which, figure)
                half = 100 * found.half if found and found.n > 1 else None
                row += [100 * found.mean if found else None, half]
        rows.append(tuple(row))
    heads = (f"{allocator}: {figure}" for allocator in ALLOCATORS for figure in ("loss %", "cut %"))
    gaps = result.greedy_over_exact
    return ReportTable(
        title="Median over the cells, mean over the seeds",
        columns=("policy", *(head for name in heads for head in (name, "±"))),
        rows=tuple(rows),
        note=f"Greedy over the exact optimum on {len(gaps)} small cases: median {float(np.median(gaps)):.3f}, worst "
        f"{max(gaps):.3f}.",
    )


def _handle_sizes(result: EvictionResult) -> ReportTable:
    """FIFO and ours, medians over the cells that were run with every size."""
    rows = []
    for mib in sorted({cell.handle_mib for cell in result.cells}):
        found = [
            result.median_over_seeds(Which(policy=policy, handle_mib=mib), figure)
            for policy, figure in (("fifo", "loss"), (PRODUCT, "loss"), (PRODUCT, "reduction"))
        ]
        rows.append((f"{mib} MiB", *(100 * one.mean if one else None for one in found)))
    return ReportTable(
        title="Handle sizes, affine hand-out",
        columns=("handle", "FIFO loses %", "ours loses %", "cut %"),
        rows=tuple(rows),
        note=f"Medians; {MAIN_HANDLE_MIB} MiB over the whole grid, the others over every second interval and size.",
    )


def _axes(cells: Mapping[tuple[int, float], object]) -> tuple[list[int], list[float]]:
    return sorted({interval_s for interval_s, _ in cells}), sorted({size for _, size in cells})
