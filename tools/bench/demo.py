"""Bench `demo-interference`: what offline work costs an online service, and what it gets (promises P1, P2, P5).

The same arrivals alone and beside offline work, in turn, on one emulated GPU. A latency figure is judged against P5 or,
where that is wider, against the difference between the runs alone of this very call: what the machine cannot tell apart
is no cost. Both are printed.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from valve_tools.bench.row import Row, row_of
from valve_tools.demo.command import perform
from valve_tools.demo.figures import DemoRun, harvested_share, pooled, spread
from valve_tools.demo.rounds import RoundsPlan

NAME = "demo-interference"
P5_PERCENT = {"ttft-mean": 2.5, "ttft-p99": 5.0, "tpot-mean": 1.0, "tpot-p99": 2.0}
PLAN = RoundsPlan(seconds=20.0, rounds=3, ungated=False)


def bench_interference() -> Iterator[Row]:
    with tempfile.TemporaryDirectory(prefix="valve-bench-") as folder:
        runs, units_per_s = perform(PLAN, Path(folder), quiet=True)
    yield from latency_rows(runs)
    yield single("harvested", "share of idle beyond cooldown", harvested_share(runs, units_per_s), 0.8, better="higher")
    gates = [gate for run in runs for gate in run.gates]
    yield row_of(NAME, "stopped", "ms, launch to offline stopped", [gate.total_ms for gate in gates], 1.0)
    most = [run.most_per_request for run in runs if run.most_per_request is not None]
    yield single("preemptions-per-request", "most of any request", float(max(most, default=0)), 1.0)
    wrong = sum(run.offline_ok is False for run in runs)
    yield single("offline-output", "runs with a wrong checksum", float(wrong), 0.0)


def latency_rows(runs: list[DemoRun]) -> Iterator[Row]:
    over, noise = pooled(runs, "valve").over(pooled(runs, "alone")), spread(runs, "alone")
    for figure, bound in P5_PERCENT.items():
        note = f"P5 allows {bound} %, runs alone differ by {noise[figure]:.1f} %"
        yield single(figure, "% over alone", over[figure], max(bound, noise[figure]), baseline=noise[figure], note=note)


def single(metric: str, unit: str, value: float, budget: float, **more: object) -> Row:
    """A figure that is one number for the whole run, not a distribution."""
    return Row(
        name=NAME,
        metric=metric,
        unit=unit,
        p50=value,
        p99=value,
        max=value,
        n=1,
        budget=budget,
        **more,  # type: ignore[arg-type]
    )


BENCHES: dict[str, Callable[[], Iterable[Row]]] = {NAME: bench_interference}
