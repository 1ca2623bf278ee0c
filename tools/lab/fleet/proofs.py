"""U1 to U4: the plan against what replicas really do, properties of the scores, starvation, and memory with faults."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

from valve_router.plan.memory import FitVerdict, MemoryLaw, Resident, fits_memory
from valve_router.plan.score import ScoreSettings, cost, printed
from valve_router.plan.task import Task, TaskKind
from valve_router.plan.timeline import Timeline
from valve_tools.lab.fleet.load import STOP_S, Arrivals, FleetShape
from valve_tools.lab.fleet.stages import Stages
from valve_tools.sim.metrics import Claim, at_least, at_most

CASES = 200


def proofs(cases: int = CASES) -> list[Claim]:
    return [*predicted(cases), *ordered(cases), *memory(cases)]


def predicted(cases: int) -> list[Claim]:
    """U1: no noise, one replica. With a gate the stages count a stop wherever training may run, the plan where it does:
    a stop of its own and one of the request before it."""
    off: dict[bool, list[float]] = {True: [], False: []}  # by whether there is a gate
    overlaps = []
    for case in range(cases):
        for has_gate in (True, False):
            fleet = FleetShape(stages=1 + case % 4, has_gate=has_gate)
            timeline, real = Timeline(fleet.profile), Stages(fleet.profile)
            line = [0.0] * fleet.stages
            for task in Arrivals(per_s=3.0, training=0.3, count=60).tasks(case):
                placed = timeline.place(task)
                timeline.add(placed)
                ran = real.take(task, task.arrival_s)
                if has_gate and task.is_training:
                    continue  # its end hangs on requests that are not there yet
                off[has_gate].append(abs(placed.forward[-1][1] - ran.forward_end_s))
                if has_gate:
                    timeline.measured(placed, ran.forward_end_s)
                    continue
                overlaps.append(sum(begin < end - 1e-9 for (begin, _), end in zip(placed.forward, line, strict=True)))
                line = [end for _, end in placed.forward]
    return [
        at_most("U1: prediction against the stages, no gate", "s", off[False], 1e-9),
        at_most("U1: the same with a gate, in stops a stage", "stops", [one / STOP_S / 4 for one in off[True]], 2.0),
        at_most("U2: forwards that overlap on a stage", "tasks", overlaps, 0.0),
    ]


def ordered(cases: int) -> list[Claim]:
    """U2: a later arrival never ends earlier; a longer response never improves a score, the paper's excepted."""
    draw = random.Random(7)
    earlier, better, printed_better = [], [], []
    settings = ScoreSettings()
    for case in range(cases):
        fleet = FleetShape(stages=1 + case % 4, has_gate=case % 2 == 0)
        timeline = Timeline(fleet.profile)
        tasks = Arrivals(per_s=4.0, training=0.3, count=20).tasks(case)
        for task in tasks:
            timeline.add(timeline.place(task))
        at, later = tasks[-1].arrival_s, draw.uniform(0, 2)
        first, second = (timeline.place(Task(arrival_s=when, tokens=100)).forward[-1][1] for when in (at, at + later))
        earlier.append(second < first - 1e-9)
        quick = timeline.place(Task(arrival_s=at, tokens=100))
        moved = tuple((begin + later, end + later) for begin, end in quick.forward)
        slow = replace(quick, forward=moved)
        better.append(cost(timeline, slow, settings) < cost(timeline, quick, settings) - 1e-12)
        printed_better.append(printed(timeline, slow, settings) > printed(timeline, quick, settings))
    slip = [sum(printed_better) / len(printed_better)] if printed_better else []
    return [
        at_most("U2: later arrivals that end earlier", "cases", earlier, 0.0),
        at_most("U2: longer responses that `cost` prefers", "cases", better, 0.0),
        at_least("U2: longer responses that `printed` prefers: the paper's slip", "share", slip, 0.9),
    ]


