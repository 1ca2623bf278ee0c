"""The cooldown of an online service, case by case."""

from __future__ import annotations

import pytest

from valved.policy.cooldown import (
    MS,
    SECOND,
    CooldownObservation,
    CooldownSettings,
    covered_ns,
    first_cooldown,
    gaps_inside_hold,
    read_cooldown,
    step_cooldown,
)

SETTINGS = CooldownSettings()


def after(*gaps_ms, age_s=0.0, held=True):
    """The cooldown in ms of a service that saw these gaps and then lived for a while."""
    state = first_cooldown(0, SETTINGS)
    state, _ = step_cooldown(state, CooldownObservation(gaps_ns=tuple(int(g * MS) for g in gaps_ms)), 0, SETTINGS)
    _, decision = step_cooldown(state, CooldownObservation(held=held), int(age_s * SECOND), SETTINGS)
    return decision.cooldown_ns / MS


def test_a_new_service_starts_with_the_start_value():
    decision = read_cooldown(first_cooldown(0, SETTINGS), SETTINGS)

    assert (SETTINGS.start_ns, "start") == (decision.cooldown_ns, decision.reason)


def test_the_cooldown_is_twice_the_largest_gap():
    assert after(3, 30, 12) == 60


def test_smaller_gaps_do_not_shorten_it_at_once():
    """The mark falls by age, not by the last gap: gaps vary."""
    assert after(1, 1, 1) == 20


def test_small_gaps_bring_it_down_to_the_floor_within_one_window():
    assert after(1, age_s=600) == 5


def test_a_stall_is_clamped_to_the_ceiling():
    assert after(4_000) == 200


def test_a_single_stall_halves_about_every_110_seconds():
    """An undecayed maximum would hold offline back for 0.2 s after every request for ten minutes."""
    halved = [after(4_000, age_s=age_s) for age_s in (0, 112.7, 225.4)]

    assert halved == pytest.approx([200, 100, 50], rel=0.01)


def test_a_stall_is_forgotten_after_one_window():
    assert after(4_000, age_s=600) == pytest.approx(5, abs=1e-3)


def test_time_without_a_hold_does_not_age_the_mark():
    """A quiet night teaches nothing about decode gaps."""
    assert after(30, age_s=8 * 3600, held=False) == 60


def test_a_clock_that_steps_back_changes_nothing():
    state = first_cooldown(10 * SECOND, SETTINGS)

    state, decision = step_cooldown(state, CooldownObservation(), 5 * SECOND, SETTINGS)

    assert (SETTINGS.start_ns, 10 * SECOND) == (decision.cooldown_ns, state.seen_ns)


def test_a_gap_stays_covered_for_the_time_the_settings_promise():
    """With the defaults about 110 s of held time."""
    assert covered_ns(SETTINGS) / SECOND == pytest.approx(112.7, abs=1)


@pytest.mark.parametrize(
    ("name", "end", "gap", "counted"),
    [
        ("inside the hold", 60, 20, True),
        ("touching both ends", 100, 90, True),
        ("began before the hold", 60, 55, False),
        ("ended after the hold", 101, 20, False),
        ("no gap at all", 60, 0, False),
    ],
)
def test_only_gaps_inside_one_hold_count(name, end, gap, counted):
    assert ((gap,) if counted else ()) == gaps_inside_hold([(end, gap)], held_since_ns=10, held_until_ns=100), name


@pytest.mark.parametrize(
    "wrong",
    [{"floor_ns": 0}, {"floor_ns": 30 * MS}, {"ceiling_ns": 10 * MS}, {"factor": 1.0}, {"window_ns": 0}],
)
def test_settings_that_make_no_sense_are_refused(wrong):
    with pytest.raises(ValueError, match="cooldown"):
        CooldownSettings(**wrong)
