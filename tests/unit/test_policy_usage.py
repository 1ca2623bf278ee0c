"""What the reservation learns of a service's use: a peak that will pass is kept less room for than one that stays."""

from __future__ import annotations

from dataclasses import replace

import pytest
from valve_tools.sim.eviction_headroom import BURSTY, HEAVY, STATIONARY, demand, run_headroom

from valved.model.memory import OnlineMemory, ReservationAction, ReservationRule, UseHistory
from valved.policy import usage
from valved.policy.reservation import SECOND_NS, ReservationSettings, decide, start

NOW_NS = 5 * SECOND_NS


def learned(uses: list[int]) -> UseHistory:
    history = usage.note(UseHistory(), 0, NOW_NS)
    for second, used in enumerate(uses, 1):
        history = usage.note(history, used, NOW_NS + second * SECOND_NS)
    return history


def test_a_use_that_returns_is_expected_nearer_to_its_mean():
    history = learned(demand(STATIONARY, 7)[:3600].tolist())
    mean = history.sums[1] / history.sums[0]

    assert mean < usage.expected(history, round(2 * mean)) < 2 * mean
    assert 0 < usage.expected(history, 0) < mean


def test_what_stays_in_use_is_never_expected_to_go():
    """Ten minutes little, ten minutes much: what is used now tells all, and the mean nothing."""
    history = learned(([10] * 600 + [200] * 600) * 3)

    assert usage.expected(history, 200) == pytest.approx(200, rel=0.05)
    assert usage.expected(history, 10) == pytest.approx(10, abs=10)


def test_a_few_minutes_never_teach_anything():
    assert usage.expected(learned(demand(HEAVY, 7)[:500].tolist()), 500) == 500


def test_use_that_never_moved_teaches_nothing():
    assert usage.expected(learned([40] * 3000), 60) == 60


def test_a_long_silence_counts_like_its_seconds():
    first = learned(demand(STATIONARY, 3)[:1500].tolist())
    by_second = first
    for second in range(1, 2001):
        by_second = usage.note(by_second, 9, first.noted_ns + second * SECOND_NS)

    at_once = usage.note(first, 9, first.noted_ns + 2000 * SECOND_NS)

    assert (at_once.noted_ns, at_once.recent) == (by_second.noted_ns, by_second.recent)
    assert at_once.sums == pytest.approx(by_second.sums)


def test_a_clock_that_went_back_never_stops_the_learning():
    """A state of before a restart of the machine."""
    history = replace(learned([5] * 100), noted_ns=10**18)

    assert usage.note(history, 5, NOW_NS).noted_ns == NOW_NS


def test_the_published_rule_is_never_changed_by_what_was_learned():
    settings = ReservationSettings(rule=ReservationRule.MIAD)
    seen = OnlineMemory(used_handles=300, mapped_handles=300, pool_handles=1000)
    fresh = start(0, settings)
    taught = replace(fresh, history=learned(demand(HEAVY, 7)[:3600].tolist()))

    assert decide(fresh, seen, NOW_NS, settings)[1] == decide(taught, seen, NOW_NS, settings)[1]


@pytest.mark.parametrize(("load", "least"), [(HEAVY, 0.85), (BURSTY, 0.94)], ids=["heavy", "bursty"])
def test_what_was_learned_never_costs_offline_memory_or_the_target(load, least):
    """Without it a heavy load left offline work 0.82 of what a clairvoyant leaves."""
    result = run_headroom(demand(replace(load, hours=5), 31), load.pool_handles, ReservationSettings())

    assert result.offline_share / result.clairvoyant_share >= least
    assert result.worst_sliding_hour <= 30


def test_many_reclaims_at_first_never_lower_the_headroom():
    """Four reclaims in ten minutes are the target of an hour of ten: what they raised stays until time has passed."""
    settings = ReservationSettings(target_per_hour=10.0, headroom_max_handles=4096)
    state, used = start(0, settings), 10
    for minute in range(1, 5):
        used += 100
        seen = OnlineMemory(used_handles=used, mapped_handles=used, pool_handles=4096)
        state, decision = decide(state, seen, minute * 60 * SECOND_NS, settings)
        assert decision.action is ReservationAction.TAKE
    raised = state.exact_handles

    calm = OnlineMemory(used_handles=used, mapped_handles=used + 100, pool_handles=4096)
    state, _ = decide(state, calm, 600 * SECOND_NS, settings)
    assert state.exact_handles == raised

    state, _ = decide(state, calm, 1800 * SECOND_NS, settings)
    assert state.exact_handles < raised
