"""From which quiet time on a service is between two requests: what is found, and what must never be."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from valved.policy.apart import BINS, GapsState, common_gaps, shorten, step_gaps
from valved.policy.cooldown import MS, SECOND, Cooldown, CooldownSettings

SETTINGS = CooldownSettings()
CEILING = Cooldown(cooldown_ns=200 * MS, gap_ns=100 * MS, reason="largest-gap")


def bound_ms(gaps_ms, state=None):
    state = step_gaps(state or GapsState(), [int(gap * MS) for gap in gaps_ms], 3600 * SECOND, 0, SETTINGS)
    return None if state.bound_ns is None else state.bound_ns / MS


def arrivals(mean_ms=300.0, count=2000, seed=1):
    return [random.Random(seed + i).expovariate(1 / mean_ms) for i in range(count)]


def steps(median_ms=3.0, most_ms=15.0, count=20_000, seed=1):
    rng = random.Random(seed)
    return [min(rng.lognormvariate(0, 1) * median_ms, most_ms) for _ in range(count)]


def test_the_gaps_of_steps_are_told_from_those_of_arrivals():
    """The cooldown by the largest gap stands at its ceiling there: arrivals reach into every length."""
    assert 15 < bound_ms([*arrivals(), *steps()]) < 25


@pytest.mark.parametrize("mean_ms", [60, 300, 2000])
def test_a_bound_is_never_below_what_the_host_takes_for_a_step(mean_ms):
    for most_ms in (5, 20, 60, 90):
        assert (bound_ms([*arrivals(mean_ms), *steps(median_ms=most_ms / 5, most_ms=most_ms)]) or 200) >= most_ms


def test_requests_in_bursts_are_never_taken_for_the_end_of_one():
    bursts = [gap for gap in arrivals(2000.0, 500) for gap in (gap, *[40.0] * 3)]

    assert (bound_ms(bursts) or 200) >= 40


def test_a_host_that_stalls_for_longer_than_a_cooldown_covers_never_shortens_it():
    stalls = [random.Random(i).uniform(50, 400) for i in range(3000)]

    assert bound_ms([*arrivals(2000.0), *steps(), *stalls]) is None


def test_few_gaps_prove_nothing():
    assert bound_ms([*steps(), *arrivals(count=30)]) is None


def test_a_host_that_becomes_slower_is_heard_within_as_many_gaps_as_are_let_go():
    shown = [int(gap * MS) for gap in [*arrivals(), *steps(most_ms=8)]]
    fast = step_gaps(GapsState(), shown, 3600 * SECOND, 0, SETTINGS)
    assert fast.bound_ns < 15 * MS

    slow = step_gaps(fast, [60 * MS] * 60, 3602 * SECOND, 2 * SECOND, SETTINGS)

    assert slow.bound_ns is None or slow.bound_ns > 60 * MS


def test_after_some_windows_what_was_is_forgotten():
    slow, fast = steps(median_ms=20, most_ms=80), steps(most_ms=8)
    state = step_gaps(GapsState(), [int(gap * MS) for gap in [*arrivals(), *slow]], 3600 * SECOND, 0, SETTINGS)
    assert state.bound_ns is None or state.bound_ns > 80 * MS

    fresh = [int(gap * MS) for gap in [*arrivals(), *fast]]
    later = step_gaps(state, fresh, 7200 * SECOND, 20 * SETTINGS.window_ns, SETTINGS)

    assert later.bound_ns < 15 * MS


gaps_of = st.lists(st.one_of(st.integers(0, 2 * SECOND), st.integers(0, 2**64 - 1)), max_size=200)


@given(gaps_of, st.lists(st.integers(0, 2**62), min_size=1, max_size=5), st.integers(MS, 400 * MS))
def test_no_sequence_of_gaps_ever_lengthens_a_cooldown_or_takes_it_below_the_floor(gaps, held, cooldown_ns):
    state, now_ns = GapsState(), 0
    for held_ns in held:
        now_ns += 2 * SECOND
        state = step_gaps(state, gaps, now_ns, held_ns, SETTINGS)
        assert len(state.counts) == BINS
        found = shorten(replace(CEILING, cooldown_ns=cooldown_ns), state, SETTINGS).cooldown_ns
        assert min(SETTINGS.floor_ns, cooldown_ns) <= found <= cooldown_ns


def test_ranks_of_an_engine_are_idle_while_all_of_them_are():
    first, second = [(100, 20), (200, 30), (300, 10)], [(105, 20), (190, 40)]

    assert common_gaps([first, second]) == [(100, 15), (190, 20)]
    assert common_gaps([first, []]) == []
    assert common_gaps([]) == []


@given(st.lists(st.lists(st.tuples(st.integers(0, 300), st.integers(0, 300)), max_size=30), max_size=5))
def test_gaps_that_a_client_invents_never_grow_in_number(clients):
    assert len(common_gaps(clients)) <= sum(map(len, clients))
