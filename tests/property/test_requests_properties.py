"""Preemptions per request, counted from totals alone: never below the truth."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from valved.gate.requests import RequestTally

# "start", "preempt", or "end" of one of the open requests (chosen by index)
steps = st.lists(st.one_of(st.just("start"), st.just("preempt"), st.integers(0, 50)), max_size=60)


def play(steps):
    """The tally and the truth: preemptions of each request, ended or open."""
    tally, open_requests, ended = RequestTally(), [], []
    started = 0
    for step in steps:
        if step == "start":
            started += 1
            open_requests.append(0)
        elif step == "preempt":
            open_requests = [count + 1 for count in open_requests]
            tally.preempted()
        elif open_requests:
            ended.append(open_requests.pop(step % len(open_requests)))
        tally.report(started, len(ended))
    return tally, ended + open_requests, ended


@given(steps)
def test_the_maximum_is_never_below_the_truth(steps):
    tally, everyone, _ = play(steps)

    assert tally.most >= max(everyone, default=0)


@given(steps)
def test_every_ended_request_is_counted_once(steps):
    tally, _, ended = play(steps)

    assert tally.ended == sum(tally.histogram) == len(ended)


@given(st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1)), max_size=20))
def test_absurd_totals_break_nothing(reports):
    tally = RequestTally()
    for started, ended in reports:
        tally.report(started, ended)
        tally.preempted()

    assert tally.ended >= 0
    assert tally.most <= len(reports)


def test_one_preemption_per_request_reads_as_one():
    """The launch that rings may come just before the report that the request started."""
    tally = RequestTally()
    for number in range(1, 101):
        tally.preempted()
        tally.report(number, number - 1)
        tally.report(number, number)
        tally.woken()

    assert (tally.most, tally.histogram[:3]) == (1, [0, 100, 0])


def test_warm_up_launches_are_nobodys_preemptions():
    tally = RequestTally()
    for _ in range(5):
        tally.preempted()
        tally.woken()
    tally.report(1, 0)
    tally.report(1, 1)

    assert (tally.most, tally.histogram[0]) == (0, 1)


def test_a_request_that_began_and_ended_around_a_preemption_counts_as_hit():
    """Regression: a request shorter than valved's reaction had ended when the preemption was counted, and went free."""
    tally = RequestTally()

    tally.preempted_amid(started=1, ended=1)

    assert tally.histogram[:2] == [0, 1]
    assert tally.most == 1


def test_lost_ends_never_grow_the_books():
    tally, truth = RequestTally(), 0
    for number in range(5000):
        tally.report(number + 1, 0)  # never an end
        tally.preempted()
        truth += 1

    assert len(tally.open_hits()) <= 256
    assert sum(count for _, count in tally.open_hits()) == 5000
    assert tally.most >= truth
