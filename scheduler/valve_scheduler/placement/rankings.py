"""Rankings of the fleet kept between pods: of a thousand nodes only those that changed are judged anew.

Between two pods one bind and a few reports change a handful of rows; judging all of them again was most of a
filter call."""

from collections import OrderedDict
from dataclasses import fields, replace

import numpy as np
from numpy.typing import NDArray

from valve_scheduler.placement.promise import promised
from valve_scheduler.placement.rank import Fleet, GpuSets, Job, Ranking, rank
from valve_scheduler.placement.state import ClusterState

# Kinds of jobs (size, SLA, profile, nodes to avoid) that wait at one time; one ranking of 1,000 nodes is 17 KB.
_KINDS = 64


class Rankings:
    """One ranking per kind of job, brought up to date when asked."""

    def __init__(self, state: ClusterState, kinds: int = _KINDS) -> None:
        self._state = state
        self._kinds = kinds
        self._kept: OrderedDict[Job, _Kept] = OrderedDict()

    def of(self, job: Job, now_s: float) -> Ranking:
        """Row n of the answer is row n of the state; valid until the next event is handled."""
        fleet, sets = self._state.fleet(now_s), self._state.sets(job.gpus)
        kept = self._kept.pop(job, None)
        if kept is None or len(kept.standing) != len(fleet.standing):
            kept = _Kept(rank(fleet, promised(sets, self._state.belief, job), job, self._state.settings))
        else:
            kept.renew(fleet, sets, job, self._state)
        kept.generation, kept.standing = self._state.generation, fleet.standing
        self._kept[job] = kept
        if len(self._kept) > self._kinds:
            self._kept.popitem(last=False)

        return kept.ranking


class _Kept:
    """A ranking, and what of the state it rests on."""

    def __init__(self, ranking: Ranking) -> None:
        self.ranking = ranking
        self.generation = -1
        self.standing: NDArray[np.int8] = np.zeros(len(ranking.reason), dtype=np.int8)

    def renew(self, fleet: Fleet, sets: GpuSets, job: Job, state: ClusterState) -> None:
        """Judge the rows an event touched since, and those whose report went stale by the clock alone."""
        stale = state.changed_since(self.generation) | (fleet.standing != self.standing)
        rows = np.flatnonzero(stale)
        if not len(rows):
            return
        some = promised(set_rows(sets, rows), state.belief[rows], job)
        fresh = rank(fleet_rows(fleet, rows), some, job, state.settings)
        self.ranking.share[rows] = fresh.share
        self.ranking.set_index[rows] = fresh.set_index
        self.ranking.reason[rows] = fresh.reason


def fleet_rows(fleet: Fleet, rows: NDArray[np.intp]) -> Fleet:
    arrays = {each.name: getattr(fleet, each.name)[rows] for each in fields(fleet) if each.name != "names"}
    return Fleet(names=[fleet.names[row] for row in rows.tolist()], **arrays)


def set_rows(sets: GpuSets, rows: NDArray[np.intp]) -> GpuSets:
    return replace(sets, runnable=sets.runnable[rows], aligned=sets.aligned[rows])
