"""Keeps what is planned on one replica, and predicts where a further task would run (LeMix's algorithm 1, mended).

A forward goes through the stages one after another, a training task's backward goes back through them. Without a gate a
forward that does not fit before a planned backward waits for its end. With Valve's gate on the node (`Profile.stop_s`)
training stops for it instead, and what is left of the backward moves behind it.

Mended against the paper, each with a test: idle time is what no planned interval covers (the printed sum counts a
backward once at most, so it says too much on later stages); a backward never overlaps an earlier one on a stage; a
stage starts at the end of the one before.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import sqrt

from valve_router.plan.profile import Profile
from valve_router.plan.task import Task

Interval = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """Where a task would run: nothing is planned yet."""

    task: Task
    forward: tuple[Interval, ...]  # by stage
    backward: tuple[Interval, ...]  # by stage; empty for inference
    idle_s: float  # over all stages, from the end of what is planned there to its begin, less what ran in between
    printed_idle_s: float

    @property
    def response_s(self) -> float:
        return self.forward[-1][1] - self.task.arrival_s

    @property
    def end_s(self) -> float:
        return max(self.forward[-1][1], self.backward[0][1] if self.backward else 0.0)


@dataclass(slots=True)
class Backward:
    """One training task's planned way back. Index 0 is the first stage, which it reaches last."""

    begin_s: list[float]
    end_s: list[float]
    cost_s: float


@dataclass(slots=True)
class Lengths:
    """Mean and deviation of the lengths that a replica has run."""

    count: int = 0
    mean: float = 0.0
    _squares: float = 0.0

    def add(self, tokens: int) -> None:
        self.count += 1
        delta = tokens - self.mean
        self.mean += delta / self.count
        self._squares += delta * (tokens - self.mean)

    @property
    def deviation(self) -> float:
        return sqrt(self._squares / self.count) if self.count else 0.0


@dataclass(slots=True)
class Timeline:
    profile: Profile
    forward_end_s: list[float] | None = None  # of the last planned task by stage; None: nothing yet
    backwards: list[Backward] = field(default_factory=list)
    last_arrival_s: float | None = None
    work_s: float = 0.0  # planned so far
    lengths: Lengths = field(default_factory=Lengths)
    busy_until_s: float = 0.0  # a decode step that runs: no prefill begins before its end

    def place(self, task: Task) -> Placed:
        """The prediction. Changes nothing."""
        cost = self.profile.forward.seconds(task)
        has_gate = self.profile.stop_s is not None
        ready = max(task.arrival_s, self.busy_until_s)
        forward: list[Interval] = []
        idle = printed_idle = 0.0
        passed = 0  # backwards that were waited for: they are over on the later stages
        for stage in range(self.profile.stages):
            before = self.forward_end_s[stage] if self.forward_end_s else ready
            begin = max(ready, before)
            offset = 0.0
            if has_gate:
                begin += self._stop_s(stage, begin)
            while not has_gate and passed < len(self.backwards):
                back = self.backwards[passed]
                if begin + cost <= back.begin_s[stage]:
                    break
                begin = max(begin, back.end_s[stage])
                offset += back.cost_s if before <= back.begin_s[stage] else 0.0
                passed += 1
            printed_idle += begin - before - offset
            idle += begin - before - self._busy_s(stage, before, begin)
            forward.append((begin, begin + cost))
            ready = begin + cost
        return Placed(
            task=task,
            forward=tuple(forward),
            backward=self._way_back(task, ready) if task.is_training else (),
            idle_s=max(0.0, idle),
            printed_idle_s=printed_idle,
        )

    def add(self, placed: Placed) -> None:
        """The task goes to this replica."""
        task = placed.task
        if self.profile.stop_s is not None:
            for stage, (begin, end) in enumerate(placed.forward):
                self._push(stage, begin, end)
        self.forward_end_s = [end for _, end in placed.forward]
        if placed.backward:
            begins, ends = ([one[i] for one in placed.backward] for i in (0, 1))
            self.backwards.append(Backward(begins, ends, self.profile.backward.seconds(task)))
        self.last_arrival_s = task.arrival_s
        self.lengths.add(task.tokens)
        self.work_s += sum(end - begin for begin, end in (*placed.forward, *placed.backward))
        self.forget(task.arrival_s)

    def forget(self, now_s: float) -> None:
        """Drop backwards that are over and that no gap before a later task could still hold."""
        ends = self.forward_end_s or [now_s] * self.profile.stages
        self.backwards = [
            back
            for back in self.backwards
            if back.end_s[0] > now_s or any(end > until for end, until in zip(back.end_s, ends, strict=True))
        ]

    def measured(self, placed: Placed, end_s: float) -> None:
        """The replica says when the task's forward really ended: what is planned behind it moves by as much."""
        late = end_s - placed.forward[-1][1]
        if self.forward_end_s is None:
            return
        floor = placed.task.arrival_s
        self.forward_end_s = [max(floor, end + late) for end in self.forward_end_s]
        for back in self.backwards:
            back.begin_s = [max(floor, begin + late) for begin in back.begin_s]
            back.end_s = [max(floor, end + late) for end in back.end_s]

    # Parts

    def _way_back(self, task: Task, ready: float) -> tuple[Interval, ...]:
        cost = self.profile.backward.seconds(task)
        way: list[Interval] = []
        for stage in reversed(range(self.profile.stages)):
            begin = max([ready, *(back.end_s[stage] for back in self.backwards)])
            way.append((begin, begin + cost))
            ready = begin + cost
        return tuple(reversed(way))

    def _stop_s(self, stage: int, at: float) -> float:
        """What stopping a backward costs that runs at this moment."""
        runs = any(back.begin_s[stage] <= at < back.end_s[stage] for back in self.backwards)
        return (self.profile.stop_s or 0.0) if runs else 0.0

    def _busy_s(self, stage: int, begin: float, end: float) -> float:
        """How much of this gap planned backwards cover. On one stage they do not overlap."""
        return sum(max(0.0, min(end, back.end_s[stage]) - max(begin, back.begin_s[stage])) for back in self.backwards)

    def _push(self, stage: int, begin: float, end: float) -> None:
        """A forward takes this stage: a backward that runs there is paused, one that would begin waits."""
        for back in self.backwards:
            if back.begin_s[stage] < begin < back.end_s[stage]:
                back.end_s[stage] += end - begin + (self.profile.stop_s or 0.0)
            elif begin <= back.begin_s[stage] < end:
                _shift(back, stage, end)
        before: Backward | None = None
        for back in self.backwards:  # and so what follows them, on this stage and on those they go on to
            for reached in reversed(range(self.profile.stages)):
                earliest = before.end_s[reached] if before else 0.0
                if reached + 1 < self.profile.stages:
                    earliest = max(earliest, back.end_s[reached + 1])
                if back.begin_s[reached] < earliest:
                    _shift(back, reached, earliest)
            before = back


def _shift(back: Backward, stage: int, begin: float) -> None:
    back.end_s[stage] += begin - back.begin_s[stage]
    back.begin_s[stage] = begin
