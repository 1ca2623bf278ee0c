"""What a replica really does: its stages, event by event. It shares no line with the planner's prediction.

Requests pass the stages in the order they came. Without a gate a training task's forward stands in that line, its
backward is one block that nothing interrupts, and a forward that would run into one waits for its end. With a gate
training has what requests leave of each stage, piece by piece.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from valve_router.plan.profile import Profile
from valve_router.plan.task import Task

FOREVER = float("inf")


@dataclass(slots=True)
class Ran:
    """One task as it really ran."""

    task: Task
    first_s: float = FOREVER  # when it first computed
    forward_end_s: float = FOREVER
    end_s: float = FOREVER

    @property
    def response_s(self) -> float:
        return self.forward_end_s - self.task.arrival_s


@dataclass(slots=True)
class _Pieces:
    """A training task under way: (stage, seconds left), forward and then back."""

    ran: Ran
    left: list[list[float]]
    forwards: int
    stops: int = 0


@dataclass(slots=True)
class Stages:
    profile: Profile
    booked: list[list[tuple[float, float]]] = field(init=False)  # with a gate: requests alone; else backwards
    line_s: list[float] = field(init=False)  # end of the last forward in the line
    training: list[_Pieces] = field(default_factory=list)
    clock_s: float = 0.0
    busy_s: float = 0.0

    def __post_init__(self) -> None:
        self.booked = [[] for _ in range(self.profile.stages)]
        self.line_s = [0.0] * self.profile.stages

    def take(self, task: Task, now_s: float, factor: float = 1.0) -> Ran:
        """`factor`: the true cost over the profile's. With a gate a training task's end is known after `advance`."""
        ran = Ran(task)
        forward_s = self.profile.forward.seconds(task) * factor
        backward_s = self.profile.backward.seconds(task) * factor
        if self.profile.stop_s is not None:
            self.advance(now_s)
            if task.is_training:
                way = list(range(self.profile.stages))
                left = [[float(s), forward_s] for s in way] + [[float(s), backward_s] for s in reversed(way)]
                self.training.append(_Pieces(ran, left, self.profile.stages))
            else:
                self._request(ran, now_s, forward_s)
        else:
            self._in_line(ran, now_s, forward_s, backward_s)
        self.busy_s += forward_s * self.profile.stages + (backward_s * self.profile.stages if task.is_training else 0)
        return ran

    def _request(self, ran: Ran, now_s: float, cost_s: float) -> None:
        ready = now_s
        for stage in range(self.profile.stages):
            begin = max(ready, self.line_s[stage])
            if self._may_train(stage, begin):
                begin += self.profile.stop_s or 0.0
            ran.first_s = min(ran.first_s, begin)
            self.line_s[stage] = ready = begin + cost_s
            self.booked[stage].append((begin, ready))
        ran.forward_end_s = ran.end_s = ready

    def _may_train(self, stage: int, at: float) -> bool:
        """Training that could run there then costs a stop, whether it would have got there or not."""
        return bool(self.training) and (not self.booked[stage] or self.booked[stage][-1][1] < at)

    def advance(self, to_s: float) -> None:
        """Training runs until then, wherever no request does."""
        while self.training and self.clock_s < to_s:
            now = self.clock_s
            for booked in self.booked:
                while booked and booked[0][1] <= now:
                    booked.pop(0)
            until, runs = self._turn(now, to_s)
            for one in runs:
                one.ran.first_s = min(one.ran.first_s, now)
                one.left[0][1] -= until - now
                if one.left[0][1] <= 1e-12:
                    one.left.pop(0)
                    if len(one.left) == one.forwards:
                        one.ran.forward_end_s = until
                    if not one.left:
                        one.ran.end_s = until
            if any(not one.left for one in runs):
                self.training = [one for one in self.training if one.left]
            self.clock_s = until
        if not self.training:
            self.clock_s = max(self.clock_s, to_s if to_s < FOREVER else 0.0)

    def _turn(self, now: float, to_s: float) -> tuple[float, list[_Pieces]]:
        """The work that may run now, one piece on each stage, and until when."""
        until, runs, taken = to_s, [], set()
        for one in self.training:
            stage = int(one.left[0][0])
            if stage in taken:
                if not stage and one.ran.first_s == FOREVER:
                    break  # it has not begun, so nothing behind it has: all of those wait for this stage, too
                continue
            taken.add(stage)
            begin, end = self.booked[stage][0] if self.booked[stage] else (FOREVER, FOREVER)
            if begin <= now:
                until = min(until, end)
                continue
            runs.append(one)
            until = min(until, begin, now + one.left[0][1])
        return until, runs

    def _in_line(self, ran: Ran, now_s: float, forward_s: float, backward_s: float) -> None:
        ready, stages = now_s, self.profile.stages
        for stage in range(stages):
            begin = max(ready, self.line_s[stage])
            self.booked[stage] = [one for one in self.booked[stage] if one[1] > now_s]
            for first, last in self.booked[stage]:
                if begin + forward_s > first:
                    begin = max(begin, last)
            ran.first_s = min(ran.first_s, begin)
            self.line_s[stage] = ready = begin + forward_s
        ran.forward_end_s = ran.end_s = ready
        if ran.task.is_training:
            for stage in reversed(range(stages)):
                begin = max([ready, *(last for _, last in self.booked[stage])])
                ready = begin + backward_s
                self.booked[stage].append((begin, ready))
            ran.end_s = ready
