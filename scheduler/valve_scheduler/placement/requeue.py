"""Which pending jobs became placeable, and which node to touch so that kube-scheduler tries them again. Pure.

A report that got better is no cluster event: kube-scheduler would look at the pod again after five minutes. A change of
an annotation of the node is one, so the node that just became good enough gets its capacity epoch bumped.

Jobs that differ only in the nodes they avoid are of one kind and judged together."""

from collections.abc import Container, Iterable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from valve_scheduler.placement.rank import Job, Ranking, Reason

Flags = NDArray[np.bool_]


def kind_of(job: Job) -> Job:
    """What it has in common with others, the nodes they avoid left out."""
    return replace(job, avoid=frozenset())


def newly_feasible(
    ranking: Ranking, before: Flags | None, names: Sequence[str], members: Iterable[Job], seen: Container[Job]
) -> tuple[Flags, frozenset[str]]:
    """Rows that take a kind of job now, and per member the best node that takes it and did not before.

    A job just seen was refused a moment ago, so any node that takes it has become good enough since.
    """
    now = np.asarray(ranking.reason == Reason.NONE)
    fresh = now if before is None or len(before) != len(now) else now & ~before
    news, everything = _best_first(ranking, fresh, names), None
    bumps = set()
    for job in members:
        nodes = news
        if job not in seen:
            everything = _best_first(ranking, now, names) if everything is None else everything
            nodes = everything
        bumps.update([next((name for name in nodes if name not in job.avoid), "")])

    return now, frozenset(bumps - {""})


def _best_first(ranking: Ranking, rows: Flags, names: Sequence[str]) -> list[str]:
    found = [(-float(ranking.share[row]), names[row]) for row in np.flatnonzero(rows).tolist()]
    return [name for _, name in sorted(found)]
