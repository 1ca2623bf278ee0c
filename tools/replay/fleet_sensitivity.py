"""The fleet's part of `valve replay sensitivity`: theta and the rules for SLAs, on a small cluster experiment."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from valve_tools.replay import svg
from valve_tools.replay.report import Chart, Table, plus_minus
from valve_tools.replay.work import Progress, Workers, spread
from valve_tools.sim.cluster import ClusterPlan, Part, WeekResult, Weeks, part_of
from valve_tools.sim.cluster_load import LoadSettings
from valve_tools.sim.cluster_schedulers import PRODUCT
from valve_tools.sim.metrics import Interval, interval

NODES = 100
DEMAND = 1.5
DEFAULT = "default"
FIGURES: dict[str, Callable[[WeekResult], float]] = {
    "GPUs saved within SLA, % of the fleet": lambda week: 100 * week.saved_in_sla_of_fleet,
    "GPUs saved per harvested": lambda week: week.saved_per_harvested,
    "SLA missed, % of job-hours": lambda week: 100 * week.missed_hours,
    "moves per job-day": lambda week: week.moves_per_job_day,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One value of one parameter; it changes how jobs are placed, moved or slowed, never the load."""

    parameter: str
    label: str
    plan: ClusterPlan


def base_plan(nodes: int = NODES) -> ClusterPlan:
    return ClusterPlan(demands=(DEMAND,), judged_demand=DEMAND, schedulers=(PRODUCT,), load=LoadSettings(nodes=nodes))


def settings(base: ClusterPlan) -> list[Setting]:
    def moved(windows: int) -> ClusterPlan:
        return replace(base, run=replace(base.run, move_windows=windows, backoff_windows=windows))

    rows: list[tuple[str, str, ClusterPlan]] = [(DEFAULT, DEFAULT, base)]
    rows += [
        ("theta", f"{theta:g}", replace(base, placement=replace(base.placement, theta=theta)))
        for theta in (0.5, 0.7, 0.9, 0.97)
    ]
    rows += [
        ("SLA asked for", f"x{margin:g}", replace(base, run=replace(base.run, sla_margin=margin)))
        for margin in (1.1, 1.3, 1.6)
    ]
    rows += [("moves after", f"{10 * windows} min", moved(windows)) for windows in (2, 3, 9)]
    rows += [
        ("keeps off a node", f"{hours} h", replace(base, run=replace(base.run, avoid_windows=6 * hours)))
        for hours in (1, 24)
    ]
    rows += [("a lost cache costs", f"{lost_s:g} s", replace(base, recompute_s=lost_s)) for lost_s in (0.0, 30.0)]
    return [Setting(parameter=parameter, label=label, plan=plan) for parameter, label, plan in rows]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    part: Part
    settings: tuple[Setting, ...]


def run_task(task: Task) -> dict[tuple[str, str], WeekResult]:
    """Every setting on the load of one seed."""
    weeks = Weeks(task.part)
    return {(one.parameter, one.label): weeks.run(one.plan)[0] for one in task.settings}


def run(
    traces: Path | None, seeds: Sequence[int], progress: Progress, workers: Workers, nodes: int = NODES
) -> tuple[Table, list[Chart]]:
    base = base_plan(nodes)
    tried = tuple(settings(base))
    tasks = [Task(part=part_of(traces, seed, DEMAND, base), settings=tried) for seed in seeds]
    return shown(tried, spread(run_task, tasks, progress, workers, label="fleet"), nodes)


def shown(
    tried: Sequence[Setting], runs: Sequence[dict[tuple[str, str], WeekResult]], nodes: int
) -> tuple[Table, list[Chart]]:
    def over(setting: Setting, figure: str) -> Interval:
        return interval([FIGURES[figure](run[setting.parameter, setting.label]) for run in runs])

    table = Table(
        title=f"A fleet of {8 * nodes} GPUs, a week, demand {DEMAND:g} of supply",
        columns=("parameter", "value", *FIGURES),
        rows=tuple((one.parameter, one.label, *(plus_minus(over(one, figure)) for figure in FIGURES)) for one in tried),
        note="± is half the 95 % interval over the seeds.",
    )
    charts = []
    for figure in FIGURES:
        bars: dict[str, list[tuple[str, float]]] = {}
        for one in tried[1:]:
            bars.setdefault(one.parameter, []).append((one.label, over(one, figure).mean))
        drawn = svg.tornado(list(bars.items()), centre=over(tried[0], figure).mean, unit=figure)
        charts.append(Chart(title=f"Fleet: {figure}", svg=drawn))
    return table, charts