@dataclass(slots=True)
class _Card:
    """A card with a host beside it that may be full, slow or gone."""

    capacity: int
    host_left: int
    is_host_dead: bool
    host_s: float
    held: list[Resident]
    ends: dict[str, float]
    was_away: set[str] = field(default_factory=set)  # such a one is not sent away again: it would never end


def memory(cases: int) -> list[Claim]:
    """U4: every task is done or refused with a reason, whatever the host does; the books balance at each moment."""
    lost, over, stuck = [], [], []
    for case in range(cases):
        draw = random.Random(case)
        dead, full, slow = case % 4 == 1, case % 4 == 2, case % 4 == 3
        card = _Card(1000, 0 if full else 5000, dead, 5.0 if slow else 0.05, [], {})
        queue = [
            (f"t{i}", Task(arrival_s=0.1 * i, tokens=draw.randrange(10, 1200), kind=draw.choice(list(TaskKind))))
            for i in range(40)
        ]
        done, refused, most, rounds = _through(card, queue, MemoryLaw(per_token=1.0))
        lost.append(len(done) + len(refused) != 40)
        over.append(most > card.capacity)
        stuck.append(rounds >= ROUNDS)
    return [
        at_most("U4: runs with a task neither done nor refused", "runs", lost, 0.0),
        at_most("U4: runs with more on the card than it has", "runs", over, 0.0),
        at_most("U4: runs that stood still", "runs", stuck, 0.0),
    ]


ROUNDS = 100_000
RUNS_S = 2.0


def _through(card: _Card, queue: list[tuple[str, Task]], law: MemoryLaw) -> tuple[set[str], set[str], int, int]:
    """Tasks in their order; each holds its memory while it runs, a third of them longer, parked."""
    done: set[str] = set()
    refused: set[str] = set()
    now, most, rounds = 0.0, 0, 0
    away: dict[str, tuple[float, Resident]] = {}
    while (queue or card.held or away) and rounds < ROUNDS:
        rounds += 1
        over = {name for name, end in card.ends.items() if end <= now}
        done |= over
        card.held = [
            replace(one, is_parked=card.ends[one.name] - now < 0.7 * RUNS_S and one.name not in card.was_away)
            for one in card.held
            if one.name not in over
        ]
        card.ends = {name: end for name, end in card.ends.items() if name not in over}
        _back(card, away, now)
        if queue and queue[0][1].arrival_s <= now:
            _admit(card, queue, away, now, law, refused)
        most = max(most, sum(one.bytes for one in card.held))
        now += 0.05
    return done, refused, most, rounds


def _back(card: _Card, away: dict[str, tuple[float, Resident]], now: float) -> None:
    """What the host holds comes back when it fits: it has still to end."""
    for name, (ready_s, one) in list(away.items()):
        if ready_s <= now and sum(other.bytes for other in card.held) + one.bytes <= card.capacity:
            card.held.append(replace(one, is_parked=False, since_s=now))
            card.ends[name] = now + RUNS_S / 2
            card.host_left += one.bytes
            del away[name]


def _admit(
    card: _Card,
    queue: list[tuple[str, Task]],
    away: dict[str, tuple[float, Resident]],
    now: float,
    law: MemoryLaw,
    refused: set[str],
) -> None:
    name, task = queue[0]
    need = law.bytes(task)
    can_offload = not card.is_host_dead
    fit = fits_memory(need, card.capacity, card.held, now - task.arrival_s, 0.5)
    if fit.verdict is FitVerdict.NEVER:
        refused.add(name)
        queue.pop(0)
        return
    if fit.verdict is FitVerdict.OFFLOAD:
        for one in [one for one in card.held if one.name in fit.offload]:
            if not can_offload or one.bytes > card.host_left:
                return  # nowhere to put it: this task waits until others end
            card.host_left -= one.bytes
            card.held.remove(one)
            card.ends.pop(one.name)
            away[one.name] = (now + card.host_s, one)
            card.was_away.add(one.name)
    if fit.verdict is not FitVerdict.WAIT:
        card.held.append(Resident(name=name, bytes=need, kind=task.kind, since_s=now))
        card.ends[name] = now + RUNS_S
        queue.pop(0)
