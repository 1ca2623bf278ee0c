"""Plays replicas that run exactly what was planned, and tells which requests met their target."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from valve_router.plan.profile import Law, Profile
from valve_router.plan.score import Score, ScoreSettings, choose, target_s
from valve_router.plan.task import Task, TaskKind
from valve_router.plan.timeline import Timeline

LLAMA_8B = Profile(
    stages=2,
    forward=Law(fixed_s=0.06, per_token_s=0.05 / 150),  # 0.11 s a stage for a usual chat request
    backward=Law(fixed_s=0.08, per_token_s=0.07 / 150),
)


@dataclass(frozen=True)
class Outcome:
    attainment: float  # of the requests
    largest_share: float  # of all tasks on one replica
    node_seconds: float
    end_s: float


def arrivals(rate, count, training_share, seed, tokens=150):
    draw = random.Random(seed)
    now, tasks = 0.0, []
    for _ in range(count):
        now += draw.expovariate(rate)
        kind = TaskKind.TRAINING if draw.random() < training_share else TaskKind.INFERENCE
        tasks.append(Task(arrival_s=now, tokens=max(8, round(draw.lognormvariate(0, 0.8) * tokens)), kind=kind))
    return tasks


def replay(tasks, *, nodes=4, profile=LLAMA_8B, score=Score.PACK, pick=None, noise=0.0, skew=1.0, calibrate=True):
    """`pick(timelines, task)` in place of a score. `skew`: the true cost over the profile's, `noise`: of each task."""
    settings = ScoreSettings(score=score)
    believed = [Timeline(profile) for _ in range(nodes)]
    real = [Timeline(profile) for _ in range(nodes)]
    draw = random.Random(1)
    met = requests = 0
    counts, first, last = [0] * nodes, {}, {}
    for task in tasks:
        choice = choose(believed, [task] * nodes, settings)
        index = choice.index if pick is None else pick(believed, task)
        placed = believed[index].place(task)
        believed[index].add(placed)
        factor = skew * (1 + noise * draw.uniform(-1, 1))
        truth = scaled(profile, factor)
        real[index].profile = truth
        ran = real[index].place(task)
        real[index].add(ran)
        if calibrate:
            believed[index].measured(placed, ran.forward[-1][1])
        counts[index] += 1
        first.setdefault(index, task.arrival_s)
        last[index] = max(last.get(index, 0.0), ran.end_s)
        if not task.is_training:
            requests += 1
            met += ran.response_s <= target_s(Timeline(profile), task, settings)
    busy = sum(last[i] - first[i] for i in first)
    return Outcome(met / max(1, requests), max(counts) / len(tasks), busy, max(last.values()))


def scaled(profile, factor):
    def law(one):
        return Law(
            fixed_s=one.fixed_s * factor,
            per_token_s=one.per_token_s * factor,
            per_square_s=one.per_square_s * factor,
        )

    return replace(profile, forward=law(profile.forward), backward=law(profile.backward))


def least_response(timelines, task):
    return min(range(len(timelines)), key=lambda i: timelines[i].place(task).response_s)


class RoundRobin:
    def __init__(self):
        self._next = -1

    def __call__(self, timelines, task):
        self._next += 1
        return self._next % len(timelines)
