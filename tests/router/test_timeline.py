"""Where a task would run: golden cases, an independent event simulation, and what no plan may ever do."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from valve_router.plan.profile import Law, Profile
from valve_router.plan.task import Task, TaskKind
from valve_router.plan.timeline import Passage, Timeline

UNIT = Law(fixed_s=1.0)


def node(stages=2, stop_s=None, forward=UNIT, backward=UNIT):
    return Timeline(Profile(stages=stages, forward=forward, backward=backward, stop_s=stop_s))


def task(at, *, tokens=1, training=False):
    return Task(arrival_s=at, tokens=tokens, kind=TaskKind.TRAINING if training else TaskKind.INFERENCE)


def test_the_papers_golden_case():
    timeline = node()
    timeline.add(timeline.place(task(0.0, training=True)))
    assert timeline.forward_end_s == [1.0, 2.0]
    assert timeline.backwards == [Passage([3.0, 2.0], [4.0, 3.0], 1.0)]

    placed = timeline.place(task(1.5))

    assert placed.forward == ((1.5, 2.5), (3.0, 4.0))
    assert placed.response_s == 2.5
    assert placed.printed_idle_s == pytest.approx(0.5)
    assert placed.idle_s == pytest.approx(0.5)


def test_with_a_gate_a_request_never_waits_for_a_backward():
    timeline = node(stop_s=0.001)
    timeline.add(timeline.place(task(0.0, training=True)))

    placed = timeline.place(task(1.2))  # the backward runs on stage 2 when it gets there
    timeline.add(placed)

    assert placed.response_s == pytest.approx(2.001)
    assert timeline.backwards[0].end_s == pytest.approx([5.002, 4.002], abs=0.002)


def test_with_a_gate_a_forward_that_is_over_before_a_backward_begins_never_moves_it():
    timeline = node(stop_s=0.001)
    timeline.add(timeline.place(task(0.0, training=True)))

    timeline._push(0, 1.2, 2.2)

    assert timeline.backwards == [Passage([3.0, 2.0], [4.0, 3.0], 1.0)]


def test_a_placement_that_nobody_takes_changes_nothing():
    timeline = node()
    timeline.add(timeline.place(task(0.0, training=True)))
    before = repr(timeline)

    timeline.place(task(0.5))
    timeline.place(task(0.5, training=True))

    assert repr(timeline) == before


TASKS = st.lists(st.tuples(st.floats(0, 3), st.integers(1, 40), st.booleans()), min_size=1, max_size=25)


def simulated(stages, forward, backward, rows):
    """The same machine as calendars: every interval that is booked, by stage; in the order of the tasks."""
    forwards = [[] for _ in range(stages)]
    backwards = [[] for _ in range(stages)]
    paths, idles = [], []
    for one in rows:
        ready, path, idle = one.arrival_s, [], 0.0
        for stage in range(stages):
            fresh = not forwards[stage]
            before = ready if fresh else forwards[stage][-1][1]
            begin = max(ready, before)
            cost = forward.seconds(one)
            for taken in sorted(backwards[stage]):
                if begin + cost > taken[0]:
                    begin = max(begin, taken[1])
            ran = sum(max(0.0, min(begin, e) - max(before, b)) for b, e in backwards[stage])
            idle += begin - before - ran
            forwards[stage].append((begin, begin + cost))
            path.append((begin, begin + cost))
            ready = begin + cost
        if one.is_training:
            for stage in reversed(range(stages)):
                begin = max([ready, *(e for _, e in backwards[stage])])
                backwards[stage].append((begin, begin + backward.seconds(one)))
                ready = begin + backward.seconds(one)
        paths.append(tuple(path))
        idles.append(idle)
    return paths, idles, forwards, backwards


@settings(max_examples=200)
@given(TASKS, st.integers(1, 4))
def test_paths_are_those_of_an_event_simulation(rows, stages):
    forward, backward = Law(fixed_s=0.05, per_token_s=0.01), Law(fixed_s=0.1, per_token_s=0.03)
    now, tasks = 0.0, []
    for gap, tokens, training in rows:
        now += gap
        tasks.append(task(now, tokens=tokens, training=training))
    paths, idles, forwards, backwards = simulated(stages, forward, backward, tasks)

    timeline = node(stages, forward=forward, backward=backward)
    for one, path, idle in zip(tasks, paths, idles, strict=True):
        placed = timeline.place(one)
        timeline.add(placed)
        for (begin, end), (wanted_begin, wanted_end) in zip(placed.forward, path, strict=True):
            assert begin == pytest.approx(wanted_begin, abs=1e-9)
            assert end == pytest.approx(wanted_end, abs=1e-9)
        assert placed.idle_s == pytest.approx(max(0.0, idle), abs=1e-9)

    for stage in range(stages):  # nothing overlaps on a stage
        booked = sorted(forwards[stage] + backwards[stage])
        assert all(end <= begin + 1e-9 for (_, end), (begin, _) in pairwise(booked))


@settings(max_examples=100)
@given(TASKS, st.floats(0, 5), st.floats(0, 5), st.sampled_from([None, 0.001]))
def test_a_later_arrival_never_ends_earlier(rows, one, other, stop_s):
    timeline, now = node(stop_s=stop_s, forward=Law(per_token_s=0.02), backward=Law(per_token_s=0.05)), 0.0
    for gap, tokens, training in rows:
        now += gap
        timeline.add(timeline.place(task(now, tokens=tokens, training=training)))
    early, late = sorted((now + one, now + other))

    ends = [timeline.place(task(at, tokens=7)).forward[-1][1] for at in (early, late)]

    assert ends[0] <= ends[1] + 1e-9


@settings(max_examples=100)
@given(TASKS)
def test_with_a_gate_a_response_never_depends_on_training_by_more_than_the_stops(rows):
    """Each request waits for the requests before it, and for one stop a stage at most."""
    law, stages, stop_s = Law(per_token_s=0.02), 2, 0.001
    gated, now = node(stages, stop_s, law, Law(per_token_s=0.5)), 0.0
    plain = node(stages, None, law, Law())
    stops = 0.0
    for gap, tokens, training in rows:
        now += gap
        one = task(now, tokens=tokens, training=training)
        placed = gated.place(one)
        gated.add(placed)
        if training:
            continue
        alone = plain.place(one)
        plain.add(alone)
        stops += stages * stop_s
        assert placed.response_s <= alone.response_s + stops + 1e-9


@settings(max_examples=50)
@given(TASKS)
def test_a_timeline_never_grows_without_end(rows):
    timeline, now = node(forward=Law(fixed_s=0.01), backward=Law(fixed_s=0.01)), 0.0
    for gap, tokens, training in rows * 4:
        now += gap + 0.2  # each is over before the next comes
        timeline.add(timeline.place(task(now, tokens=tokens, training=training)))
        assert len(timeline.backwards) <= 2


def test_what_a_replica_measured_moves_what_is_planned_behind_it():
    timeline = node()
    placed = timeline.place(task(0.0, training=True))
    timeline.add(placed)

    timeline.measured(placed, 2.5)

    assert timeline.forward_end_s == [1.5, 2.5]
    assert timeline.backwards[0].end_s == [4.5, 3.5]


def test_the_tasks_of_one_queue_that_are_late_by_one_delay_never_move_the_plan_twice():
    timeline = node(stages=1)
    queue = []
    for _ in range(3):
        queue.append(timeline.place(task(0.0)))
        timeline.add(queue[-1])

    for placed in queue:
        timeline.measured(placed, placed.forward[-1][1] + 1.0)

    assert timeline.forward_end_s == [4.0]


def test_with_a_gate_a_request_never_queues_behind_the_forward_of_training():
    timeline = node(stop_s=0.001)
    timeline.add(timeline.place(task(0.0, training=True)))

    placed = timeline.place(task(0.5))
    timeline.add(placed)

    assert placed.response_s == pytest.approx(2.002)  # a stop on each stage
    assert timeline.training.end_s == pytest.approx([2.001, 3.502])
    assert timeline.backwards[0].begin_s[-1] == pytest.approx(3.502)


def test_without_a_gate_a_request_queues_behind_it():
    timeline = node()
    timeline.add(timeline.place(task(0.0, training=True)))

    assert timeline.place(task(0.5)).response_s > 2.5
