"""The breaker for any history of delays and holds."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from valved.policy.breaker import BreakerSettings, BreakerState, Tally, step_breaker
from valved.policy.cooldown import MS, SECOND

SETTINGS = BreakerSettings()
tallies = st.builds(Tally, delay_ns=st.integers(0, 10 * MS), held_ns=st.integers(0, SECOND), gates=st.integers(0, 3))
histories = st.lists(st.tuples(st.integers(0, 40 * SECOND), tallies), max_size=60)


def play(history):
    now, state, decisions = 0, BreakerState(since_ns=0), []
    for wait, tally in history:
        now += wait
        state, decision = step_breaker(state, tally, now, SETTINGS)
        decisions.append((now, decision))
    return decisions


@given(histories)
def test_it_trips_only_over_budget_and_with_enough_evidence(history):
    for _, decision in play(history):
        assert not decision.tripped or (
            decision.share > SETTINGS.budget_share and decision.gates >= SETTINGS.least_gates
        )


@given(histories)
def test_it_rests_at_least_the_rest_and_at_most_the_longest(history):
    for now, decision in play(history):
        if decision.tripped:
            rest = decision.open_until_ns - now
            assert SETTINGS.rest_ns <= rest <= SETTINGS.rest_ns * SETTINGS.rest_most


@given(st.integers(1, 200))
def test_a_service_within_its_budget_never_trips(requests):
    """0.4 ms on requests of 100 ms."""
    history = [(100 * MS, Tally(delay_ns=400_000, held_ns=100 * MS, gates=1))] * requests

    assert not any(decision.tripped for _, decision in play(history))


def test_a_service_over_its_budget_trips_once_and_longer_each_time():
    """0.4 ms on requests of 2 ms. Nothing is counted while it rests."""
    now, state, rests = 0, BreakerState(since_ns=0), []
    while len(rests) < 5:
        now = max(now + 10 * MS, state.open_until_ns)
        state, decision = step_breaker(state, Tally(delay_ns=400_000, held_ns=2 * MS, gates=1), now, SETTINGS)
        if decision.tripped:
            rests.append((decision.open_until_ns - now) // SECOND)

    assert rests == [600, 1200, 2400, 3600, 3600]


def test_long_good_conduct_forgives():
    state = BreakerState(since_ns=0, trips=3, open_until_ns=SECOND)

    state, _ = step_breaker(state, Tally(), 2 * 3600 * SECOND, SETTINGS)

    assert state.trips == 0
