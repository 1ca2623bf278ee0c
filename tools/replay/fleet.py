"""`valve replay fleet`: what theta and the rules for SLAs do, as tornado charts, on a small cluster experiment."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
from valve_tools.replay import svg
from valve_tools.replay.report import Cell, Chart, Report, ReportTable, plus_minus
from valve_tools.replay.work import TellProgress, Workers, spread
from valve_tools.sim.cluster import ClusterPart, ClusterPlan, WeekResult, Weeks, part_of
from valve_tools.sim.cluster_load import LoadSettings
from valve_tools.sim.cluster_schedulers import PRODUCT
from valve_tools.sim.metrics import Interval, interval

DEMAND = 1.5
FEWEST_NODES = 2
"""Of a smoke run."""
DEFAULT = "default"
FIGURES: dict[str, Callable[[WeekResult], float]] = {
    "GPUs saved within SLA, % of the fleet": lambda week: 100 * week.saved_in_sla_of_fleet,
    "GPUs saved per harvested": lambda week: week.saved_per_harvested,
    "SLA missed, % of job-hours": lambda week: 100 * week.missed_hours,
    "moves per job-day": lambda week: week.moves_per_job_day,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSetting:
    """One value of one parameter; it changes how jobs are placed, moved or slowed, never the load."""

    parameter: str
    label: str
    plan: ClusterPlan


def base_plan(nodes: int) -> ClusterPlan:
    return ClusterPlan(demands=(DEMAND,), judged_demand=DEMAND, schedulers=(PRODUCT,), load=LoadSettings(nodes=nodes))


def settings(base: ClusterPlan) -> list[FleetSetting]:
    def moved(windows: int) -> ClusterPlan:
        wait_s = 600.0 * windows
        monitor = replace(base.run.monitor, windows=windows, backoff_s=wait_s, max_backoff_s=wait_s)
        return replace(base, run=replace(base.run, monitor=monitor))

    def kept_off(hours: int) -> ClusterPlan:
        return replace(base, run=replace(base.run, monitor=replace(base.run.monitor, avoid_s=3600.0 * hours)))

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
    rows += [("keeps off a node", f"{hours} h", kept_off(hours)) for hours in (1, 24)]
    rows += [("a lost cache costs", f"{lost_s:g} s", replace(base, recompute_s=lost_s)) for lost_s in (0.0, 30.0)]
    return [FleetSetting(parameter=parameter, label=label, plan=plan) for parameter, label, plan in rows]


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetTask:
    part: ClusterPart
    settings: tuple[FleetSetting, ...]


def run_task(task: FleetTask) -> dict[tuple[str, str], WeekResult]:
    """Every setting on the load of one seed."""
    weeks = Weeks(task.part)
    return {(one.parameter, one.label): weeks.run(one.plan)[0] for one in task.settings}


def run(
    traces: Path | None, seeds: Sequence[int], progress: TellProgress, workers: Workers, share: float, nodes: int
) -> Report:
    base = base_plan(nodes if share >= 1 else max(FEWEST_NODES, round(share * nodes)))
    tried = tuple(settings(base))
    tasks = [FleetTask(part=part_of(traces, seed, DEMAND, base), settings=tried) for seed in seeds]
    runs = spread(run_task, tasks, progress, workers, label="fleet")
    return report(tried, tasks[0].part.source, seeds, runs)


def from_data(data: Mapping[str, Any], seeds: Sequence[int]) -> Report:
    """The same page from the figures of a `fleet.json`."""
    tried = settings(base_plan(data["nodes"]))
    runs: dict[int, dict[tuple[str, str], WeekResult]] = {}
    for parameter, label, week in data["weeks"]:
        runs.setdefault(week["seed"], {})[parameter, label] = msgspec.convert(week, WeekResult)
    return report(tried, data["source"], seeds, [runs[seed] for seed in seeds])


def report(
    tried: Sequence[FleetSetting], source: str, seeds: Sequence[int], runs: Sequence[dict[tuple[str, str], WeekResult]]
) -> Report:
    def over(setting: FleetSetting, figure: str) -> Interval:
        return interval([FIGURES[figure](run[setting.parameter, setting.label]) for run in runs])

    def change(setting: FleetSetting, figure: str) -> Cell:
        """Against the default, seed by seed: fleets differ far more from each other than settings do."""
        keys = ((setting.parameter, setting.label), (DEFAULT, DEFAULT))
        found = interval([FIGURES[figure](run[keys[0]]) - FIGURES[figure](run[keys[1]]) for run in runs])
        return f"{'+' if found.mean >= 0 else ''}{plus_minus(found)}"

    default, *others = tried
    rows = [(default.parameter, default.label, *(plus_minus(over(default, figure)) for figure in FIGURES))]
    rows += [(one.parameter, one.label, *(change(one, figure) for figure in FIGURES)) for one in others]
    charts = []
    for figure in FIGURES:
        bars: dict[str, list[tuple[str, float]]] = {}
        for one in others:
            bars.setdefault(one.parameter, []).append((one.label, over(one, figure).mean))
        drawn = svg.tornado(list(bars.items()), centre=over(default, figure).mean, unit=figure)
        charts.append(Chart(title=figure, svg=drawn))
    gpus = 8 * default.plan.load.nodes
    return Report(
        name="fleet",
        title="Fleet: theta and the rules for SLAs",
        summary=(
            f"A week of {gpus} GPUs beside {source}, demand {DEMAND:g} of supply, placed by the full "
            "model; one setting at a time, everything else as in the cluster experiment. The table has the default's "
            "figures and the change that each setting brings, seed by seed; ± is half the 95 % interval.",
        ),
        tables=(ReportTable(title="Default, and changes", columns=("parameter", "value", *FIGURES), rows=tuple(rows)),),
        charts=tuple(charts),
        data={
            "nodes": default.plan.load.nodes,
            "source": source,
            "weeks": [[*key, asdict(week)] for run in runs for key, week in run.items()],
        },
        seeds=tuple(seeds),
    )
