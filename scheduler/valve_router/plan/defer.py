"""Decides whether a training task waits, so that the next request is in time. Nothing waits for ever."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from valve_router.plan.score import ScoreSettings, target_s
from valve_router.plan.task import Task
from valve_router.plan.timeline import Placed, Timeline


class DeferRule(enum.Enum):
    """LeMix's paper looks at the next request, its code at the training task itself."""

    NEXT_REQUEST = "next-request"
    OWN_RESPONSE = "own-response"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeferSettings:
    rule: DeferRule = DeferRule.NEXT_REQUEST
    age_limit_s: float = 60.0


def must_defer(
    timelines: Sequence[Timeline],
    index: int,
    placed: Placed,
    waiting: Task | None,
    now_s: float,
    score: ScoreSettings,
    settings: DeferSettings,
) -> bool:
    """`placed` is the training task on replica `index`; `waiting` the next request of the queue, if there is one."""
    if not placed.task.is_training:
        raise ValueError("only training is deferred")
    if now_s - placed.task.age_from_s >= settings.age_limit_s:
        return False
    if settings.rule is DeferRule.OWN_RESPONSE:
        return placed.response_s > target_s(timelines[index], placed.task, score)
    if waiting is None:
        return False
    with_it = _best_response_s(timelines, waiting, index, placed)
    without = _best_response_s(timelines, waiting)
    limit = min(target_s(timeline, waiting, score) for timeline in timelines)
    return without <= limit < with_it  # it makes the difference: a request that is late anyway holds nothing up


def _best_response_s(
    timelines: Sequence[Timeline], waiting: Task, index: int = -1, placed: Placed | None = None
) -> float:
    best = float("inf")
    for i, timeline in enumerate(timelines):
        end = max(timeline.forward_end_s or [0.0])
        end = max([end, timeline.busy_until_s, *_ends(timeline)])
        if placed is not None and i == index:
            end = max(end, placed.forward[-1][1], placed.end_s if timeline.profile.stop_s is None else 0.0)
        best = min(best, max(end, waiting.arrival_s) + timeline.profile.alone_s(waiting) - waiting.arrival_s)
    return best


def _ends(timeline: Timeline) -> list[float]:
    """With a gate no request waits for a backward."""
    return [] if timeline.profile.stop_s is not None else [back.end_s[0] for back in timeline.backwards]
