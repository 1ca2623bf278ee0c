"""Calls that come again and again (valved/machine/clock.py)."""

from __future__ import annotations

import itertools

import pytest
from virtual import VirtualClock

from valved.machine.clock import Ticker


def test_a_call_that_fails_is_never_the_last():
    clock, calls = VirtualClock(), []

    def fails():
        calls.append(clock.now_ns())
        raise RuntimeError("once more")

    Ticker(clock, fails).start(10)
    for _ in range(3):
        with pytest.raises(RuntimeError):
            clock.advance(10)

    assert [later - calls[0] for later in calls] == [0, 10, 20]


def test_one_that_stops_itself_is_not_called_again_until_it_is_started():
    clock, calls = VirtualClock(), []

    def once():
        calls.append(clock.now_ns())
        ticker.stop()

    ticker = Ticker(clock, once)
    ticker.start(10, after_ns=3)
    clock.advance(100)
    assert (len(calls), ticker.runs, clock.waiting) == (1, False, 0)

    ticker.start(10)
    clock.advance(100)
    assert len(calls) == 2


def test_a_new_period_counts_from_the_next_call_on():
    clock, calls = VirtualClock(), []
    ticker = Ticker(clock, lambda: calls.append(clock.now_ns()))
    begin_ns = clock.now_ns()
    ticker.start(10)
    ticker.start(100)
    clock.advance(250)

    assert [at - begin_ns for at in calls] == [10, 110, 210]


def test_a_long_call_never_runs_back_to_back():
    clock, calls = VirtualClock(), []

    def takes_long():
        calls.append(clock.now_ns())
        clock._now_ns += 25

    Ticker(clock, takes_long).start(10)
    clock.advance(100)

    assert {later - earlier for earlier, later in itertools.pairwise(calls)} == {35}


def test_two_that_tick_on_the_beat_never_wake_the_loop_twice_whenever_they_were_started():
    clock, quick, slow = VirtualClock(start_ns=1_003), [], []
    Ticker(clock, lambda: quick.append(clock.now_ns()), on_beat=True).start(10)
    clock.advance(4)
    Ticker(clock, lambda: slow.append(clock.now_ns()), on_beat=True).start(20)
    clock.advance(100)

    assert set(slow) <= set(quick)
    assert {later - earlier for earlier, later in itertools.pairwise(quick)} == {10}
    assert {later - earlier for earlier, later in itertools.pairwise(slow)} == {20}
