"""One run: tasks arrive, a policy sends them, replicas compute, and what was measured comes back when it is over."""

from __future__ import annotations

import heapq
import random
from bisect import bisect_right
from dataclasses import dataclass, replace
from itertools import count

from valve_router.plan.defer import DeferSettings, must_defer
from valve_router.plan.profile import Profile
from valve_router.plan.score import ScoreSettings, target_s
from valve_router.plan.task import Task
from valve_router.plan.timeline import Placed, Timeline
from valve_tools.lab.fleet.load import Arrivals, FleetShape, mean_tokens
from valve_tools.lab.fleet.policies import Policy, Sight
from valve_tools.lab.fleet.stages import FOREVER, Ran, Stages

SLEEPS_AFTER_S = 10.0  # a replica that computed nothing for so long counts as asleep
AGE_LIMIT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetWorld:
    """One setting under one seed."""

    fleet: FleetShape
    arrivals: Arrivals
    seed: int
    noise: float = 0.0  # of each task, up or down
    is_calibrated: bool = True
    believed: Profile | None = None  # what the planner takes a replica for, in place of what it is


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Of one run. Throughput is by the wall; node-seconds stand apart."""

    attainment: float  # of the requests: first token within five times the response of an idle replica
    response_s: float
    response95_s: float
    tasks_per_s: float  # that ended within the last three quarters of the arrivals: by the wall, without the tail
    whole_per_s: float  # from the first arrival to the end of the last task
    node_seconds: float  # as the paper counts: from a node's first task to its last
    awake_seconds: float  # without pauses of more than SLEEPS_AFTER_S
    largest_share: float
    oldest_s: float  # the longest that a training task waited to be sent
    trained_per_s: float  # training tasks over the wall
    unserved: int
    densest: float  # of the tasks, how many come in the busiest tenth of the time


class FleetRun:
    def __init__(self, world: FleetWorld, policy: Policy) -> None:
        self.world, self.policy = world, policy
        self.tasks = world.arrivals.tasks(world.seed)
        true = world.fleet.profile
        held = world.believed or true
        self.timelines = [Timeline(held) for _ in range(world.fleet.nodes)]
        self.real = [Stages(true) for _ in range(world.fleet.nodes)]
        self.under_way = [0] * world.fleet.nodes
        self.draw = random.Random(world.seed + 1)
        self.noise = random.Random(world.seed + 2)
        self.ran: list[tuple[int, Ran]] = []
        self.parked: list[Task] = []
        self.oldest_s = 0.0
        self._open: list[tuple[float, int, int, Task, Placed | None]] = []
        self._numbers = count()
        self._training: list[tuple[int, Ran]] = []
        self._usual = max(1, round(mean_tokens([one for one in self.tasks if not one.is_training])))
        self._settings = ScoreSettings()

    def figures(self) -> Figures:
        for number, task in enumerate(self.tasks):
            self._until(task.arrival_s)
            self._offer(task, number)
        now = self.tasks[-1].arrival_s
        while self.parked:  # no request comes any more: what is parked runs at its age limit at the latest
            now += 1.0
            self._until(now)
        for node in self.real:
            node.advance(FOREVER)
        return self._books()

    def _until(self, now_s: float) -> None:
        """Settles what ended, and lets go the parked tasks that may go now."""
        self._settle(now_s)
        parked, self.parked = self.parked, []
        for number, task in enumerate(parked):  # the oldest first; where it waits, younger ones wait behind it
            self._offer(replace(task, arrival_s=now_s, enqueued_s=task.age_from_s), -1)
            if self.parked:
                self.parked += parked[number + 1 :]
                return

    def _settle(self, now_s: float) -> None:
        for index in {index for index, _ in self._training}:
            self.real[index].advance(now_s)
        for index, ran in self._training:
            if ran.end_s <= now_s:
                self.under_way[index] -= 1
                self.timelines[index].trained(ran.task)
        self._training = [(index, ran) for index, ran in self._training if ran.end_s > now_s]
        while self._open and self._open[0][0] <= now_s:
            end_s, _, index, task, placed = heapq.heappop(self._open)
            if placed is None:
                self.under_way[index] -= 1
                if task.is_training:
                    self.timelines[index].trained(task)
            elif self.world.is_calibrated:
                self.timelines[index].measured(placed, end_s)

    def _offer(self, task: Task, number: int) -> None:
        sight = Sight(
            self.timelines,
            self.under_way,
            [one.busy_s for one in self.real],
            number if number >= 0 else len(self.ran),
            self.world.arrivals.training,
            self.world.arrivals.per_s,
            self.draw,
        )
        index = self.policy.pick(sight, task)
        placed = self.timelines[index].place(task)
        now_s = task.arrival_s
        if task.is_training and self.policy.defer is not None:
            waiting = Task(arrival_s=now_s, tokens=self._usual)
            settings = DeferSettings(rule=self.policy.defer, age_limit_s=AGE_LIMIT_S)
            if must_defer(self.timelines, index, placed, waiting, now_s, self._settings, settings):
                self.parked.append(task)
                return
            self.oldest_s = max(self.oldest_s, now_s - task.age_from_s)
        self.timelines[index].add(placed)
        factor = 1 + self.world.noise * self.noise.uniform(-1, 1)
        ran = self.real[index].take(task, now_s, factor)
        self.ran.append((index, ran))
        self.under_way[index] += 1
        if ran.end_s < FOREVER:
            heapq.heappush(self._open, (ran.forward_end_s, next(self._numbers), index, task, placed))
            heapq.heappush(self._open, (ran.end_s, next(self._numbers), index, task, None))
        else:
            self._training.append((index, ran))

    def _books(self) -> Figures:
        requests = [ran for _, ran in self.ran if not ran.task.is_training]
        responses = sorted(ran.response_s for ran in requests)
        idle = Timeline(self.world.fleet.profile)
        met = sum(ran.response_s <= target_s(idle, ran.task, self._settings) + 1e-9 for ran in requests)
        spans: dict[int, list[tuple[float, float]]] = {}
        for index, ran in self.ran:
            spans.setdefault(index, []).append((ran.first_s, ran.end_s))
        end_s = max(ran.end_s for _, ran in self.ran)
        wall_s = end_s - self.tasks[0].arrival_s
        last_s = self.tasks[-1].arrival_s
        begin_s = self.tasks[0].arrival_s + 0.25 * (last_s - self.tasks[0].arrival_s)
        return Figures(
            attainment=met / max(1, len(requests)),
            response_s=sum(responses) / max(1, len(responses)),
            response95_s=responses[int(0.95 * (len(responses) - 1))] if responses else 0.0,
            tasks_per_s=sum(begin_s < ran.end_s <= last_s for _, ran in self.ran) / (last_s - begin_s),
            whole_per_s=len(self.ran) / wall_s,
            node_seconds=sum(max(e for _, e in one) - min(b for b, _ in one) for one in spans.values()),
            awake_seconds=sum(_awake_s(one) for one in spans.values()),
            largest_share=max(len(one) for one in spans.values()) / len(self.ran),
            oldest_s=self.oldest_s,
            trained_per_s=(len(self.ran) - len(requests)) / wall_s,
            unserved=len(self.tasks) - len(self.ran),
            densest=_densest([one.arrival_s for one in self.tasks]),
        )


def _densest(times: list[float]) -> float:
    """`times` in order."""
    long_s = 0.1 * (times[-1] - times[0])
    return max(bisect_right(times, at + long_s) - number for number, at in enumerate(times)) / len(times)


def _awake_s(spans: list[tuple[float, float]]) -> float:
    awake, until = 0.0, -FOREVER
    for begin, end in sorted(spans):
        if begin - until > SLEEPS_AFTER_S:
            awake += end - begin
        else:
            awake += max(0.0, end - until)
        until = max(until, end)
    return awake
