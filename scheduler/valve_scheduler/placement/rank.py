"""Where an offline job may go: a snapshot of the fleet and a job give every node a predicted share or a
reason.

Pure. The extender asks it in filter, prioritize and bind, the controller for requeueing, `valve explain pod`
for people."""

import enum
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from valve_scheduler.model import (
    MAX_GPUS,
    WorkloadProfile,
    admitted_sets,
    best_sets,
    fits_share,
    has_room,
    held_mib,
    memory_factor,
    memory_weights,
    prior_profile,
    runnable_share,
    set_members,
    set_throughput,
)
from valve_scheduler.model.curve import FloatArray


class Reason(enum.IntEnum):
    """Why a node is refused, in the order of precedence; NONE is a place.

    kube-scheduler groups nodes by identical text in the pod's event, so the texts are few, fixed and free of
    numbers."""

    NONE = 0
    OFF = 1
    STALE = 2
    PROFILE = 3
    AVOIDED = 4
    NO_FREE_GPUS = 5
    MEMORY = 6
    CROWDED = 7
    NOT_ALIGNED = 8
    SLA = 9


REASON_TEXT = {
    Reason.OFF: "valve: harvesting is off, paused or draining on the node",
    Reason.STALE: "valve: no fresh harvest report from the node",
    Reason.PROFILE: "valve: the job's profile is missing, not ready or for another GPU model",
    Reason.AVOIDED: "valve: the job missed its SLA on the node a short while ago",
    Reason.NO_FREE_GPUS: "valve: not enough harvestable GPUs without an offline job",
    Reason.MEMORY: "valve: free GPU memory does not hold the job",
    Reason.CROWDED: "valve: online work needs at its peaks the GPU memory that the job would hold",
    Reason.NOT_ALIGNED: "valve: no GPU set whose busy times are aligned",
    Reason.SLA: "valve: predicted throughput is below the job's SLA",
}


class Standing(enum.IntEnum):
    """May the node take offline work at all."""

    HARVESTING = 0
    OFF = 1
    STALE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementSettings:
    """theta: below this overlap of busy time two GPUs never serve one job. fit_time.

    How often weights must fit.
    """

    theta: float = 0.8
    fit_time: float = 0.95  # the rest is reclaimed time, which a job survives by recompute


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """One consistent view of all nodes; row n of every array is node n, column g its GPU g."""

    names: Sequence[str]
    standing: NDArray[np.int8]  # [nodes] of Standing
    gpu_model: NDArray[np.str_]  # [nodes]
    full_mib: FloatArray  # [nodes] memory of one card
    idle: FloatArray  # [nodes, 8]
    histogram: FloatArray  # [nodes, 8, bins] of free memory
    online_peak: FloatArray  # [nodes, 8] MiB that online uses at its peaks; 0: not known, or crowding is allowed
    alignment: FloatArray  # [nodes, 8, 8]
    open_gpus: NDArray[np.bool_]  # [nodes, 8] harvestable and without an offline job


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSets:
    """Job-independent figures of every set of one size: what a node report decides, so cached per row."""

    members: NDArray[np.intp]  # [sets, k]
    runnable: FloatArray  # [nodes, sets]
    aligned: NDArray[np.bool_]  # [nodes, sets]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What an offline pod asks for. sla 0 is best effort; profile None with an SLA means it was not found."""

    gpus: int
    sla: float = 0.0
    profile: WorkloadProfile | None = None
    avoid: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """Per node: the predicted share of standalone throughput on its best set, or the reason against it."""

    share: FloatArray
    set_index: NDArray[np.intp]
    reason: NDArray[np.int8]


def gpu_sets(
    idle: FloatArray,
    alignment: FloatArray,
    gpu_count: int,
    settings: PlacementSettings,
    theta: FloatArray | float | None = None,
) -> GpuSets:
    """`theta` of each node (its policy's), where it is not the same for all."""
    members = set_members(gpu_count)
    threshold = settings.theta if theta is None else theta

    return GpuSets(
        members=members,
        runnable=runnable_share(idle, alignment, members),
        aligned=admitted_sets(alignment, members, threshold),
    )


