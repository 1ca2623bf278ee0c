"""What a week of hourly figures says about harvesting, judged by the functions that place pods. Pure.

For each hour and GPU: a job with SLA s is placed where the shipped forecast times the memory factor reaches s, and gets
the share that the hour then brought. So the page counts what the scheduler would have done, and how often its promise
would have held, not how idle a GPU was. Hours hold no ten minutes, so the forecast has the last hour alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from valve_scheduler.model import forecast, memory_factor, memory_weights, prior_profile
from valve_scheduler.model.curve import FloatArray
from valve_scheduler.model.memory import free_histogram

DAY_HOURS = 24
LEAST_SEEN_S = 1800.0  # of an hour that is judged


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuHours:
    """One GPU over the weeks' hours, oldest first; NaN where nobody could tell."""

    node: str
    uuid: str
    idle: FloatArray  # share of the hour that online work left
    free_mib: FloatArray  # what offline work could have had then
    full_mib: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceWeek:
    """One online pod."""

    namespace: str
    pod: str
    busy_s: float
    idles: float  # times it let go of its GPUs


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A pod that could run as offline work."""

    namespace: str
    owner: str
    why: str
    pods: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SlaWorth:
    """What jobs of one SLA, one per GPU, would have had."""

    sla: float
    gpus_saved: float  # whole GPUs, on average over the hours
    placed_share: float  # of GPU-hours
    kept_share: float | None  # of placed GPU-hours that reached the SLA; None: nothing was placed


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolWorth:
    pool: str
    nodes: int
    gpus: int
    hours: int  # judged on average, of each GPU
    idle: float
    levels: tuple[SlaWorth, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """What an online pod would have paid at most: one preemption for each time it let go."""

    namespace: str
    pod: str
    busy_s: float
    preemptions: float
    delay_s: float
    share: float  # of its busy time


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    source: str
    hours: int
    stop_ms: float
    stop_source: str
    pools: tuple[PoolWorth, ...]
    prices: tuple[Price, ...]
    candidates: tuple[Candidate, ...]
    uninjected: float = 0.0  # online containers without the shim: their GPUs are in no figure
    notes: tuple[str, ...] = field(default=())


def shares_of(gpu: GpuHours) -> tuple[FloatArray, FloatArray]:
    """Per hour: what would have been promised at its begin, and what it then brought."""
    weights = memory_weights(prior_profile(gpu.full_mib), gpu.full_mib)
    brought, promised = np.full_like(gpu.idle, np.nan), np.full_like(gpu.idle, np.nan)
    for hour in range(gpu.idle.size):
        if np.isnan(gpu.idle[hour]):
            continue
        brought[hour] = gpu.idle[hour] * _memory(gpu, hour, weights)
        if hour == 0 or np.isnan(gpu.idle[hour - 1]):
            continue
        day = gpu.idle[max(0, hour - DAY_HOURS) : hour]
        recent, last, mean = (np.array([share]) for share in (np.nan, gpu.idle[hour - 1], np.nanmean(day)))
        promised[hour] = forecast(recent, last, mean)[0] * _memory(gpu, hour - 1, weights)
    return promised, brought


def _memory(gpu: GpuHours, hour: int, weights: FloatArray) -> float:
    free = gpu.free_mib[hour]
    if np.isnan(free):
        return 0.0
    return float(memory_factor(free_histogram(np.array([free]), gpu.full_mib), weights))


def pool_worth(pool: str, gpus: Sequence[GpuHours], slas: Sequence[float]) -> PoolWorth:
    judged = [shares_of(gpu) for gpu in gpus]
    promised = np.concatenate([each[0] for each in judged])
    brought = np.concatenate([each[1] for each in judged])
    known = ~np.isnan(promised) & ~np.isnan(brought)
    hours = known.sum() / len(gpus)
    idle = np.concatenate([gpu.idle for gpu in gpus])
    return PoolWorth(
        pool=pool,
        nodes=len({gpu.node for gpu in gpus}),
        gpus=len(gpus),
        hours=round(float(hours)),
        idle=round(float(np.nanmean(idle)), 3) if not np.isnan(idle).all() else 0.0,
        levels=tuple(_level(sla, promised[known], brought[known], len(gpus)) for sla in slas),
    )


def _level(sla: float, promised: FloatArray, brought: FloatArray, gpus: int) -> SlaWorth:
    placed: NDArray[np.bool_] = promised >= sla
    if not promised.size:
        return SlaWorth(sla=sla, gpus_saved=0.0, placed_share=0.0, kept_share=None)
    return SlaWorth(
        sla=sla,
        gpus_saved=round(float(brought[placed].sum()) / promised.size * gpus, 2),
        placed_share=round(float(placed.mean()), 3),
        kept_share=round(float((brought[placed] >= sla).mean()), 3) if placed.any() else None,
    )


def price(service: ServiceWeek, stop_s: float) -> Price:
    delay_s = service.idles * stop_s
    return Price(
        namespace=service.namespace,
        pod=service.pod,
        busy_s=round(service.busy_s, 1),
        preemptions=round(service.idles),
        delay_s=round(delay_s, 3),
        share=round(delay_s / service.busy_s, 5) if service.busy_s > 0 else 0.0,
    )


def by_pool(gpus: Sequence[GpuHours], pools: Mapping[str, str], slas: Sequence[float]) -> tuple[PoolWorth, ...]:
    """`pools`: of each node. The fleet as a whole comes first."""
    groups: dict[str, list[GpuHours]] = {}
    for gpu in gpus:
        groups.setdefault(pools.get(gpu.node, "other"), []).append(gpu)
    if not gpus:
        return ()
    parts = [pool_worth(pool, members, slas) for pool, members in sorted(groups.items())]
    return (pool_worth("all", gpus, slas), *parts) if len(parts) > 1 else tuple(parts)
