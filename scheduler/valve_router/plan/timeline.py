"""Keeps what is planned on one replica, and predicts where a further task would run (LeMix's algorithm 1, mended).

A forward goes through the stages one after another, a training task's backward goes back through them. Without a gate a
forward that does not fit before a planned backward waits for its end. With Valve's gate on the node (`Profile.stop_s`)
training stops for it instead, forward or backward, and what is left moves behind it: no request queues behind training.

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
    moved_s: float = 0.0  # `Timeline.moved_s` when this was planned

    @property
    def response_s(self) -> float:
        return self.forward[-1][1] - self.task.arrival_s

    @property
    def end_s(self) -> float:
        return max(self.forward[-1][1], self.backward[0][1] if self.backward else 0.0)


@dataclass(slots=True)
class Passage:
    """One training task's planned way back, or its forward where that can be stopped. Index 0 is the first stage."""

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
    backwards: list[Passage] = field(default_factory=list)
    last_arrival_s: float | None = None
    work_s: float = 0.0  # requests planned so far: what `pack` goes by
    lengths: Lengths = field(default_factory=Lengths)  # of requests
    printed_lengths: Lengths = field(default_factory=Lengths)  # of both kinds, as LeMix's code counts them
    busy_until_s: float = 0.0  # a decode step that runs: no prefill begins before its end
    training: Passage | None = None  # with a gate: the forward of the last training task
    owed_s: float = 0.0  # training that was sent and is not yet reported done
    moved_s: float = 0.0  # how far measurements have moved the plan so far

    def place(self, task: Task) -> Placed:
        """The prediction. Changes nothing."""
        cost = self.profile.forward.seconds(task)
        has_gate = self.profile.stop_s is not None
        trained = self.training if task.is_training else None
        ready = max(task.arrival_s, self.busy_until_s)
        forward: list[Interval] = []
        idle = printed_idle = 0.0
        passed = 0  # backwards that were waited for: they are over on the later stages
        for stage in range(self.profile.stages):
            before = self.forward_end_s[stage] if self.forward_end_s else ready
            begin = max(ready, before)
            offset = 0.0
            if trained is not None:
                begin = max(begin, trained.end_s[stage])
            elif has_gate and not task.is_training:
                begin = self._stopped_s(stage, begin)
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
            moved_s=self.moved_s,
        )

    def add(self, placed: Placed) -> None:
        """The task goes to this replica."""
        task = placed.task
        ends = [end for _, end in placed.forward]
        if self.profile.stop_s is None:
            self.forward_end_s = ends
        elif task.is_training:
            self.training = Passage([begin for begin, _ in placed.forward], ends, self.profile.forward.seconds(task))
        else:
            for stage, (begin, end) in enumerate(placed.forward):
                self._push(stage, begin, end)
            self.forward_end_s = ends
        if placed.backward:
            begins, ends = ([one[i] for one in placed.backward] for i in (0, 1))
            self.backwards.append(Passage(begins, ends, self.profile.backward.seconds(task)))
        self.last_arrival_s = task.arrival_s
        self.printed_lengths.add(task.tokens)
        if task.is_training:
            self.owed_s += self.profile.whole_s(task)
        else:  # training must not draw requests: it can pause or run elsewhere, they cannot
            self.lengths.add(task.tokens)
            self.work_s += sum(end - begin for begin, end in placed.forward)
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
        """The replica says when the task's forward really ended: what is planned behind it moves by as much.

        What earlier measurements have moved since this was planned is not moved again: the tasks of one queue are all
        late by the same delay."""
        if self.forward_end_s is None or (placed.task.is_training and self.profile.stop_s is not None):
            return  # with a gate nothing waits for training
        late = end_s - placed.forward[-1][1] - (self.moved_s - placed.moved_s)
        self.moved_s += late
        floor = placed.task.arrival_s
        self.forward_end_s = [max(floor, end + late) for end in self.forward_end_s]
        for back in self._ways():
            back.begin_s = [max(floor, begin + late) for begin in back.begin_s]
            back.end_s = [max(floor, end + late) for end in back.end_s]

    def trained(self, task: Task) -> None:
        """The replica says that a training task is over, done or not."""
        self.owed_s = max(0.0, self.owed_s - self.profile.whole_s(task))

    # Parts

    def _ways(self) -> list[Passage]:
        return [*self.backwards, self.training] if self.training is not None else self.backwards

    def _way_back(self, task: Task, ready: float) -> tuple[Interval, ...]:
        cost = self.profile.backward.seconds(task)
        way: list[Interval] = []
        for stage in reversed(range(self.profile.stages)):
            begin = max([ready, *(back.end_s[stage] for back in self.backwards)])
            way.append((begin, begin + cost))
            ready = begin + cost
        return tuple(reversed(way))

    def _stopped_s(self, stage: int, at: float) -> float:
        """When a request that comes to this stage at `at` begins: training that runs there stops, or ends before."""
        stop_s = self.profile.stop_s or 0.0
        for way in self._ways():
            if way.begin_s[stage] <= at < way.end_s[stage]:
                return min(at + stop_s, way.end_s[stage])
        return at

    def _busy_s(self, stage: int, begin: float, end: float) -> float:
        """How much of this gap planned backwards cover. On one stage they do not overlap."""
        if end <= begin:  # a busy replica has no gaps, and many backwards
            return 0.0
        return sum(max(0.0, min(end, back.end_s[stage]) - max(begin, back.begin_s[stage])) for back in self.backwards)

    def _push(self, stage: int, begin: float, end: float) -> None:
        """A request takes this stage: training that runs there is paused, what would begin waits."""
        stop_s, last = self.profile.stop_s or 0.0, self.profile.stages - 1
        if self.training is not None:
            _pause(self.training, stage, begin, end, stop_s)
            for reached in range(1, last + 1):
                _not_before(self.training, reached, self.training.end_s[reached - 1])
            if self.backwards:
                _not_before(self.backwards[-1], last, self.training.end_s[last])
        for back in self.backwards:
            _pause(back, stage, begin, end, stop_s)
        before: Passage | None = None
        for back in self.backwards:  # and so what follows them, on this stage and on those they go on to
            for reached in reversed(range(self.profile.stages)):
                earliest = before.end_s[reached] if before else 0.0
                if reached < last:
                    earliest = max(earliest, back.end_s[reached + 1])
                _not_before(back, reached, earliest)
            before = back


def _pause(way: Passage, stage: int, begin: float, end: float, stop_s: float) -> None:
    if way.begin_s[stage] < begin < way.end_s[stage]:
        way.end_s[stage] += end - begin + stop_s
    elif begin <= way.begin_s[stage] < end:
        _not_before(way, stage, end)


def _not_before(way: Passage, stage: int, begin: float) -> None:
    later = begin - way.begin_s[stage]
    if later > 0:
        way.begin_s[stage] += later
        way.end_s[stage] += later
