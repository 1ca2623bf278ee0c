"""Which pending jobs became placeable, and which node to touch so that kube-scheduler tries them again.

A report that got better is no cluster event: kube-scheduler would look at the pod again after five minutes. A change of
an annotation of the node is one, so the node that just became good enough gets its capacity epoch bumped.

Jobs that differ only in the nodes they avoid are judged together, rankings are kept between rounds, and a round ends
when its time is over: however many kinds of jobs wait, the loop that renews the controller's lease is never held up."""

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from valve_scheduler.placement.rank import Job, Ranking, Reason
from valve_scheduler.placement.rankings import Rankings
from valve_scheduler.placement.state import ClusterState

# Kinds whose rankings are kept; one of 1,000 nodes is 17 KB.
_KINDS = 512
ROUND_S = 0.1

Flags = NDArray[np.bool_]


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
        """Per refused job the best node that takes it now and did not before. Kinds for which no time is left come
        first in the next round. A job just seen was refused a moment ago, so any node that takes it has become good
        enough since."""
        of_kind: defaultdict[Job, list[Job]] = defaultdict(list)
        for job in jobs:
            of_kind[replace(job, avoid=frozenset())].append(job)
        self._taking = {kind: taking for kind, taking in self._taking.items() if kind in of_kind}
        self._seen &= {job for members in of_kind.values() for job in members}
        order = [*(kind for kind in of_kind if kind not in self._taking), *self._taking]
        bumps: set[str] = set()
        end_s = self._clock_s() + ROUND_S
        for kind in order:
            bumps |= self._judge(kind, of_kind[kind], now_s)
            await asyncio.sleep(0)
            if self._clock_s() >= end_s:
                break

        return frozenset(bumps)

    def _judge(self, kind: Job, members: list[Job], now_s: float) -> set[str]:
        ranking = self._rankings.of(kind, now_s)
        now = np.asarray(ranking.reason == Reason.NONE)
        before = self._taking.pop(kind, None)
        self._taking[kind] = now  # at the end: looked at last
        fresh = now if before is None or len(before) != len(now) else now & ~before
        news, everything = self._best_first(ranking, fresh), None
        bumps = set()
        for job in members:
            nodes = news
            if job not in self._seen:
                everything = self._best_first(ranking, now) if everything is None else everything
                nodes = everything
                self._seen.add(job)
            bumps.update([next((name for name in nodes if name not in job.avoid), "")])

        return bumps - {""}

    def _best_first(self, ranking: Ranking, rows: Flags) -> list[str]:
        names = self._state.row_names()
        found = [(-float(ranking.share[row]), names[row]) for row in np.flatnonzero(rows).tolist()]

        return [name for _, name in sorted(found)]
