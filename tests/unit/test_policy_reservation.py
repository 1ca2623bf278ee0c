"""The reservation policy step by step, in virtual time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from valved.model.memory import (
    OnlineMemory,
    ReservationAction,
    ReservationDecision,
    ReservationRule,
    ReservationState,
)
from valved.policy.reservation import SECOND_NS, ReservationSettings, decide, next_wake_ns, start

SETTINGS = ReservationSettings(
    rule=ReservationRule.MIAD,
    target_per_hour=2.0,
    hold_share=1.0,
    pressure_ratio=0.9,
    headroom_max_handles=4096,
    tau_start_ns=SECOND_NS,
    tau_min_ns=SECOND_NS // 5,
)
SLICE_NS = SECOND_NS // 16
"""Use is remembered by slices of tau / 16."""
MINUTE_NS = 60 * SECOND_NS


def memory(used: int, mapped: int, unmet: int = 0, free: int = 0) -> OnlineMemory:
    return OnlineMemory(
        used_handles=used, mapped_handles=mapped, unmet_handles=unmet, free_handles=free, pool_handles=1000
    )


def after(state: ReservationState, seen: OnlineMemory, at_ns: int) -> tuple[ReservationState, ReservationDecision]:
    return decide(state, seen, at_ns, SETTINGS)


def test_pressure_doubles_the_headroom_and_takes_enough_to_end_it() -> None:
    _, decision = after(start(0, SETTINGS), memory(used=9, mapped=10), SECOND_NS)

    assert ReservationAction.TAKE is decision.action
    assert decision.headroom_handles == 4
    assert decision.handles == 9 + 4 - 10
    assert decision.is_reclaim


def test_an_allocation_beyond_headroom_is_served_with_headroom_on_top() -> None:
    _, decision = after(start(0, SETTINGS), memory(used=2, mapped=10, unmet=30), SECOND_NS)

    assert decision.handles == 2 + 30 + 4 - 10


def test_one_take_ends_the_pressure_even_when_headroom_is_a_small_share() -> None:
    """90 of 90 mapped: 4 handles of headroom would leave it above nine tenths, so 101 are mapped."""
    _, decision = after(start(0, SETTINGS), memory(used=90, mapped=90), SECOND_NS)

    assert decision.handles == 11


def test_memory_that_nobody_uses_is_taken_without_counting_a_reclaim() -> None:
    state, decision = after(start(0, SETTINGS), memory(used=9, mapped=10, free=3), SECOND_NS)

    assert (decision.handles, decision.is_reclaim) == (3, False)
    assert state.reclaims_ns == ()


def test_a_full_pool_holds_and_says_so() -> None:
    _, decision = after(start(0, SETTINGS), memory(used=1000, mapped=1000), SECOND_NS)

    assert ReservationAction.HOLD is decision.action
    assert "everything is mapped" in decision.reason


def test_looks_at_a_full_pool_never_raise_the_headroom() -> None:
    """A service that has all the memory there is looks pressed at each look, and nothing could be taken for it."""
    state = start(0, SETTINGS)
    for second in range(1, 20):
        state, _ = after(state, memory(used=1000, mapped=1000), second * SECOND_NS)

    assert state.headroom_handles == SETTINGS.headroom_min_handles


def test_a_quiet_tau_lowers_the_headroom_by_one_and_gives_back_what_was_idle() -> None:
    state = replace(start(0, SETTINGS), headroom_handles=8)

    state, unsure = after(state, memory(used=10, mapped=40), SECOND_NS - 1)
    state, given = after(state, memory(used=10, mapped=40), SECOND_NS + SLICE_NS)
    _, again = after(state, memory(used=10, mapped=17), SECOND_NS + SLICE_NS + 1)

    assert [unsure.action, given.action, again.action] == [
        ReservationAction.HOLD,
        ReservationAction.GIVE,
        ReservationAction.HOLD,
    ]
    assert (given.handles, given.headroom_handles) == (40 - 10 - 7, 7)


def test_what_was_in_use_within_tau_is_kept() -> None:
    """30 handles were in use until second 5, when the look sees 10: they go back a tau after that, not before."""
    state, _ = after(start(0, SETTINGS), memory(used=30, mapped=34), SECOND_NS)
    state, _ = after(state, memory(used=10, mapped=34), 5 * SECOND_NS)

    state, held = after(state, memory(used=10, mapped=34), 6 * SECOND_NS - 1)
    _, given = after(state, memory(used=10, mapped=34), 6 * SECOND_NS + SLICE_NS)

    assert ReservationAction.HOLD is held.action
    assert (given.action, given.handles) == (ReservationAction.GIVE, 34 - 10 - 2)


def test_a_peak_between_two_looks_counts_as_use() -> None:
    state, _ = after(start(0, SETTINGS), memory(used=10, mapped=34), 3 * SECOND_NS)
    state, decision = after(state, replace(memory(used=10, mapped=34), peak_handles=30), 4 * SECOND_NS)

    assert ReservationAction.HOLD is decision.action


def test_a_give_that_would_bring_pressure_is_not_made() -> None:
    """18 of 20 is pressure, so with 21 mapped none is given back, whatever the headroom says."""
    _, decision = after(start(0, SETTINGS), memory(used=18, mapped=21), 10 * SECOND_NS)

    assert ReservationAction.HOLD is decision.action


def test_the_third_reclaim_of_an_hour_doubles_tau_when_two_are_accepted() -> None:
    state = start(0, SETTINGS)
    taus = []
    for i in range(4):
        state, decision = after(state, memory(used=9, mapped=10), (i + 1) * SECOND_NS)
        taus.append(decision.tau_ns // SECOND_NS)

    assert taus == [1, 1, 2, 4]


def test_a_calm_minute_shortens_tau_by_delta() -> None:
    state = replace(start(0, SETTINGS), tau_ns=5 * SECOND_NS)

    state, first = after(state, memory(used=10, mapped=40), MINUTE_NS)
    _, second = after(state, memory(used=10, mapped=40), MINUTE_NS + SECOND_NS)

    assert (first.tau_ns, second.tau_ns) == (4 * SECOND_NS, 4 * SECOND_NS)


def test_nothing_is_given_back_while_the_window_holds_the_target() -> None:
    state = replace(start(0, SETTINGS), reclaims_ns=(0, 1), headroom_handles=8)

    _, held = after(state, memory(used=10, mapped=40), MINUTE_NS)
    state, _ = after(state, memory(used=10, mapped=40), SETTINGS.window_ns)
    _, given = after(state, memory(used=10, mapped=40), SETTINGS.window_ns + MINUTE_NS)

    assert [held.action, given.action] == [ReservationAction.HOLD, ReservationAction.GIVE]


def test_an_idle_service_without_any_mapping_is_no_pressure() -> None:
    _, decision = after(start(0, SETTINGS), memory(used=0, mapped=0), SECOND_NS)

    assert ReservationAction.HOLD is decision.action


def test_the_service_may_sleep_until_the_next_give_or_adjustment() -> None:
    state = replace(start(0, SETTINGS), tau_ns=90 * SECOND_NS)

    assert next_wake_ns(state, SETTINGS) == MINUTE_NS
    assert next_wake_ns(start(0, SETTINGS), SETTINGS) == SECOND_NS


def test_the_service_may_sleep_until_a_peak_is_forgotten() -> None:
    state, _ = after(start(0, SETTINGS), memory(used=30, mapped=36), 2 * SECOND_NS)
    state, _ = after(state, memory(used=10, mapped=36), 2 * SECOND_NS + SECOND_NS // 2)
    state = replace(state, quiet_since_ns=4 * SECOND_NS)

    assert next_wake_ns(state, SETTINGS) == 3 * SECOND_NS + SLICE_NS


@pytest.mark.parametrize(
    "wrong",
    [
        {"alpha": 1.0},
        {"beta": 0.5},
        {"headroom_min_handles": 0},
        {"headroom_max_handles": 1},
        {"tau_min_ns": 61 * SECOND_NS},
        {"pressure_ratio": 0.0},
        {"target_per_hour": 0.0},
        {"hold_share": 0.0},
    ],
    ids=str,
)
def test_settings_that_cannot_work_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong)).split("_")[0]):
        ReservationSettings(**wrong)  # type: ignore[arg-type]
