"""Rounds over the refused jobs: rankings are kept, only changed nodes are judged, and a round ends in its time.

However many kinds of jobs wait, the loop that renews the controller's lease is never held up."""

import asyncio
import time
from collections.abc import Callable, Iterable

import numpy as np

from valve_scheduler.placement.rank import Job
from valve_scheduler.placement.rankings import Rankings
from valve_scheduler.placement.requeue import Flags, by_kind, newly_feasible
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

    def forget(self) -> None:
        """Judge every job as if it had just been refused."""
        self._taking = {kind: np.zeros_like(taking) for kind, taking in self._taking.items()}
        self._seen.clear()

    async def round(self, jobs: Iterable[Job], now_s: float) -> frozenset[str]:
        """Nodes to touch. Kinds for which no time is left come first in the next round."""
        of_kind = by_kind(jobs)
        self._taking = {kind: taking for kind, taking in self._taking.items() if kind in of_kind}
        self._seen &= {job for members in of_kind.values() for job in members}
        order = [*(kind for kind in of_kind if kind not in self._taking), *self._taking]
        bumps: set[str] = set()
        end_s = self._clock_s() + ROUND_S
        for kind in order:
            ranking, before = self._rankings.of(kind, now_s), self._taking.pop(kind, None)
            now, better = newly_feasible(ranking, before, self._state.row_names(), of_kind[kind], self._seen)
            self._taking[kind] = now  # at the end: looked at last
            self._seen.update(of_kind[kind])
            bumps |= better
            await asyncio.sleep(0)
            if self._clock_s() >= end_s:
                break

        return frozenset(bumps)