def rank(fleet: Fleet, sets: GpuSets, job: Job, settings: PlacementSettings) -> Ranking:
    """Judge every node of the fleet for one job."""
    memory, fits, has_peaks = _memory(fleet, job, settings)
    free = _all_members(fleet.open_gpus, sets.members)
    fitting = free & _all_members(fits, sets.members)
    roomy = fitting & _all_members(has_peaks, sets.members)
    allowed = roomy & sets.aligned
    choice = best_sets(set_throughput(sets.runnable, memory, sets.members), allowed)

    tests = {
        Reason.SLA: choice.share < job.sla,
        Reason.NOT_ALIGNED: ~allowed.any(axis=-1),
        Reason.CROWDED: ~roomy.any(axis=-1),
        Reason.MEMORY: ~fitting.any(axis=-1),
        Reason.NO_FREE_GPUS: ~free.any(axis=-1),
        Reason.AVOIDED: _named(fleet.names, job.avoid),
        Reason.PROFILE: _unprofiled(fleet, job),
        Reason.STALE: fleet.standing == Standing.STALE,
        Reason.OFF: fleet.standing == Standing.OFF,
    }
    reason = np.zeros(len(fleet.names), dtype=np.int8)
    for why, applies in tests.items():  # later ones have precedence
        reason[applies] = why
    placed = reason == Reason.NONE

    return Ranking(
        share=np.where(placed, choice.share, 0.0),
        set_index=np.where(placed, choice.set_index, -1),
        reason=reason,
    )


def ranked_nodes(fleet: Fleet, ranking: Ranking) -> list[tuple[str, float]]:
    """Nodes that take the job, best first, equals by name."""
    rows = np.flatnonzero(ranking.reason == Reason.NONE).tolist()
    found = [(fleet.names[row], float(ranking.share[row])) for row in rows]

    return sorted(found, key=lambda pair: (-pair[1], pair[0]))


def scores(share: FloatArray, top: int = 10) -> NDArray[np.intp]:
    """Shares as the integers 0..top a scheduler extender may give.

    Spread so that the best always gets `top`.
    """
    best = share.max(initial=0.0)
    if best <= 0:
        return np.zeros(len(share), dtype=np.intp)

    return np.asarray(np.rint(share * (top / best)), dtype=np.intp)


def _memory(
    fleet: Fleet, job: Job, settings: PlacementSettings
) -> tuple[FloatArray, NDArray[np.bool_], NDArray[np.bool_]]:
    """Memory factor, whether the job fits, and whether online then finds its peaks, per GPU; one pass per card size, of
    which a fleet has few."""
    factor = np.zeros(fleet.idle.shape, dtype=fleet.histogram.dtype)
    fits, roomy = np.zeros(fleet.idle.shape, dtype=np.bool_), np.zeros(fleet.idle.shape, dtype=np.bool_)
    for full_mib in np.unique(fleet.full_mib[fleet.full_mib > 0]).tolist():
        profile = job.profile or prior_profile(full_mib)
        rows = (fleet.full_mib == full_mib)[:, None]
        # For all nodes, then kept for those of this size: picking rows first would copy a megabyte of
        # histograms.
        of_size = memory_factor(fleet.histogram, memory_weights(profile, full_mib))
        factor = np.where(rows, of_size, factor)
        fits |= rows & (fits_share(fleet.histogram, profile.fit_mib, full_mib) >= settings.fit_time)
        roomy |= rows & has_room(fleet.online_peak, held_mib(profile.fit_mib, full_mib), full_mib)

    return factor, fits, roomy


def _all_members(flags: NDArray[np.bool_], members: NDArray[np.intp]) -> NDArray[np.bool_]:
    """[nodes, gpus] -> [nodes, sets]: is the flag set for every member.

    GPUs as bits of one byte, compared at once.
    """
    bit = np.uint8(1) << np.arange(MAX_GPUS, dtype=np.uint8)
    have = (flags * bit).sum(axis=-1, dtype=np.uint8)
    want = bit[members].sum(axis=-1, dtype=np.uint8)

    return np.asarray((have[:, None] & want) == want)


def _named(names: Sequence[str], wanted: frozenset[str]) -> NDArray[np.bool_]:
    if not wanted:
        return np.zeros(len(names), dtype=np.bool_)

    return np.fromiter((name in wanted for name in names), dtype=np.bool_, count=len(names))


def _unprofiled(fleet: Fleet, job: Job) -> NDArray[np.bool_]:
    if job.profile is None:
        return np.full(len(fleet.names), job.sla > 0)
    if not job.profile.gpu_model:
        return np.zeros(len(fleet.names), dtype=np.bool_)

    return np.asarray(fleet.gpu_model != job.profile.gpu_model)
