"""Whether a job that waits could get its SLA anywhere at all, if no other offline job ran.

Four answers, as they call for different cures: no card of the fleet is up to it even when idle and empty; online work
needs at its peaks the memory that the job would hold; the fleet is busier than the job allows; or only nodes that are
closed to the pod (a cordon, a taint, labels) would do. How busy the fleet is says the same forecast as placement, so
that ends by itself when services get quieter."""

import asyncio
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

import numpy as np

from valve_scheduler.model import HISTOGRAM_BINS, MAX_GPUS
from valve_scheduler.placement.explain import crowded
from valve_scheduler.placement.in_turn import in_turn
from valve_scheduler.placement.rank import (
    Fleet,
    GpuSets,
    Job,
    PlacementSettings,
    Ranking,
    Reason,
    gpu_sets,
    rank,
    ranked_nodes,
)
from valve_scheduler.placement.rankings import fleet_rows, set_rows
from valve_scheduler.placement.state import ClusterState

ROUND_S = 0.1
NEVER, PEAKS, TOO_BUSY, CLOSED = "NoNodeCould", "PeaksNeedMemory", "FleetTooBusy", "NodesClosed"
_EXAMPLES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Beyond:
    """Why; the reason and message of condition SLAUnreachable and of the pod's event."""

    reason: str
    message: str


class ReachVerdicts:
    """Verdicts on the kinds of jobs that wait, kept between rounds: a round judges those judged longest ago, of each
    namespace in turn, for as long as its time lasts."""

    def __init__(self, state: ClusterState, clock_s: Callable[[], float] = time.perf_counter) -> None:
        self._state = state
        self._clock_s = clock_s
        self._known: dict[Job, Beyond | None] = {}
        self._after = ""

    async def of(self, jobs: Mapping[str, Collection[Job]], now_s: float) -> dict[Job, Beyond | None]:
        """By namespace, jobs that avoid only nodes which are closed to their pods; one that was never judged has no
        verdict yet."""
        wanted = {job for of_namespace in jobs.values() for job in of_namespace}
        self._known = {job: verdict for job, verdict in self._known.items() if job in wanted}
        end_s = self._clock_s() + ROUND_S
        judged = {job: place for place, job in enumerate(self._known)}
        order = {name: sorted(of, key=lambda job: judged.get(job, -1)) for name, of in jobs.items()}
        done = set[Job]()
        turns = in_turn(order, self._after)
        for self._after, job in turns:
            if job in done:
                continue
            done.add(job)
            self._known.pop(job, None)
            sets = self._state.sets(job.gpus)
            self._known[job] = beyond(self._state.open_fleet(now_s), sets, job, self._state.settings)
            await asyncio.sleep(0)
            if self._clock_s() >= end_s:
                break

        return self._known


def beyond(fleet: Fleet, sets: GpuSets, job: Job, settings: PlacementSettings) -> Beyond | None:
    """None: some node could. `fleet` and `sets` as they are, with every GPU open that there is; nodes that the job
    avoids are closed to its pod."""
    if not job.sla or job.profile is None or not any(fleet.names):
        return None
    free = replace(job, avoid=frozenset())
    if not job.avoid:
        return _beyond(fleet, sets, free, settings)
    rows = np.flatnonzero([bool(name) and name not in job.avoid for name in fleet.names])
    if not len(rows):
        found = _beyond(fleet, sets, free, settings)
    else:
        found = _beyond(fleet_rows(fleet, rows), set_rows(sets, rows), free, settings)
        if found is None or found.reason != NEVER:  # what open nodes lack may end by itself
            return found
    others = ranked_nodes(fleet, rank(fleet, sets, free, settings))
    if not others:
        return found
    some = ", ".join(name for name, _ in others[:_EXAMPLES])

    return Beyond(
        reason=CLOSED,
        message=f"only nodes that are closed to the pod would keep its SLA, such as {some}: "
        "they are cordoned, have a taint that it does not tolerate, or lack labels that it asks for",
    )


def _beyond(fleet: Fleet, sets: GpuSets, free: Job, settings: PlacementSettings) -> Beyond | None:
    """`free`: a job that avoids no node."""
    now = rank(fleet, sets, free, settings)
    if _places(now):
        return None
    idle = replace(
        fleet,
        idle=np.ones_like(fleet.idle),
        alignment=np.ones_like(fleet.alignment),
        online_peak=np.zeros_like(fleet.online_peak),
        histogram=np.broadcast_to(np.eye(HISTOGRAM_BINS, dtype=fleet.histogram.dtype)[-1], fleet.histogram.shape),
    )
    best = gpu_sets(np.ones(MAX_GPUS), np.ones((MAX_GPUS, MAX_GPUS)), free.gpus, settings)
    everywhere = (len(fleet.names), len(best.members))
    ideal_sets = GpuSets(
        members=best.members,
        runnable=np.broadcast_to(best.runnable, everywhere),
        aligned=np.broadcast_to(best.aligned, everywhere),
    )

    def in_peace(wish: Job) -> Ranking:
        return rank(idle, ideal_sets, wish, settings)

    if not _places(in_peace(free)):
        return Beyond(reason=NEVER, message=_never(idle, free, in_peace))
    no_peaks = rank(replace(fleet, online_peak=np.zeros_like(fleet.online_peak)), sets, free, settings)
    would = replace(now, reason=np.where(no_peaks.reason == Reason.NONE, now.reason, np.int8(Reason.NONE)))
    if why := crowded(fleet, would, free):
        return Beyond(reason=PEAKS, message=why)
    promised = ranked_nodes(fleet, rank(fleet, sets, replace(free, sla=0.0), settings))
    best_now = f"{promised[0][1]:.2f} on {promised[0][0]}" if promised else "nothing"

    return Beyond(
        reason=TOO_BUSY,
        message=f"as busy as the fleet was in the last hour the best is {best_now}, with no other offline job; "
        f"the job asks for {free.sla:.2f}",
    )


def _never(idle: Fleet, job: Job, in_peace: Callable[[Job], Ranking]) -> str:
    reasons = {Reason(why) for name, why in zip(idle.names, in_peace(job).reason.tolist(), strict=True) if name}
    if Reason.SLA in reasons:
        name, share = ranked_nodes(idle, in_peace(replace(job, sla=0.0)))[0]
        return f"even idle and empty the best node gives {share:.2f} ({name}); the job asks for {job.sla:.2f}"
    if Reason.MEMORY in reasons:
        return f"no {job.gpus} GPUs of a node hold the job even when they are empty"
    if Reason.NO_FREE_GPUS in reasons:
        return f"no node of its GPU model has {job.gpus} GPUs"
    model = job.profile.gpu_model if job.profile else ""
    return f"no node reports the GPU model of its profile, {model}"


def _places(ranking: Ranking) -> bool:
    return bool((ranking.reason == Reason.NONE).any())
