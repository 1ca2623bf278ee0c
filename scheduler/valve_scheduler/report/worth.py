"""What a week of hourly figures says about harvesting, judged by the functions that place pods. Pure.

For each hour and GPU: a job with SLA s is placed where the shipped forecast times the memory factor reaches s, and gets
the share that the hour then brought. So the page counts what the scheduler would have done, and how often its promise
would have held, not how idle a GPU was. Hours hold no ten minutes, so the forecast has the last hour alone. Which GPUs
are busy at the same times is no figure of Prometheus: jobs over several are judged by the alignment of each node's last
report.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from valve_scheduler.model import (
    MAX_GPUS,
    forecast,
    memory_factor,
    memory_weights,
    prior_profile,
    runnable_share,
    set_members,
)
from valve_scheduler.model.curve import FloatArray
from valve_scheduler.model.memory import free_histogram
from valve_scheduler.placement.rank import PlacementSettings, gpu_sets

DAY_HOURS = 24
LEAST_SEEN_S = 1800.0  # of an hour that is judged
SET_SIZES = (2, 4, 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuHours:
    """One GPU over the weeks' hours, oldest first; NaN where it is not known."""

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
    """What jobs of one SLA would have had, one on each GPU or set of GPUs."""

    sla: float
    gpus_saved: float  # whole GPUs, on average over the hours
    placed_share: float  # of GPU-hours
    kept_share: float | None  # of placed GPU-hours that reached the SLA; None: nothing was placed


