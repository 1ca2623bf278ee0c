"""Chooses the replica for a task, by one of three scores.

`pack` (default) fills one replica while its predicted response stays under half of the target, then the next: quiet
fleets run on few GPUs. `cost` weighs response, idle time and like lengths. `printed` is LeMix's formula as its paper
states it, for comparison only: its numerator is negative, so a *longer* response raises the score.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, pi, sqrt

from valve_router.plan.task import Task
from valve_router.plan.timeline import Placed, Timeline


class Score(enum.Enum):
    PRINTED = "printed"
    COST = "cost"
    PACK = "pack"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreSettings:
    score: Score = Score.PACK
    response_weight: float = 0.15
    length_weight: float = 0.05
    idle_floor_s: float = 0.2
    fill: float = 0.5  # pack: of the target, up to which a replica is filled
    target_factor: float = 5.0  # the target of a request: so many times its response on an idle replica


@dataclass(frozen=True, slots=True)
class Choice:
    index: int
    placed: Placed


def target_s(timeline: Timeline, task: Task, settings: ScoreSettings) -> float:
    return settings.target_factor * timeline.profile.alone_s(task)


def choose(timelines: Sequence[Timeline], tasks: Sequence[Task], settings: ScoreSettings) -> Choice:
    """`tasks`: the same task as each replica would see it (what it has cached differs). Ties: the lowest index."""
    if not timelines:
        raise ValueError("there is no replica to choose")
    placed = [timeline.place(task) for timeline, task in zip(timelines, tasks, strict=True)]
    pairs = list(zip(timelines, placed, strict=True))
    if settings.score is Score.PACK:
        within = [
            i
            for i, (timeline, one) in enumerate(pairs)
            if one.response_s <= settings.fill * target_s(timeline, one.task, settings)
        ]
        if within:
            index = max(within, key=lambda i: (timelines[i].work_s, -i))
        else:
            index = min(range(len(placed)), key=lambda i: (placed[i].response_s, i))
    elif settings.score is Score.COST:
        index = min(range(len(placed)), key=lambda i: (cost(*pairs[i], settings), i))
    else:
        index = max(range(len(placed)), key=lambda i: (printed(*pairs[i], settings), -i))
    return Choice(index, placed[index])


def cost(timeline: Timeline, placed: Placed, settings: ScoreSettings) -> float:
    """Less is better."""
    idle = max(placed.idle_s / timeline.profile.stages - _gap_s(timeline, placed.task), settings.idle_floor_s)
    likeness = settings.length_weight * length_likeness(timeline, placed.task)
    return settings.response_weight * placed.response_s + idle - likeness


def printed(timeline: Timeline, placed: Placed, settings: ScoreSettings) -> float:
    """E1 to E3 of the paper, to the letter. More is better."""
    gap = _gap_s(timeline, placed.task)
    profit = -max(placed.printed_idle_s / timeline.profile.stages - gap, settings.idle_floor_s)
    above = profit + settings.length_weight * length_likeness(timeline, placed.task)
    return above / (settings.response_weight * max(placed.response_s, 1e-9))


def length_likeness(timeline: Timeline, task: Task) -> float:
    """The normal density of this length among those that the replica has run."""
    lengths = timeline.lengths
    if lengths.count < 2 or lengths.deviation <= 0:
        return 0.0
    z = (task.tokens - lengths.mean) / lengths.deviation
    return exp(-z * z / 2) / (lengths.deviation * sqrt(2 * pi))


def _gap_s(timeline: Timeline, task: Task) -> float:
    return 0.0 if timeline.last_arrival_s is None else task.arrival_s - timeline.last_arrival_s
