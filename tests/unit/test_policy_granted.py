"""What granting would be worth, said before anybody consents: never invented, never above what can be."""

from __future__ import annotations

from dataclasses import replace
from math import log1p

import pytest
from hypothesis import given
from hypothesis import strategies as st
from valve_hook.policy.worth import saved_share

from valved.policy.granted import LEAST_STEPS, Known, expected_worth

KNOWN = Known(steps_ms=(8.0,) * 64, busy=0.5, cost_ms=0.5, tpot_ms=24.0, gap_ms=100.0)


@pytest.mark.parametrize(
    ("known", "why"),
    [
        (replace(KNOWN, steps_ms=()), "no engine's hook reports"),
        (replace(KNOWN, steps_ms=(8.0,) * (LEAST_STEPS - 1)), "15 of 16 steps"),
        (replace(KNOWN, busy=None), "no time was measured"),
        (replace(KNOWN, cost_ms=None), "no stop was measured"),
    ],
)
def test_a_figure_is_never_invented(known, why):
    found = expected_worth(known)

    assert found.points is None
    assert found.words.startswith("worth unknown: ")
    assert why in found.words


def test_a_service_at_its_target_has_nothing_to_give():
    found = expected_worth(replace(KNOWN, tpot_ms=8.0))

    assert found.points == 0
    assert "worth nothing" in found.words


def test_a_gap_without_room_for_a_grant_is_worth_nothing():
    assert expected_worth(replace(KNOWN, gap_ms=9.0)).points == 0


def test_a_service_that_is_half_busy_and_states_three_steps_is_worth_about_two_points_a_millisecond():
    """By hand: x = -ln .5; steps a ms: .5 / 8 before, (1 - .5 ** (23.52 / 8)) / 23.52 after; each saves 8 ms."""
    found = expected_worth(replace(KNOWN, cost_ms=0.0))

    by_hand = 100 * 8.0 * (0.5 / 8 - (1 - 0.5 ** (23.52 / 8)) / 23.52) / (23.52 - 8)
    assert found.points == pytest.approx(by_hand)
    assert "up to a target of 24 ms" in found.words


@given(
    step=st.floats(1, 50),
    busy=st.floats(0, 1),
    cost=st.floats(0, 8),
    times=st.floats(1, 10),
    gap=st.floats(1, 500),
)
def test_it_is_never_more_than_what_fewer_steps_save(step, busy, cost, times, gap):
    found = expected_worth(Known(steps_ms=(step,) * 20, busy=busy, cost_ms=cost, tpot_ms=step * times, gap_ms=gap))

    paced = 0.98 * step * times
    if paced <= step:
        assert found.points == 0
        return
    assert found.points is not None
    assert 0 <= found.points * (paced - step) <= 100.0 * min(1.0, busy) + 1e-6
    load = -log1p(-min(busy, 0.999)) / step
    assert found.points * (paced - step) <= 100 * saved_share(step, step, paced, load, 1.0) + 1e-6


def test_what_costs_more_is_never_worth_more():
    points = [expected_worth(replace(KNOWN, cost_ms=cost)).points for cost in (0.0, 0.2, 0.5, 1.0, 2.0, 4.0)]

    assert points == sorted(points, reverse=True)
