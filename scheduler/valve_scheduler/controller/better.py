"""Whether a pod that gets no time where it is would get some elsewhere: if not, it is as well off where it is."""

from collections.abc import Container, Iterable, Mapping
from dataclasses import replace

import numpy as np
from valve_kube.errors import InvalidObject
from valve_kube.node_wish import node_wish
from valve_kube.objects import Object, offline_pod

from valve_scheduler.controller.monitor import Owner, Track
from valve_scheduler.controller.workloads import is_starved
from valve_scheduler.placement.rank import Job, Reason
from valve_scheduler.placement.rankings import Rankings
from valve_scheduler.placement.state import ClusterState

WORTH_IT = 0.1  # predicted share of the other node; a move costs a start
AT_ONCE = 32  # pods that a round judges: each may need a ranking of the whole fleet, and the lease must be renewed


class Better:
    def __init__(self, state: ClusterState) -> None:
        self._state = state
        self._rankings = Rankings(state)
        self._last = ""  # UID of the pod that was judged last
        self._turn = 0

    def movable(
        self,
        tracks: Iterable[Track],
        pods: Mapping[str, Object],
        owners: Mapping[str, Owner],
        now_s: float,
        guarded: Container[str] = (),
    ) -> list[Track]:
        """All but those for which there is no other place, or which came after as many as there are: of best effort
        another node, of pods whose GPU is under guard (`guarded`, by UID) another GPU. A node is the place of one pod.
        One that is bound to pods elsewhere or to a volume stays: only the scheduler could say where it may go."""
        found: list[Track] = []
        starved: list[Track] = []
        for track in tracks:
            is_guarded = track.sample.pod_uid in guarded
            if not is_starved(track) or not (track.sample.is_best_effort or is_guarded):
                found.append(track)
            elif not node_wish(pods[track.sample.pod_uid]["spec"]).is_bound:
                starved.append(track)
        taken: set[int] = set()  # rows
        for track in self._next(starved):
            uid, node = track.sample.pod_uid, track.sample.node
            job = self._job(pods[uid], owners.get(track.sample.owner_uid), now_s, "" if uid in guarded else node)
            places = self._places(job, now_s) - taken if job is not None else set()
            if places:
                taken.add(min(places))
                found.append(track)

        return found

    def _next(self, starved: list[Track]) -> list[Track]:
        """A few in turn, so that one without a place, or one that takes a place and may not move yet, holds up none
        behind it."""
        starved.sort(key=lambda track: (track.sample.pod_uid <= self._last, track.sample.pod_uid))
        chosen = starved[:AT_ONCE]
        if chosen:
            self._last = chosen[-1].sample.pod_uid
            self._turn = (self._turn + 1) % len(chosen)

        return chosen[self._turn :] + chosen[: self._turn]

    def _job(self, pod: Object, owner: Owner | None, now_s: float, but: str) -> Job | None:
        try:
            job = self._state.asked.job(offline_pod(pod), now_s)
        except InvalidObject:
            return None
        avoided = {node for node, until_s in (owner.avoid_until_s if owner else {}).items() if until_s > now_s}
        return replace(job, avoid=job.avoid | avoided | {but})

    def _places(self, job: Job, now_s: float) -> set[int]:
        ranking = self._rankings.of(job, now_s)
        return set(np.flatnonzero((ranking.reason == Reason.NONE) & (ranking.share >= WORTH_IT)).tolist())
