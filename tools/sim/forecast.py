"""Which forecast keeps promises: the product's placement under several rules, beside rivals and an oracle.

Called by `valve replay forecast`. A rule turns what a node keeps (its last hour, its last day in ten-minute buckets)
into the idle share that placement counts on; everything else is the product's own code. The services of published rates
are halved by hash before anything is run: the default was chosen on one half; the other is not judged yet.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from valve_scheduler import model
from valve_scheduler.controller import monitor
from valve_scheduler.placement import rank
from valve_tools.sim.cluster import ClusterPlan, Part, Weeks
from valve_tools.sim.cluster_jobs import JobSettings
from valve_tools.sim.cluster_load import LoadSettings, Service, drawn_services, services_from
from valve_tools.sim.cluster_reports import Floats, Rule, Seen, shipped
from valve_tools.sim.cluster_run import Tally
from valve_tools.sim.cluster_schedulers import PRODUCT

SHIPPED = "shipped: 0.7 hour, 0.3 ten minutes"
RIVALS = ("most-idle", "random", "oracle")
SCARCE, AMPLE = 0.6, 1.5
"""Offline work over what idle GPUs could do: below supply, and where it never runs out."""
CHOSEN_ON, HELD_OUT, GENERATED = "replayed, chosen on", "replayed, held out", "generated"
TENTHS = 10


def quantile_of_day(share: float) -> Rule:
    def rule(seen: Seen) -> Floats:
        found: Floats = np.quantile(seen.buckets, share, axis=0).astype(np.float64)
        return found

    return rule


def _lower_of_hour_and_median(seen: Seen) -> Floats:
    return np.minimum(seen.hour, quantile_of_day(0.5)(seen))


RULES: dict[str, Rule] = {
    SHIPPED: shipped,
    "last hour": lambda seen: seen.hour,
    "last day": lambda seen: seen.day,
    "lower of hour and day": lambda seen: np.minimum(seen.hour, seen.day),
    "half hour, half day": lambda seen: 0.5 * seen.hour + 0.5 * seen.day,
    "half hour, half ten minutes": lambda seen: 0.5 * seen.hour + 0.5 * seen.buckets[-1],
    "last ten minutes": lambda seen: seen.buckets[-1].astype(np.float64),
    "lower of hour and ten minutes": lambda seen: np.minimum(seen.hour, seen.buckets[-1]),
    "30 % quantile of the day": quantile_of_day(0.3),
    "lower of hour and the day's median": _lower_of_hour_and_median,
    "0.9 of the last hour": lambda seen: 0.9 * seen.hour,
}


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
class Outcome:
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
    moves_per_job_day: float
    kept: float
    """Share of placements."""
    tenths: tuple[Tenth, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    part: Part
    load: str


def tasks_of(traces: Path | None, seeds: Sequence[int], plan: ClusterPlan) -> list[Task]:
    found = []
    for seed in seeds:
        for load, services, borrowed in _loads(traces, seed):
            part = Part(plan=plan, demand=AMPLE, services=services, borrowed=borrowed, source=load, seed=seed)
            found.append(Task(part=part, load=load))
    return found


def _loads(traces: Path | None, seed: int) -> Iterable[tuple[str, list[Service], int]]:
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


def run_task(task: Task) -> list[Outcome]:
    """Every policy where work never runs out; the shipped one and the rivals also where it does."""
    weeks, plan = Weeks(task.part), task.part.plan
    outcomes = []
    for demand, rules in ((AMPLE, RULES), (SCARCE, {SHIPPED: shipped})):
        runs: list[tuple[str, str, Rule]] = [(name, PRODUCT, rule) for name, rule in rules.items()]
        runs += [(name, name, shipped) for name in RIVALS]
        for policy, scheduler, rule in runs:
            week, tally = weeks.week(scheduler, plan, demand, rule)
            outcomes.append(
                Outcome(
                    load=task.load,
                    demand=demand,
                    seed=task.part.seed,
                    policy=policy,
                    missed=week.missed_hours,
                    saved=week.saved_of_fleet,
                    saved_in_sla=week.saved_in_sla_of_fleet,
                    moves_per_job_day=week.moves_per_job_day,
                    kept=float(np.mean([kept for *_, kept in tally.promises])) if tally.promises else 0.0,
                    tenths=tenths_of(tally),
                )
            )
    return outcomes


def tenths_of(tally: Tally) -> tuple[Tenth, ...]:
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


def run_forecast(
    traces: Path | None,
    seeds: Sequence[int],
    spread: Callable[[list[Task]], Iterable[list[Outcome]]],
    plan: ClusterPlan,
) -> list[Outcome]:
    return [one for found in spread(tasks_of(traces, seeds, plan)) for one in found]


def policy_digest() -> str:
    """Of the default settings and of the sources that decide: a page with another one is of another product."""
    digest = hashlib.sha256(f"{rank.PlacementSettings()!r} {monitor.MonitorSettings()!r}".encode())
    decide = [*sorted(Path(model.__path__[0]).glob("*.py")), Path(str(rank.__file__)), Path(str(monitor.__file__))]
    for source in decide:
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]
