"""The cluster experiment: a week of 8,000 GPUs, five schedulers, three levels of offline demand.

Called by `valve replay cluster`. The product's own placement ranks nodes on what nodes would report; a minute-by-minute
truth that it never sees says what each instance achieves.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from valve_scheduler.placement import PlacementSettings
from valve_tools.sim.cluster_jobs import JobSettings, Truth, draw_jobs
from valve_tools.sim.cluster_load import (
    STEPS,
    WINDOWS,
    FleetLoad,
    LoadSettings,
    Service,
    drawn_services,
    fleet_load,
    services_from,
)
from valve_tools.sim.cluster_reports import Reports
from valve_tools.sim.cluster_run import ClusterRun, RunSettings, Tally, run_week
from valve_tools.sim.cluster_schedulers import PRODUCT, SCHEDULERS, Foresight, Scheduler

PAPER_GAIN, PAPER_IDLE, PAPER_SAVED = 0.346, 0.46, 0.269
"""The paper's week: gain in points, on a fleet this idle by our reading, and GPUs saved as a share of the fleet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterPlan:
    """Every value of the experiment."""

    demands: tuple[float, ...] = (0.6, 1.0, 1.5)
    """Offline work over what idle GPUs could do alone."""
    judged_demand: float = 1.5
    """The claims are judged where work never runs out; the other demands are reported."""
    schedulers: tuple[str, ...] = SCHEDULERS
    recompute_s: float = 10.0
    """Time lost when the whole cache goes: 7 to 10 s for selective eviction (docs/results/eviction, every 60 s)."""
    load: LoadSettings = field(default_factory=LoadSettings)
    jobs: JobSettings = field(default_factory=JobSettings)
    run: RunSettings = field(default_factory=RunSettings)
    placement: PlacementSettings = field(default_factory=PlacementSettings)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeekResult:
    """One scheduler's week."""

    scheduler: str
    demand: float
    seed: int
    fleet_idle: float
    """Share of GPU time that offline could use, cooldown taken off."""
    gain: float
    """Share of GPU time in which offline ran."""
    gain_of_idle: float
    saved_of_fleet: float
    saved_in_sla_of_fleet: float
    """The same without the jobs that were missing their SLA at the time."""
    saved_per_harvested: float
    occupied: float
    missed_hours: float
    """Share of job-hours in violation of the SLA as the monitor defines it."""
    below_hours: float
    """Share of job-hours in windows below the SLA, however short."""
    misses_per_job_day: float
    moves_per_job_day: float
    mape: float
    """Of instances that ran a day or longer, the time that the reports look back on."""
    mape_all: float
    """Of all that ran an hour or longer; those that were moved or ended early weigh by their time."""
    weighted_error: float
    """Of those that ran a day: absolute error summed, over what was achieved summed; small shares weigh little."""
    model_error: float
    """As mape, of the model when it is told the load of the very hours in which the instance ran: no forecast in it."""
    calibrated_error: float
    """The same after one factor a workload, fitted on the instances of every other node."""
    bias_by_pressure: tuple[float, ...]
    """Mean of predicted - achieved in tenths of the fleet by free memory, least memory first."""
    decision_p50_ms: float
    decision_p99_ms: float
    finished_jobs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    claim: str
    value: float
    bound: float
    ok: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterResult:
    source: str
    borrowed_lengths: int
    weeks: tuple[WeekResult, ...]
    claims: tuple[Claim, ...]

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    def table(self) -> str:
        heads = (
            "demand | scheduler | gain, points | of idle | saved, % of fleet | of it within SLA | saved per harvested"
            " | SLA missed, % of job-hours | below, % | misses per job-day | moves per job-day"
            " | MAPE of days / all / weighted / model alone / calibrated, % | decision p50 / p99, CPU ms"
        )
        lines = [f"Load: {self.source}; {self.borrowed_lengths} services with borrowed lengths. Fleet idle", ""]
        lines[0] += f" {100 * np.mean([one.fleet_idle for one in self.weeks]):.1f} %."
        lines += [f"| {heads} |", "|---" * (heads.count("|") + 1) + "|"]
        for demand in sorted({one.demand for one in self.weeks}):
            for name in SCHEDULERS:
                found = [one for one in self.weeks if (one.demand, one.scheduler) == (demand, name)]
                if found:
                    lines.append(_line(demand, name, found))
        lines += ["", "| claim | value | bound | holds |", "|---|---|---|---|"]
        lines += [f"| {c.claim} | {c.value:.3f} | {c.bound:.3f} | {'yes' if c.ok else 'NO'} |" for c in self.claims]
        return "\n".join(lines) + "\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """All weeks of one seed: they share the load."""

    plan: ClusterPlan
    services: list[Service]
    borrowed: int
    source: str
    seed: int


def run_cluster(
    traces_dir: Path | None,
    seeds: Sequence[int] = (0,),
    spread: Callable[[list[Part]], Iterable[list[WeekResult]]] = lambda parts: map(run_part, parts),
    plan: ClusterPlan | None = None,
) -> ClusterResult:
    """The whole experiment; deterministic, but for decision times, for the same load, seeds and plan."""
    plan = plan or ClusterPlan()
    parts = [_part(traces_dir, seed, plan) for seed in seeds]
    weeks = tuple(week for found in spread(parts) for week in found)
    last = parts[-1]
    return ClusterResult(source=last.source, borrowed_lengths=last.borrowed, weeks=weeks, claims=_claims(plan, weeks))


def _part(traces_dir: Path | None, seed: int, plan: ClusterPlan) -> Part:
    services, borrowed = services_from(traces_dir, seed) if traces_dir else (drawn_services(seed), 0)
    source = f"{len(services)} services of {traces_dir.name}" if traces_dir else f"{len(services)} drawn services"
    return Part(plan=plan, services=services, borrowed=borrowed, source=source, seed=seed)


def run_part(part: Part) -> list[WeekResult]:
    load = fleet_load(part.services, part.plan.load, part.seed, part.borrowed)
    return _weeks_of(part.plan, load, part.seed)


def _weeks_of(plan: ClusterPlan, load: FleetLoad, seed: int) -> list[WeekResult]:
    nodes = plan.load.nodes
    reports = Reports(load)
    truth = Truth(load, plan.recompute_s)
    foresight = Foresight(truth, nodes) if "oracle" in plan.schedulers else None
    idle = float((load.idle.mean(axis=1) / STEPS)[load.replica_of_gpu].mean())
    runs = [(demand, name) for demand in plan.demands for name in plan.schedulers]
    weeks = []
    for demand, name in runs:
        jobs = draw_jobs(plan.jobs, demand * idle * nodes * 8, WINDOWS, seed)
        scheduler = Scheduler(name, reports, foresight, plan.placement, seed)
        tally = run_week(ClusterRun(scheduler, truth, jobs, nodes, plan.run))
        weeks.append(_week(name, demand, seed, idle, tally, scheduler, load))
    return weeks


def _week(
    name: str, demand: float, seed: int, idle: float, tally: Tally, scheduler: Scheduler, load: FleetLoad
) -> WeekResult:
    gpus = len(load.replica_of_gpu)
    windows = max(tally.windows, 1)
    days = max(tally.job_hours / 24, 1e-9)
    times = np.array(scheduler.decision_ms or [0.0])
    mape_all, _, bias = _errors(tally, load, 6)
    mape, weighted, _ = _errors(tally, load, 144)
    return WeekResult(
        scheduler=name,
        demand=demand,
        seed=seed,
        fleet_idle=idle,
        gain=tally.harvested_gpus / windows / gpus,
        gain_of_idle=tally.harvested_gpus / windows / gpus / idle,
        saved_of_fleet=tally.saved_gpus / windows / gpus,
        saved_in_sla_of_fleet=tally.saved_in_sla_gpus / windows / gpus,
        saved_per_harvested=tally.saved_gpus / max(tally.harvested_gpus, 1e-9),
        occupied=tally.occupied_gpus / windows / gpus,
        missed_hours=tally.missed_job_hours / max(tally.job_hours, 1e-9),
        below_hours=tally.below_job_hours / max(tally.job_hours, 1e-9),
        misses_per_job_day=tally.violations / days,
        moves_per_job_day=tally.moved / days,
        mape=mape,
        mape_all=mape_all,
        weighted_error=weighted,
        model_error=_model_error(tally, is_calibrated=False),
        calibrated_error=_model_error(tally, is_calibrated=True),
        bias_by_pressure=bias,
        decision_p50_ms=float(np.quantile(times, 0.5)),
        decision_p99_ms=float(np.quantile(times, 0.99)),
        finished_jobs=tally.finished,
    )


def _errors(tally: Tally, load: FleetLoad, at_least_windows: int) -> tuple[float, float, tuple[float, ...]]:
    """(MAPE weighted by how long the instance ran, error summed over achieved summed, bias by memory pressure)."""
    ran = [one for one in tally.predictions if one[2] >= at_least_windows]
    if not ran:
        return 0.0, 0.0, ()
    predicted, achieved, windows, gpu = np.array(ran).T[:4]
    counted = achieved > 0.01
    relative = np.abs(predicted - achieved)[counted] / achieved[counted]
    mape = float(np.average(relative, weights=windows[counted]))
    free = load.free.mean(axis=1)[load.replica_of_gpu][gpu.astype(np.int64)]
    tenth = np.minimum(np.argsort(np.argsort(free, kind="stable")) * 10 // len(free), 9)
    difference: NDArray[np.float64] = predicted - achieved
    bias = [float(np.average(difference[tenth == i], weights=windows[tenth == i])) for i in np.unique(tenth)]
    weighted = float((np.abs(difference) * windows).sum() / max(float((achieved * windows).sum()), 1e-9))
    return mape, weighted, tuple(bias)


def _model_error(tally: Tally, *, is_calibrated: bool) -> float:
    """MAPE of the model told the true hours; calibrated: judged on odd nodes with the factors of the even ones."""
    ran = np.array([one for one in tally.predictions if one[2] >= 144 and one[1] > 0.01])
    if len(ran) == 0:
        return 0.0
    _, achieved, windows, gpu, nowcast, model = ran.T
    is_even = (gpu // 8) % 2 == 0
    factor = np.ones(len(ran))
    for workload in np.unique(model) if is_calibrated else ():
        fitted = is_even & (model == workload)
        if fitted.any():
            factor[model == workload] = achieved[fitted].sum() / max(nowcast[fitted].sum(), 1e-9)
    judged = ~is_even if is_calibrated and (~is_even).any() else np.ones(len(ran), dtype=np.bool_)
    relative = np.abs(nowcast * factor - achieved) / achieved
    return float(np.average(relative[judged], weights=windows[judged]))


def _line(demand: float, name: str, found: list[WeekResult]) -> str:
    def mean(figure: str, scale: float = 1.0) -> float:
        return scale * float(np.mean([getattr(one, figure) for one in found]))

    cells = [
        f"{demand:g}",
        name,
        f"{mean('gain', 100):.1f}",
        f"{mean('gain_of_idle'):.2f}",
        f"{mean('saved_of_fleet', 100):.1f}",
        f"{mean('saved_in_sla_of_fleet', 100):.1f}",
        f"{mean('saved_per_harvested'):.3f}",
        f"{mean('missed_hours', 100):.2f}",
        f"{mean('below_hours', 100):.1f}",
        f"{mean('misses_per_job_day'):.2f}",
        f"{mean('moves_per_job_day'):.2f}",
        f"{mean('mape', 100):.1f} / {mean('mape_all', 100):.1f} / {mean('weighted_error', 100):.1f}"
        f" / {mean('model_error', 100):.1f} / {mean('calibrated_error', 100):.1f}",
        f"{mean('decision_p50_ms'):.1f} / {mean('decision_p99_ms'):.1f}",
    ]
    return "| " + " | ".join(cells) + " |"


def _claims(plan: ClusterPlan, weeks: tuple[WeekResult, ...]) -> tuple[Claim, ...]:
    """By the worse seed, at the judged demand."""

    def of(name: str, figure: str) -> list[float]:
        return [getattr(one, figure) for one in weeks if (one.scheduler, one.demand) == (name, plan.judged_demand)]

    if not of(PRODUCT, "gain"):
        return ()
    saved = np.array(of(PRODUCT, "saved_of_fleet"))
    claims = [
        _at_least("gain over idle time", min(of(PRODUCT, "gain_of_idle")), 0.90),
        _at_least("gain, share of GPU time", min(of(PRODUCT, "gain")), PAPER_GAIN),
        _at_least("GPUs saved per harvested GPU", min(of(PRODUCT, "saved_per_harvested")), 0.85),
        _at_least("GPUs saved over fleet", float(saved.min()), PAPER_SAVED),
        _at_most("SLA missed, share of job-hours", max(of(PRODUCT, "missed_hours")), 0.01),
        _at_most("error at placement: tomorrow's load and the model, MAPE", max(of(PRODUCT, "mape")), 0.10),
        _at_most("error of the model told the load, MAPE", max(of(PRODUCT, "model_error")), 0.10),
        _at_most("decision p99, CPU ms", max(of(PRODUCT, "decision_p99_ms")), 20.0),
    ]
    if of("oracle", "gain"):
        ratio = float((saved / np.array(of("oracle", "saved_of_fleet"))).min())
        claims.append(_at_least("saved, full model over oracle", ratio, 0.95))
    if of("most-idle", "gain"):
        ratio = float((saved / np.array(of("most-idle", "saved_of_fleet"))).min())
        claims.append(_at_least("saved, full model over most-idle", ratio, 1.10))
    return tuple(claims)


def _at_least(claim: str, value: float, bound: float) -> Claim:
    return Claim(claim=claim, value=value, bound=bound, ok=value >= bound)


def _at_most(claim: str, value: float, bound: float) -> Claim:
    return Claim(claim=claim, value=value, bound=bound, ok=value <= bound)
