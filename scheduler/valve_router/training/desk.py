"""Whether a trainer gets its next micro-batch now: by the same planner that sends requests, and never too late."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace

from valve_router.plan.defer import DeferSettings, must_defer
from valve_router.plan.profile import Measured, fit
from valve_router.plan.score import choose
from valve_router.plan.task import Task, TaskKind
from valve_router.replicas import Replica, Replicas
from valve_router.settings import RouterSettings

STOP_S = 0.001  # a node that trains has a gate: what a stop costs a request
REFIT_EVERY = 20
FIRST_S = 0.5  # of a micro-batch, until one was measured


@dataclass(slots=True)
class _Seat:
    """What the desk knows of one replica's trainer."""

    took: deque[Measured] = field(default_factory=lambda: deque(maxlen=100))
    count: int = 0


class Desk:
    """Trainers ask; each is named for the replica (its URL or number) beside which it runs. One that names none trains
    on a card of its own, and is never deferred."""

    def __init__(self, settings: RouterSettings, replicas: Replicas, defer: DeferSettings | None = None) -> None:
        self._settings = settings
        self._replicas = replicas
        self._defer = defer or DeferSettings(age_limit_s=settings.training_age_s)
        self._seats: dict[str, _Seat] = {}
        self.deferred = 0  # questions that were answered with "wait"

    def may_train(self, name: str, tokens: int, queued_s: float, now_s: float) -> Task | None:
        """`queued_s` and `now_s` on the clock of the replicas' plans. The task, which is then planned; None: wait."""
        task = Task(arrival_s=now_s, tokens=max(1, tokens), kind=TaskKind.TRAINING, enqueued_s=min(queued_s, now_s))
        replica = self._replicas.find(name)
        if replica is None:
            return task
        seated = [one for one in self._replicas.all if one.is_alive and one.name in self._seats]
        if replica not in seated:
            seated.append(replica)
            self._sit(replica)
        timelines = [one.timeline for one in seated]
        mine = seated.index(replica)
        placed = timelines[mine].place(task)
        is_old = now_s - task.age_from_s >= self._defer.age_limit_s
        choice = choose(timelines, [task] * len(seated), self._settings.score)
        # Another trainer should train first. If any other one asks, it will do so, and this one asks again.
        is_other = choice.index != mine and timelines[mine].owed_s > 0
        late = must_defer(timelines, mine, placed, self._usual(seated, now_s), now_s, self._settings.score, self._defer)
        if not is_old and (is_other or late):
            self.deferred += 1
            return None
        timelines[mine].add(placed)
        return task

    def trained(self, name: str, task: Task, took_s: float) -> None:
        """A micro-batch is over; 0 s: its trainer was given up."""
        replica = self._replicas.find(name)
        if replica is None or replica.name not in self._seats:
            return
        seat = self._seats[replica.name]
        replica.timeline.trained(task)
        if took_s <= 0:
            return
        seat.took.append(Measured(batch=1, tokens=task.tokens, took_s=took_s))
        seat.count += 1
        if seat.count % REFIT_EVERY == 1:
            profile = replica.timeline.profile
            replica.timeline.profile = replace(profile, backward=fit(list(seat.took)))

    def _sit(self, replica: Replica) -> None:
        self._seats.setdefault(replica.name, _Seat())
        profile = replica.timeline.profile
        backward = profile.backward if profile.backward.seconds(_ONE) else replace(profile.backward, fixed_s=FIRST_S)
        replica.timeline.profile = replace(profile, backward=backward, stop_s=STOP_S)

    def _usual(self, seated: list[Replica], now_s: float) -> Task | None:
        """The request that might come next: as long as those were that came lately."""
        lengths = [one.timeline.lengths for one in seated if one.timeline.lengths.count]
        if not lengths:
            return None
        mean = sum(one.mean for one in lengths) / len(lengths)
        return Task(arrival_s=now_s, tokens=max(1, round(mean)))


_ONE = Task(arrival_s=0.0, tokens=1, kind=TaskKind.TRAINING)
