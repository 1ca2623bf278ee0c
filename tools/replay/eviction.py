"""`valve replay eviction`: the page of the eviction experiment (tools/sim/eviction.py runs it)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from valve_tools.replay import svg
from valve_tools.replay.report import Chart, Claim, Report, Table
from valve_tools.replay.work import Progress, Workers, spread
from valve_tools.sim.eviction import PRODUCT, RIVALS, CellResult, EvictionResult, Part, run_eviction, run_part


def run(traces: Path | None, seeds: Sequence[int], progress: Progress, workers: Workers | None = None) -> Report:
    def worked_off(parts: list[Part]) -> list[list[CellResult]]:
        return spread(run_part, parts, progress, workers or Workers(), label="eviction")

    return report(run_eviction(traces, seeds, worked_off))


def report(result: EvictionResult) -> Report:
    """Also for a result that was computed elsewhere."""
    return Report(
        name="eviction",
        title="Eviction: which columns to take, and in which order blocks are handed out",
        summary=(
            "An engine with a full pool loses a share of it again and again and gets it back five seconds later. "
            f"Loss is against the same engine left alone; reduction against FIFO on the same allocator. "
            f"Lengths: {result.lengths}.",
        ),
        claims=tuple(
            Claim(claim=one.claim, pair="eviction", value=one.value, bound=one.bound, ok=one.ok)
            for one in result.claims
        ),
        tables=(_policies(result), *(_losses(result, allocator) for allocator in ("affine", "stock"))),
        charts=tuple(_grid(result, allocator) for allocator in ("affine", "stock")),
        data=dataclasses.asdict(result),
        seeds=result.seeds,
    )


def _grid(result: EvictionResult, allocator: str) -> Chart:
    cut = result.reductions(allocator)
    every = sorted({interval for interval, _ in cut})
    sizes = sorted({size for _, size in cut})
    values = [[100 * cut[interval, size] for size in sizes] for interval in every]
    names = [f"{size:.0%}" for size in sizes]
    return Chart(
        title=f"Throughput loss cut against FIFO, {allocator} hand-out",
        svg=svg.heatmap([f"every {interval} s" for interval in every], names, values, unit="% of FIFO's loss"),
        note="Columns: share of the pool taken.",
    )


def _losses(result: EvictionResult, allocator: str) -> Table:
    fifo, ours = result.losses(allocator), result.losses(allocator, policy=PRODUCT)
    rows = tuple((f"{interval} s", f"{size:.0%}", 100 * fifo[interval, size], 100 * ours[interval, size])
                 for interval, size in sorted(fifo))  # fmt: skip
    return Table(
        title=f"Loss of throughput, {allocator} hand-out", columns=("every", "taken", "FIFO %", "ours %"), rows=rows
    )


def _policies(result: EvictionResult) -> Table:
    keys = sorted({(cell.allocator, cell.handle_mib) for cell in result.cells})
    rows = []
    for rival in RIVALS:
        losses = [list(result.losses(*key, rival.name).values()) for key in keys]
        rows.append((rival.name, *(100 * float(np.median(found)) if found else None for found in losses)))
    return Table(
        title="Median loss over all cells, %",
        columns=("policy", *(f"{allocator} {mib} MiB" for allocator, mib in keys)),
        rows=tuple(rows),
        note=f"Greedy over the exact optimum on {len(result.greedy_over_exact)} small cases: worst "
        f"{max(result.greedy_over_exact):.3f}.",
    )
