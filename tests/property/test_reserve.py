"""How much time the granting policy keeps in reserve, and what a miss by a grant costs it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from valve_hook.policy.credits import PACE
from valve_hook.policy.granting import GrantCost, GrantPolicy, GrantSettings, Target
from valve_hook.policy.misses import MissSettings, MissStop, Needs, TimeReserve

STEP_MS = 6.0
CHEAP = GrantCost(stop_ms=0.1, wake_ms=0.1, bubble_ms=0.05, damage_ms=0.05)


def test_the_reserve_begins_with_what_requests_needed_and_misses_tell_from_then_on():
    reserve = TimeReserve(MissSettings())
    reserve.burst(100.0)
    for need_ms in (0.0, 700.0, 30.0):
        reserve.needed(need_ms, is_open=False)
    assert reserve.ms == 700.0
    for _ in range(1_000):
        reserve.needed(0.0, is_open=True)
        reserve.finished(False)
    assert reserve.ms < 300.0


@given(
    st.lists(
        st.tuples(st.floats(0.1, 300.0), st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=3)),
        max_size=120,
    )
)
def test_a_need_is_the_longest_that_a_request_fell_behind_until_its_end(steps):
    """Of each moment of its life, by hand."""
    pace_ms, kept = 20.0, Needs.KEPT
    Needs.KEPT = 2  # moments of nobody are dropped soon
    needs, lives = Needs(pace_ms), {}
    for ms, events in steps:
        needs.stepped(ms)
        for walk in lives.values():
            walk.append(walk[-1] + ms - pace_ms)
        for request, begins in events:
            if begins:
                needs.drop(request)
                needs.begin(request)
                lives[request] = [0.0]
            elif request in lives:
                walk, need = lives.pop(request), needs.end(request)
                if abs(walk[-1]) > 1e-6:
                    assert (need is None) == (walk[-1] > 0)
                if need is not None:
                    assert need == pytest.approx(walk[-1] - min(walk), abs=1e-6)
            else:
                assert needs.end(request) is None
    Needs.KEPT = kept


def test_a_service_that_only_falls_behind_keeps_no_moment_of_requests_that_are_gone():
    needs = Needs(10.0)
    for step in range(20_000):
        needs.stepped(11.0)
        needs.begin(step)
        needs.end(step - 8)
    assert len(needs._at) <= 2 * Needs.KEPT


def test_misses_that_one_burst_made_are_paid_for_before_anything_is_granted_again():
    """All who read miss together. Else the next burst after the trial makes as many again."""
    rules = MissSettings()
    stop = MissStop(rules)
    for _ in range(rules.trial):
        stop.finished(False)
    assert stop.is_open
    for _ in range(6):
        stop.finished(True, by_grant=True)
    paid = 0
    while not stop.is_open:
        stop.finished(False)
        paid += 1
    assert paid >= 5 / rules.share - rules.again


def test_a_miss_that_the_service_makes_alone_costs_no_grant_its_budget():
    rules = MissSettings()
    stop = MissStop(rules)
    stop.finished(True)
    for _ in range(rules.trial):
        stop.finished(False)
    assert stop.is_open


def test_where_needs_are_heavy_nothing_is_granted_before_as_many_requests_as_may_see_one_miss():
    rules = MissSettings()
    stop = MissStop(rules)
    for _ in range(rules.again - 1):
        stop.finished(False, is_heavy=True)
        assert not stop.is_open
    stop.finished(False, is_heavy=True)
    assert stop.is_open


def bursty(policy, *, requests, burst_ms, first=0):
    """One after the other, each held up by a prompt before its last token; nothing is granted yet."""
    now = 0.0
    for request in range(first, first + requests):
        policy.arrived(request, now)
        policy.stepped(0, 0, STEP_MS, 0.5, prefill=True)
        now += 100.0
        policy.first_token(request, now)
        for step in range(60):
            ms = burst_ms if step == 59 else STEP_MS
            now += ms + 0.5
            policy.stepped(1, 100, ms, 0.5, prefill=step == 59)
            policy.delivered(now)
        policy.finished(request, now)


def test_the_first_reserve_covers_the_bursts_that_requests_have_seen():
    """Half of a burst (p95) was kept back at first; a request that met a whole one in its last steps missed."""
    policy = GrantPolicy(Target(tpot_ms=40.0, gap_ms=1_000.0), CHEAP, settings=GrantSettings(least_worth=-1e9))
    bursty(policy, requests=60, burst_ms=400.0)
    assert policy.reserve.ms == pytest.approx(400.5 - PACE * 40.0, rel=0.01)


def test_bursts_near_what_a_request_earns_make_the_trial_long():
    long, short = (
        GrantPolicy(Target(tpot_ms=40.0, gap_ms=1_000.0), CHEAP, settings=GrantSettings(least_worth=-1e9))
        for _ in range(2)
    )
    bursty(long, requests=100, burst_ms=600.0)
    bursty(short, requests=100, burst_ms=100.0)
    assert (long.stop.is_open, short.stop.is_open) == (False, True)


def test_steps_that_offline_work_makes_slower_are_never_taken_for_the_services_own():
    """By slices the service steps beside offline work: a miss of that kind is a miss by a grant."""
    slow = GrantCost(stop_ms=0.1, wake_ms=0.0, bubble_ms=0.0, damage_ms=10.0)
    policy = GrantPolicy(Target(tpot_ms=12.0), slow, settings=GrantSettings(misses=MissSettings(trial=0)))
    policy.arrived(1, 0.0)
    policy.first_token(1, 10.0)
    now = 10.0
    for _ in range(40):
        now += 16.5
        policy.stepped(1, 100, 16.0, 0.5, granted=True)
        policy.delivered(now)
    served = policy.finished(1, now)

    assert served is not None
    assert served.missed
    assert policy.stop._spared < 0.5  # it is paid for
