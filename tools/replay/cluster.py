"""`valve replay cluster`: the page of the cluster experiment (tools/sim/cluster.py runs it)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from valve_tools.replay import svg
from valve_tools.replay.report import Chart, Claim, Report, Table
from valve_tools.replay.work import Progress, Workers, spread
from valve_tools.sim.cluster import ClusterResult, Part, WeekResult, run_cluster, run_part
from valve_tools.sim.metrics import interval

COLUMNS = {
    "gain": "gain, share of GPU time",
    "gain_of_idle": "of idle time",
    "saved_of_fleet": "saved, share of fleet",
    "saved_per_harvested": "saved per harvested",
    "missed_hours": "SLA missed, share of job-hours",
    "misses_per_job_day": "misses per job-day",
    "moves_per_job_day": "moves per job-day",
    "mape": "error at placement (MAPE)",
    "model_error": "of the model told the load",
    "calibrated_error": "calibrated",
    "decision_p50_ms": "decision P50 ms",
    "decision_p99_ms": "decision P99 ms",
}


def run(traces: Path | None, seeds: Sequence[int], progress: Progress, workers: Workers | None = None) -> Report:
    def worked_off(parts: list[Part]) -> list[list[WeekResult]]:
        return spread(run_part, parts, progress, workers or Workers(), label="cluster")

    return report(run_cluster(traces, seeds, worked_off), seeds)


def report(result: ClusterResult, seeds: Sequence[int]) -> Report:
    """Also for a result that was computed elsewhere."""
    demands = sorted({week.demand for week in result.weeks})
    names = list(dict.fromkeys(week.scheduler for week in result.weeks))
    return Report(
        name="cluster",
        title="Cluster: a week of 8,000 GPUs",
        summary=(
            f"Five schedulers place offline jobs beside {result.source}, at three levels of offline demand; the claims "
            f"are judged by the worse seed. {result.borrowed_lengths} services borrow their request lengths.",
        ),
        claims=tuple(
            Claim(claim=one.claim, pair="cluster", value=one.value, bound=one.bound, ok=one.ok)
            for one in result.claims
        ),
        tables=tuple(_table(result, demand, names) for demand in demands),
        charts=tuple(
            Chart(title=title, svg=svg.grouped_bars([f"demand {demand:g}" for demand in demands],
                                                    _series(result, names, demands, figure), unit=unit))
            for title, figure, unit in (
                ("GPUs saved", "saved_of_fleet", "share of the fleet"),
                ("Utilisation gain", "gain", "share of GPU time"),
                ("Job-hours that missed their SLA", "missed_hours", "share"),
            )
        ),
        data=dataclasses.asdict(result),
        seeds=tuple(seeds),
    )  # fmt: skip


def _mean(weeks: Sequence[WeekResult], figure: str) -> float | None:
    return interval([getattr(week, figure) for week in weeks]).mean if weeks else None


def _of(result: ClusterResult, name: str, demand: float) -> list[WeekResult]:
    return [week for week in result.weeks if (week.scheduler, week.demand) == (name, demand)]


def _series(
    result: ClusterResult, names: Sequence[str], demands: Sequence[float], figure: str
) -> dict[str, list[float | None]]:
    return {name: [_mean(_of(result, name, demand), figure) for demand in demands] for name in names}


def _table(result: ClusterResult, demand: float, names: Sequence[str]) -> Table:
    rows = [(name, *(_mean(_of(result, name, demand), figure) for figure in COLUMNS)) for name in names]
    return Table(title=f"Demand {demand:g} of supply", columns=("scheduler", *COLUMNS.values()), rows=tuple(rows))
