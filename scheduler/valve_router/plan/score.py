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
from valve_router.plan.timeline import Lengths, Placed, Timeline


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
    pairs = list(zip(timelines, tasks, strict=True))
    if settings.score is Score.PACK:
        return _packed(pairs, settings)
    placed = [timeline.place(task) for timeline, task in pairs]
    if settings.score is Score.COST:
        index = min(range(len(placed)), key=lambda i: (cost(timelines[i], placed[i], settings), i))
    else:
        index = max(range(len(placed)), key=lambda i: (printed(timelines[i], placed[i], settings), -i))
    return Choice(index, placed[index])


def _packed(pairs: Sequence[tuple[Timeline, Task]], settings: ScoreSettings) -> Choice:
    """The one with most work behind it among those that would be in time, else the quickest. In that order they are
    asked, and whose line alone is too long is not: of a hundred replicas a few are planned on."""
    limits = [settings.fill * settings.target_factor * timeline.profile.whole_s(task) for timeline, task in pairs]
    least = [_least_s(timeline, task) for timeline, task in pairs]
    placed: dict[int, Placed] = {}
    for i in sorted(range(len(pairs)), key=lambda i: (-pairs[i][0].work_s, i)):
        if least[i] > limits[i]:
            continue
        placed[i] = pairs[i][0].place(pairs[i][1])
        if _took_s(pairs[i][0], placed[i]) <= limits[i]:
            return Choice(i, placed[i])
    best, best_s = -1, float("inf")
    for i in sorted(range(len(pairs)), key=lambda i: (least[i], i)):
        if least[i] > best_s:
            break
        one = placed.get(i) or pairs[i][0].place(pairs[i][1])
        took_s = _took_s(pairs[i][0], one)
        if (took_s, i) < (best_s, best):
            best, best_s, placed[i] = i, took_s, one
    return Choice(best, placed[best])


def _least_s(timeline: Timeline, task: Task) -> float:
    """No placement takes less, to a millionth of a second."""
    profile = timeline.profile
    cost_s = profile.forward.seconds(task)
    behind_s = [end + (profile.stages - stage) * cost_s for stage, end in enumerate(timeline.forward_end_s or ())]
    ready_s = max(task.arrival_s, timeline.busy_until_s) + profile.stages * cost_s
    least_s = max([ready_s, *behind_s]) - task.arrival_s
    if task.is_training and profile.stop_s is not None:
        least_s = max(least_s, profile.whole_s(task) + timeline.owed_s / profile.stages)
    return least_s - 1e-6


def _took_s(timeline: Timeline, placed: Placed) -> float:
    """Of a request to its first token. With a gate, of training with its way back, after what the replica still owes:
    nothing but this keeps one replica from getting all of it."""
    profile = timeline.profile
    if not placed.task.is_training or profile.stop_s is None:
        return placed.response_s
    return max(placed.end_s - placed.task.arrival_s, profile.whole_s(placed.task) + timeline.owed_s / profile.stages)


def cost(timeline: Timeline, placed: Placed, settings: ScoreSettings) -> float:
    """Less is better."""
    idle = max(placed.idle_s / timeline.profile.stages - _gap_s(timeline, placed.task), settings.idle_floor_s)
    likeness = settings.length_weight * length_likeness(timeline.lengths, placed.task)
    return settings.response_weight * placed.response_s + idle - likeness


def printed(timeline: Timeline, placed: Placed, settings: ScoreSettings) -> float:
    """E1 to E3 of the paper, to the letter. More is better."""
    gap = _gap_s(timeline, placed.task)
    profit = -max(placed.printed_idle_s / timeline.profile.stages - gap, settings.idle_floor_s)
    above = profit + settings.length_weight * length_likeness(timeline.printed_lengths, placed.task)
    return above / (settings.response_weight * max(placed.response_s, 1e-9))


def length_likeness(lengths: Lengths, task: Task) -> float:
    """The normal density of this length among those that the replica has run."""
    if lengths.count < 2 or lengths.deviation <= 0:
        return 0.0
    z = (task.tokens - lengths.mean) / lengths.deviation
    return exp(-z * z / 2) / (lengths.deviation * sqrt(2 * pi))


def _gap_s(timeline: Timeline, task: Task) -> float:
    return 0.0 if timeline.last_arrival_s is None else task.arrival_s - timeline.last_arrival_s
