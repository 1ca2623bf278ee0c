"""Which forecast keeps promises: the product's placement under several rules, beside rivals and an oracle.

Called by `valve replay forecast`. A rule turns what a node keeps (its last hour, its last day in ten-minute buckets)
into the idle share that placement counts on; everything else is the product's own code. The services of published rates
are halved by hash before anything is run: the default is chosen on one half and judged on the other.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from valve_scheduler import model
from valve_scheduler.controller import monitor
from valve_scheduler.placement import rank
from valve_tools.sim.cluster import ClusterPart, ClusterPlan, Weeks
from valve_tools.sim.cluster_jobs import JobSettings
from valve_tools.sim.cluster_load import FleetService, LoadSettings, drawn_services, services_from
from valve_tools.sim.cluster_reports import DAY, HOUR, Floats, KeptIdle, Rule, shipped
from valve_tools.sim.cluster_run import WeekTally
from valve_tools.sim.cluster_schedulers import PRODUCT

SHIPPED = "shipped: 0.7 hour, 0.3 ten minutes, at most 0.05 over these"
RIVALS = ("most-idle", "random", "oracle")
SCARCE, AMPLE = 0.6, 1.5
"""Offline work over what idle GPUs could do: below supply, and where it never runs out."""
CHOSEN_ON, HELD_OUT, GENERATED = "replayed, chosen on", "replayed, held out", "generated"
TENTHS = 10


def quantile(share: float, windows: int = DAY) -> Rule:
    """Of the last so many buckets of ten minutes."""

    def rule(seen: KeptIdle) -> Floats:
        found: Floats = np.quantile(seen.buckets[-windows:], share, axis=0).astype(np.float64)
        return found

    return rule


def blend(hour_weight: float, most_over_recent: float = 1.0) -> Rule:
    def rule(seen: KeptIdle) -> Floats:
        recent = seen.buckets[-1].astype(np.float64)
        found: Floats = np.minimum(hour_weight * seen.hour + (1 - hour_weight) * recent, recent + most_over_recent)
        return found

    return rule


RULES: dict[str, Rule] = {
    SHIPPED: shipped,
    "0.7 hour, 0.3 ten minutes": blend(0.7),
    "half hour, half ten minutes, at most 0.05 over these": blend(0.5, 0.05),
    "half hour, half ten minutes": blend(0.5),
    "last hour": lambda seen: seen.hour,
    "last day": lambda seen: seen.day,
    "lower of hour and day": lambda seen: np.minimum(seen.hour, seen.day),
    "half hour, half day": lambda seen: 0.5 * seen.hour + 0.5 * seen.day,
    "last ten minutes": lambda seen: seen.buckets[-1].astype(np.float64),
    "lower of hour and ten minutes": lambda seen: np.minimum(seen.hour, seen.buckets[-1]),
    "30 % quantile of the day": quantile(0.3),
    "30 % quantile of the hour": quantile(0.3, HOUR),
}


RUNS = (
    *((policy, AMPLE) for policy in (*RULES, *RIVALS)),
    *((policy, SCARCE) for policy in (SHIPPED, *RIVALS)),
)
"""Every policy where work never runs out; the shipped one and the rivals also where it does."""
RUNS_PER_TASK = 5


def plan_of(nodes: int) -> ClusterPlan:
    """A large fleet in small: pieces of a service and jobs shrink with it, so that one piece is not half the fleet."""
    return ClusterPlan(
        demands=(SCARCE, AMPLE),
        judged_demand=AMPLE,
        schedulers=(PRODUCT, *RIVALS),
        load=LoadSettings(nodes=nodes, copy_gpus=8),
        jobs=JobSettings(gpus=(1, 2, 4, 8)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenth:
    """Placements that were promised a share within one tenth."""

    placements: int
    predicted: float
    """Sums over the placements."""
    achieved: float
    """In the first three hours."""
    kept: int
    """That did not miss their SLA persistently within three hours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeekOutcome:
    """One policy's week on one load."""

    load: str
    demand: float
    seed: int
    policy: str
    missed: float
    """Share of job-hours."""
    saved: float
    saved_in_sla: float
    """Shares of the fleet."""
    bound: float
    """The largest share that any policy can save, whatever it knows."""
    moves_per_job_day: float
    kept: float
    """Share of placements."""
    tenths: tuple[Tenth, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WeeksTask:
    """Some of the weeks on one load: small enough that a run which was stopped loses little."""

    part: ClusterPart
    load: str
    runs: tuple[tuple[str, float], ...]
    """(policy, demand) of each week."""


def tasks_of(traces: Path | None, seeds: Sequence[int], plan: ClusterPlan) -> list[WeeksTask]:
    found = []
    for seed in seeds:
        for load, services, borrowed in _loads(traces, seed):
            for first in range(0, len(RUNS), RUNS_PER_TASK):
                runs = RUNS[first : first + RUNS_PER_TASK]
                told = replace(plan, schedulers=tuple(dict.fromkeys(_scheduler(policy) for policy, _ in runs)))
                part = ClusterPart(
                    plan=told, demand=AMPLE, services=services, borrowed=borrowed, source=load, seed=seed
                )
                found.append(WeeksTask(part=part, load=load, runs=runs))
    return found


def _scheduler(policy: str) -> str:
    return PRODUCT if policy in RULES else policy


def _loads(traces: Path | None, seed: int) -> Iterable[tuple[str, list[FleetService], int]]:
    if traces:
        services, borrowed = services_from(traces, seed)
        digest = rates_digest(traces)
        for load, half in ((CHOSEN_ON, 0), (HELD_OUT, 1)):
            kept = [one for one in services if half_of(one.name, digest) == half]
            if kept:
                yield load, kept, borrowed
    yield GENERATED, drawn_services(seed), 0


def rates_digest(traces: Path) -> str:
    """Of all rate files of the folder, by content."""
    digest = hashlib.sha256()
    for path in sorted(traces.glob("*_rates.csv*")):
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def half_of(service: str, digest: str) -> int:
    return hashlib.sha256(f"{digest} {service}".encode()).digest()[0] % 2


def run_task(task: WeeksTask) -> list[WeekOutcome]:
    weeks = Weeks(task.part)
    return [_outcome(task, weeks, policy, demand) for policy, demand in task.runs]


def _outcome(task: WeeksTask, weeks: Weeks, policy: str, demand: float) -> WeekOutcome:
    week, tally = weeks.week(_scheduler(policy), task.part.plan, demand, RULES.get(policy, shipped))
    return WeekOutcome(
        load=task.load,
        demand=demand,
        seed=task.part.seed,
        policy=policy,
        missed=week.missed_hours,
        saved=week.saved_of_fleet,
        saved_in_sla=week.saved_in_sla_of_fleet,
        bound=weeks.supply(task.part.plan),
        moves_per_job_day=week.moves_per_job_day,
        kept=week.kept,
        tenths=tenths_of(tally),
    )


def tenths_of(tally: WeekTally) -> tuple[Tenth, ...]:
    table: NDArray[np.float64] = np.array(tally.promises, dtype=np.float64).reshape(-1, 4)
    predicted, achieved, _, kept = table.T
    tenth = np.minimum((predicted * TENTHS).astype(np.int64), TENTHS - 1)

    def sums(values: NDArray[np.float64]) -> list[float]:
        return [float(one) for one in np.bincount(tenth, weights=values, minlength=TENTHS)]

    columns = zip(sums(np.ones(len(table))), sums(predicted), sums(achieved), sums(kept), strict=True)
    return tuple(
        Tenth(placements=round(count), predicted=said, achieved=was, kept=round(held))
        for count, said, was, held in columns
    )


def settings_digest() -> str:
    """Of the default settings and of what the shipped forecast answers; a page with another is of another product."""
    shares = np.append(np.linspace(0, 1, 11), np.nan)
    answers = np.round(model.forecast(*np.meshgrid(shares, shares, shares)), 6) + 0.0
    digest = hashlib.sha256(f"{rank.PlacementSettings()!r} {monitor.MonitorSettings()!r}".encode())
    digest.update(answers.astype("<f8").tobytes())
    return digest.hexdigest()[:16]


def policy_digest() -> str:
    """Of the default settings and of the sources that decide: which code a run was made with."""
    digest = hashlib.sha256(f"{rank.PlacementSettings()!r} {monitor.MonitorSettings()!r}".encode())
    decide = [*sorted(Path(model.__path__[0]).glob("*.py")), Path(str(rank.__file__)), Path(str(monitor.__file__))]
    for source in decide:
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]
