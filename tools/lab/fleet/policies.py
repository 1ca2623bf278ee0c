"""The policies that decide where a task goes: the router's three scores and what they are held against."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from valve_router.plan.defer import DeferRule
from valve_router.plan.score import Score, ScoreSettings, choose
from valve_router.plan.task import Task
from valve_router.plan.timeline import Timeline


@dataclass(frozen=True, slots=True)
class Sight:
    """What a policy may look at."""

    timelines: Sequence[Timeline]
    under_way: Sequence[int]  # tasks in each replica now
    work_s: Sequence[float]  # computed by each so far
    number: int  # of this task
    training_share: float
    per_s: float
    draw: random.Random


Picks = Callable[[Sight, Task], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    name: str
    pick: Picks
    defer: DeferRule | None = None


def scored(score: Score, fill: float = ScoreSettings().fill) -> Picks:
    settings = ScoreSettings(score=score, fill=fill)

    def pick(sight: Sight, task: Task) -> int:
        return choose(sight.timelines, [task] * len(sight.timelines), settings).index

    return pick


def round_robin(sight: Sight, task: Task) -> int:
    return sight.number % len(sight.timelines)


def at_random(sight: Sight, task: Task) -> int:
    return sight.draw.randrange(len(sight.timelines))


def least_outstanding(sight: Sight, task: Task) -> int:
    return _least(sight.under_way)


def least_used(sight: Sight, task: Task) -> int:
    """The paper's MIX-LUF."""
    return _least(sight.work_s)


def least_response(sight: Sight, task: Task) -> int:
    return _least([timeline.place(task).response_s for timeline in sight.timelines])


def separate(sight: Sight, task: Task) -> int:
    """The paper's SEPARATE: so many nodes train as the share of training tasks says, round robin inside each group."""
    nodes = len(sight.timelines)
    return _apart(sight, task, max(1, min(nodes - 1, int(nodes * sight.training_share + 0.5))))


def separate_dynamic(sight: Sight, task: Task) -> int:
    """A quarter of the nodes serves up to 15 tasks a second, half of them above."""
    nodes = len(sight.timelines)
    return _apart(sight, task, nodes - max(1, nodes // 4 if sight.per_s <= 15 else nodes // 2))


def _apart(sight: Sight, task: Task, training: int) -> int:
    nodes = len(sight.timelines)
    if nodes == 1:
        return 0
    return sight.number % training if task.is_training else training + sight.number % (nodes - training)


def _least(values: Sequence[float]) -> int:
    return min(range(len(values)), key=lambda i: (values[i], i))


NEXT, OWN = DeferRule.NEXT_REQUEST, DeferRule.OWN_RESPONSE
OURS = "pack"


def by_name(*policies: Policy) -> dict[str, Policy]:
    return {policy.name: policy for policy in policies}


POLICIES = by_name(
    Policy(name=OURS, pick=scored(Score.PACK), defer=NEXT),
    Policy(name="cost", pick=scored(Score.COST), defer=NEXT),
    Policy(name="least response", pick=least_response, defer=NEXT),
    Policy(name="printed", pick=scored(Score.PRINTED), defer=NEXT),
    Policy(name="round robin", pick=round_robin),
    Policy(name="least outstanding", pick=least_outstanding),
    Policy(name="least used", pick=least_used),
    Policy(name="random", pick=at_random),
    Policy(name="separate", pick=separate),
    Policy(name="separate, dynamic", pick=separate_dynamic),
)
VARIANTS = by_name(
    Policy(name="pack, never deferred", pick=scored(Score.PACK)),
    Policy(name="pack, deferred by its own response", pick=scored(Score.PACK), defer=OWN),
    Policy(name="printed, deferred by its own response", pick=scored(Score.PRINTED), defer=OWN),
)
FILLS = by_name(
    *(Policy(name=f"pack, filled to {fill:g}", pick=scored(Score.PACK, fill), defer=NEXT) for fill in (0.25, 0.35, 1.0))
)
"""Of the target. What the router's own, a half, is held against where bursts miss marks."""
