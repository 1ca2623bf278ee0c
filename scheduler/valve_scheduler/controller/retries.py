"""Rounds over the refused jobs: rankings are kept, only changed nodes are judged, and a round ends in its time.
Namespaces take turns in it.

However many kinds of jobs wait, the loop that renews the controller's lease is never held up."""

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping

import numpy as np

from valve_scheduler.controller.apart import unhurried
from valve_scheduler.placement.in_turn import in_turn
from valve_scheduler.placement.rank import Job
from valve_scheduler.placement.rankings import Rankings
from valve_scheduler.placement.requeue import Flags, kind_of, newly_feasible
from valve_scheduler.placement.state import ClusterState

# Kinds whose rankings are kept; one of 1,000 nodes is 17 KB.
_KINDS = 512
ROUND_S = 0.1


class Retries:
    """What each refused job could have when it was looked at last."""

    def __init__(self, state: ClusterState, clock_s: Callable[[], float] = time.perf_counter) -> None:
        self._state = state
        self._clock_s = clock_s
        self._rankings = Rankings(state, _KINDS)
        self._taking: dict[Job, Flags] = {}  # kind -> rows that take it; the kind looked at longest ago comes first
        self._seen: set[Job] = set()
        self._after = ""

    def forget(self) -> None:
        """Judge every job as if it had just been refused."""
        self._taking = {kind: np.zeros_like(taking) for kind, taking in self._taking.items()}
        self._seen.clear()

    async def round(self, jobs: Mapping[str, Collection[Job]], now_s: float) -> frozenset[str]:
        """Nodes to touch; `jobs` by namespace. Kinds for which no time is left come first in the next round."""
        kinds: defaultdict[str, set[Job]] = defaultdict(set)
        of_kind: defaultdict[Job, set[Job]] = defaultdict(set)
        async for namespace, job in unhurried((name, job) for name, of in jobs.items() for job in of):
            kind = kind_of(job)
            kinds[namespace].add(kind)
            of_kind[kind].add(job)
        self._taking = {kind: taking for kind, taking in self._taking.items() if kind in of_kind}
        self._seen &= {job for members in of_kind.values() for job in members}
        looked = {kind: place for place, kind in enumerate(self._taking)}
        wanted = {name: sorted(of, key=lambda kind: looked.get(kind, -1)) for name, of in kinds.items()}
        done = set[Job]()
        bumps: set[str] = set()
        end_s = self._clock_s() + ROUND_S
        turns = in_turn(wanted, self._after)
        for self._after, kind in turns:
            if kind in done:
                continue
            done.add(kind)
            ranking, before = self._rankings.of(kind, now_s), self._taking.pop(kind, None)
            now, better = newly_feasible(ranking, before, self._state.row_names(), of_kind[kind], self._seen)
            self._taking[kind] = now  # at the end: looked at last
            self._seen.update(of_kind[kind])
            bumps |= better
            await asyncio.sleep(0)
            if self._clock_s() >= end_s:
                break

        return frozenset(bumps)