@dataclass(frozen=True, slots=True, kw_only=True)
class SetWorth:
    """What jobs over so many GPUs of one node would have had."""

    size: int
    levels: tuple[SlaWorth, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeAlignment:
    """Of a node's last report: its GPUs, and how far each two of them are busy at the same times."""

    uuids: tuple[str, ...]
    pairs: FloatArray  # [8, 8]


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolWorth:
    pool: str
    nodes: int
    gpus: int
    hours: int  # judged on average, of each GPU
    idle: float
    levels: tuple[SlaWorth, ...]
    sets: tuple[SetWorth, ...] = ()  # sizes that no node of the pool has GPUs for are left out


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
    memory = memory_of(gpu)
    return counted_on(gpu) * np.roll(memory, 1), gpu.idle * memory


def counted_on(gpu: GpuHours) -> FloatArray:
    """Per hour the idle share that placement would have counted on at its begin; NaN where it is not known."""
    counted = np.full_like(gpu.idle, np.nan)
    for hour in range(1, gpu.idle.size):
        if np.isnan(gpu.idle[hour - 1 : hour + 1]).any():
            continue
        day = gpu.idle[max(0, hour - DAY_HOURS) : hour]
        recent, last, mean = (np.array([share]) for share in (np.nan, gpu.idle[hour - 1], np.nanmean(day)))
        counted[hour] = forecast(recent, last, mean)[0]
    return counted


def memory_of(gpu: GpuHours) -> FloatArray:
    """Per hour the memory factor of a job without a measurement."""
    weights = memory_weights(prior_profile(gpu.full_mib), gpu.full_mib)
    return np.array([_memory(gpu, hour, weights) for hour in range(gpu.idle.size)])


def _memory(gpu: GpuHours, hour: int, weights: FloatArray) -> float:
    free = gpu.free_mib[hour]
    if np.isnan(free):
        return 0.0
    return float(memory_factor(free_histogram(np.array([free]), gpu.full_mib), weights))


def pool_worth(
    pool: str,
    gpus: Sequence[GpuHours],
    slas: Sequence[float],
    alignments: Mapping[str, NodeAlignment] | None = None,
) -> PoolWorth:
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
        sets=tuple(sets_worth(gpus, slas, alignments or {})),
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


def sets_worth(
    gpus: Sequence[GpuHours], slas: Sequence[float], alignments: Mapping[str, NodeAlignment]
) -> Iterator[SetWorth]:
    """Jobs over several GPUs: as many on each node as fit beside each other, the best sets first."""
    nodes = [_NodeHours(alignment, found) for alignment, found in _on_nodes(gpus, alignments)]
    for size in SET_SIZES:
        fitting = [node for node in nodes if node.count >= size]
        if fitting:
            yield SetWorth(size=size, levels=tuple(_set_level(fitting, size, sla) for sla in slas))


def _on_nodes(
    gpus: Sequence[GpuHours], alignments: Mapping[str, NodeAlignment]
) -> Iterator[tuple[NodeAlignment, dict[int, GpuHours]]]:
    """GPUs by their place in the node's report; one that it does not name is in no set."""
    by_node: dict[str, dict[int, GpuHours]] = {}
    for gpu in gpus:
        alignment = alignments.get(gpu.node)
        if alignment is not None and gpu.uuid in alignment.uuids:
            by_node.setdefault(gpu.node, {})[alignment.uuids.index(gpu.uuid)] = gpu
    for node, found in by_node.items():
        yield alignments[node], found


class _NodeHours:
    """The hours of one node's GPUs, [hours, 8]; a GPU or an hour that is not known is busy."""

    def __init__(self, alignment: NodeAlignment, found: Mapping[int, GpuHours]) -> None:
        hours = next(iter(found.values())).idle.size
        self.count = len(found)
        self.pairs = np.broadcast_to(alignment.pairs, (hours, MAX_GPUS, MAX_GPUS))
        self.counted, self.idle, self.memory = (np.zeros((hours, MAX_GPUS)) for _ in range(3))
        self.known = 0  # GPU-hours that are judged
        for place, gpu in found.items():
            counted = counted_on(gpu)
            self.known += int((~np.isnan(counted)).sum())
            self.counted[:, place], self.idle[:, place] = np.nan_to_num(counted), np.nan_to_num(gpu.idle)
            self.memory[:, place] = memory_of(gpu)

    def placed(self, size: int, sla: float) -> Iterator[FloatArray]:
        """What each job brought: the best sets of every hour, then the best of the GPUs that are left, and so on."""
        members = set_members(size)
        sets = gpu_sets(self.counted, self.pairs, size, PlacementSettings())
        promised = sets.runnable * np.roll(self.memory, 1, axis=0)[:, members].min(axis=2)
        brought = runnable_share(self.idle, self.pairs, members) * self.memory[:, members].min(axis=2)
        left = np.where(sets.aligned & (promised >= sla) & (promised > 0), promised, -1.0)
        rows = np.arange(len(left))
        while (left >= 0).any():
            best = left.argmax(axis=1)
            is_placed = left[rows, best] >= 0
            yield brought[rows, best][is_placed]
            shared = (members[best][:, :, None, None] == members[None, None]).any(axis=(1, 3))
            left = np.where(shared | ~is_placed[:, None], -1.0, left)


def _set_level(nodes: Sequence[_NodeHours], size: int, sla: float) -> SlaWorth:
    known = sum(node.known for node in nodes)
    brought = [one for node in nodes for one in node.placed(size, sla)]
    jobs: FloatArray = np.concatenate(brought) if brought else np.zeros(0)
    gpus = sum(node.count for node in nodes)
    return SlaWorth(
        sla=sla,
        gpus_saved=round(float(jobs.sum()) * size / known * gpus, 2) if known else 0.0,
        placed_share=round(jobs.size * size / known, 3) if known else 0.0,
        kept_share=round(float((jobs >= sla).mean()), 3) if jobs.size else None,
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


def by_pool(
    gpus: Sequence[GpuHours],
    pools: Mapping[str, str],
    slas: Sequence[float],
    alignments: Mapping[str, NodeAlignment] | None = None,
) -> tuple[PoolWorth, ...]:
    """`pools`: of each node. The fleet as a whole comes first."""
    groups: dict[str, list[GpuHours]] = {}
    for gpu in gpus:
        groups.setdefault(pools.get(gpu.node, "other"), []).append(gpu)
    if not gpus:
        return ()
    parts = [pool_worth(pool, members, slas, alignments) for pool, members in sorted(groups.items())]
    return (pool_worth("all", gpus, slas, alignments), *parts) if len(parts) > 1 else tuple(parts)
