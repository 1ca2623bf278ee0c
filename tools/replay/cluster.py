"""`valve replay cluster`: the page of the cluster experiment (tools/sim/cluster.py runs it)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from valve_tools.replay import svg
from valve_tools.replay.report import Chart, Report, ReportTable, plus_minus
from valve_tools.replay.work import TellProgress, Workers, spread
from valve_tools.sim.cluster import (
    ClusterPlan,
    ClusterResult,
    WeekResult,
    claims_of,
    over_seeds,
    run_cluster,
    run_part,
    saved_over,
)
from valve_tools.sim.cluster_schedulers import PRODUCT, SCHEDULERS
from valve_tools.sim.metrics import interval

COLUMNS = {
    "gain": ("gain, points", 100.0),
    "gain_of_idle": ("of idle time, %", 100.0),
    "saved_of_fleet": ("saved, % of fleet", 100.0),
    "saved_in_sla_of_fleet": ("of it within SLA", 100.0),
    "saved_per_harvested": ("saved per harvested", 1.0),
    "missed_hours": ("SLA missed, % of job-hours", 100.0),
    "below_hours": ("below it, %", 100.0),
    "misses_per_job_day": ("misses per job-day", 1.0),
    "moves_per_job_day": ("moves per job-day", 1.0),
    "kept": ("promises kept for 3 h, %", 100.0),
    "model_error": ("mean error of the model told the load, %", 100.0),
    "decision_p50_ms": ("decision P50, CPU ms", 1.0),
    "decision_p99_ms": ("P99", 1.0),
}
"""Figure of a week -> (title, scale)."""


def run(traces: Path | None, seeds: Sequence[int], progress: TellProgress, workers: Workers, share: float) -> Report:
    """`share` below 1: a smoke run on so much of the fleet."""
    plan = smoke_plan(share) if share < 1 else ClusterPlan()
    worked_off = partial(spread, run_part, progress=progress, workers=workers, label="cluster")
    return report(run_cluster(traces, seeds, plan, worked_off), seeds)


def smoke_plan(share: float) -> ClusterPlan:
    """The judged demand alone, on that share of the nodes; four at least, so that every service finds a place."""
    plan = ClusterPlan()
    nodes = max(4, round(share * plan.load.nodes))
    return replace(plan, demands=(plan.judged_demand,), load=replace(plan.load, nodes=nodes))


def from_data(data: Mapping[str, Any], seeds: Sequence[int]) -> Report:
    """The same page from the figures of a `cluster.json`."""
    result = msgspec.convert({**data, "claims": []}, ClusterResult)
    demand = max(week.demand for week in result.weeks)
    return report(replace(result, claims=claims_of(demand, result.weeks)), seeds)


def report(result: ClusterResult, seeds: Sequence[int]) -> Report:
    """Also for a result that was computed elsewhere."""
    demands = sorted({week.demand for week in result.weeks})
    names = list(dict.fromkeys(week.scheduler for week in result.weeks))
    idle = interval([week.fleet_idle for week in result.weeks])
    return Report(
        name="cluster",
        title=f"Cluster: a week of {result.gpus:,} GPUs",
        summary=(
            f"Five schedulers place offline jobs beside {result.source}, at several levels of offline demand over what "
            f"idle GPUs could do. The fleet is idle {100 * idle.mean:.1f} % of the time; {result.borrowed_lengths} "
            "services borrow their request lengths. ± is half the 95 % interval over the seeds; the claims are judged "
            "by the worse end, at the highest demand.",
        ),
        claims=result.claims,
        tables=(
            *(_table(result, demand, names) for demand in demands),
            _ratios(result, max(demands)),
            _bias(result, max(demands), names),
        ),
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


def _of(result: ClusterResult, name: str, demand: float) -> list[WeekResult]:
    return [week for week in result.weeks if (week.scheduler, week.demand) == (name, demand)]


def _series(
    result: ClusterResult, names: Sequence[str], demands: Sequence[float], figure: str
) -> dict[str, list[float | None]]:
    found = {name: [over_seeds(_of(result, name, demand), figure) for demand in demands] for name in names}
    return {name: [one.mean if one else None for one in row] for name, row in found.items()}


def _table(result: ClusterResult, demand: float, names: Sequence[str]) -> ReportTable:
    """Means with half their 95 % interval."""
    rows = []
    for name in names:
        weeks = _of(result, name, demand)
        rows.append((name, *(plus_minus(over_seeds(weeks, figure), scale) for figure, (_, scale) in COLUMNS.items())))
    columns = ("scheduler", *(title for title, _ in COLUMNS.values()))
    return ReportTable(title=f"Demand {demand:g} of supply", columns=columns, rows=tuple(rows))


def _ratios(result: ClusterResult, demand: float) -> ReportTable:
    """The product over each rival, seed by seed, so that a seed's load cancels out."""
    weeks = [week for week in result.weeks if week.demand == demand]
    rows = []
    for rival in SCHEDULERS:
        ratios = saved_over(rival, weeks)
        if rival != PRODUCT and ratios:
            rows.append((rival, plus_minus(interval(ratios))))
    title = f"GPUs saved by the full model over a rival's, demand {demand:g}"
    return ReportTable(title=title, columns=("rival", "ratio"), rows=tuple(rows))


def _bias(result: ClusterResult, demand: float, names: Sequence[str]) -> ReportTable:
    """Where the prediction errs: nodes with little memory, or with much."""
    rows = []
    for name in names:
        tenths = [week.bias_by_pressure for week in _of(result, name, demand)]
        over = [interval([one[i] for one in tenths if i < len(one)]) for i in range(min(map(len, tenths), default=0))]
        rows.append((name, *(plus_minus(one, 100.0) for one in over), *([None] * (10 - len(over)))))
    return ReportTable(
        title=f"Predicted less achieved share by memory pressure, points, demand {demand:g}",
        columns=("scheduler", "least memory", *(f"{i}." for i in range(2, 10)), "most memory"),
        rows=tuple(rows),
        note="Tenths of the instances by the mean free memory of their first GPU. Above zero: promised too much.",
    )
