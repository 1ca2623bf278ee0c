"""May offline run again? Each factor alone, then the crossings that matter."""

from __future__ import annotations

import dataclasses

import pytest

from valved.policy.cooldown import MS, SECOND
from valved.policy.wake import (
    HintView,
    LauncherView,
    WakeAction,
    WakeObservation,
    WakeReason,
    WakeSettings,
    WakeState,
    after_refusal,
    decide_wake,
)

SETTINGS = WakeSettings()
NOW = 100 * SECOND
IDLE = LauncherView(is_idle=True, idle_ns=NOW - 30 * MS, watcher_ns=NOW)
BUSY = LauncherView(is_idle=False, idle_ns=0, watcher_ns=NOW)
ZERO = HintView(open_requests=0, hint_ns=NOW)
OPEN = HintView(open_requests=3, hint_ns=NOW)
STALE_OPEN = HintView(open_requests=3, hint_ns=NOW - SETTINGS.hint_lease_ns - MS)
STALE_ZERO = HintView(open_requests=0, hint_ns=NOW - SETTINGS.hint_lease_ns - MS)
MINUTE_IDLE = LauncherView(is_idle=True, idle_ns=NOW - 61 * SECOND, watcher_ns=NOW)
QUIET = WakeObservation(held_since_ns=NOW - SECOND, cooldown_ns=20 * MS, launchers=(IDLE,))


def decide(state=WakeState(), **changes):  # noqa: B008 (frozen)
    _, decision = decide_wake(state, dataclasses.replace(QUIET, **changes), NOW, SETTINGS)
    return decision


@pytest.mark.parametrize(
    ("name", "changes", "action", "reason"),
    [
        ("quiet for longer than the cooldown", {}, WakeAction.WAKE, WakeReason.COOLDOWN_OVER),
        ("no launcher yet", {"launchers": ()}, WakeAction.WAKE, WakeReason.COOLDOWN_OVER),
        ("still cooling", {"cooldown_ns": 50 * MS}, WakeAction.WAIT, WakeReason.COOLING),
        ("born just now", {"held_since_ns": NOW - MS}, WakeAction.WAIT, WakeReason.COOLING),
        ("one of two busy", {"launchers": (IDLE, BUSY)}, WakeAction.HOLD, WakeReason.BUSY),
        ("engine says zero", {"hints": (ZERO,)}, WakeAction.WAKE, WakeReason.NO_OPEN_REQUESTS),
        (
            "zero needs no cooldown",
            {"hints": (ZERO,), "cooldown_ns": 500 * MS},
            WakeAction.WAKE,
            WakeReason.NO_OPEN_REQUESTS,
        ),
        ("zero but GPU work left", {"hints": (ZERO,), "launchers": (BUSY,)}, WakeAction.HOLD, WakeReason.BUSY),
        ("open requests", {"hints": (OPEN,)}, WakeAction.HOLD, WakeReason.OPEN_REQUESTS),
        ("one engine of two still open", {"hints": (ZERO, OPEN)}, WakeAction.HOLD, WakeReason.OPEN_REQUESTS),
        ("a stale report falls back to quiet", {"hints": (STALE_OPEN,)}, WakeAction.WAKE, WakeReason.COOLDOWN_OVER),
        (
            "a stale zero saves no cooldown",
            {"hints": (STALE_ZERO,), "cooldown_ns": 50 * MS},
            WakeAction.WAIT,
            WakeReason.COOLING,
        ),
        (
            "one stale of two: quiet decides",
            {"hints": (ZERO, STALE_ZERO), "cooldown_ns": 50 * MS},
            WakeAction.WAIT,
            WakeReason.COOLING,
        ),
        (
            "watcher gone",
            {"launchers": (dataclasses.replace(IDLE, watcher_ns=NOW - 3 * SECOND),)},
            WakeAction.HOLD,
            WakeReason.WATCHER_DEAD,
        ),
        ("no offline work here", {"is_offline_present": False}, WakeAction.HOLD, WakeReason.NO_OFFLINE),
        ("braked", {"is_braked": True, "hints": (ZERO,)}, WakeAction.HOLD, WakeReason.BRAKED),
    ],
)
def test_each_factor_has_its_answer(name, changes, action, reason):
    decision = decide(**changes)

    assert (action, reason) == (decision.action, decision.reason), name


def test_waiting_names_the_moment_the_cooldown_ends():
    assert IDLE.idle_ns + 50 * MS == decide(cooldown_ns=50 * MS).look_again_ns


def test_quiet_counts_from_the_last_of_all_clients():
    later = dataclasses.replace(IDLE, idle_ns=NOW - 5 * MS)

    assert (decide(launchers=(IDLE, later)).action, decide(launchers=(later,)).quiet_ns) == (WakeAction.WAIT, 5 * MS)


def test_looking_again_at_a_busy_service_after_one_cooldown_is_never_late():
    assert decide(launchers=(BUSY,), cooldown_ns=200 * MS).look_again_ns == NOW + 200 * MS


def test_a_long_busy_service_with_reports_is_looked_at_forty_times_a_second_at_most():
    assert decide(hints=(OPEN,), held_since_ns=NOW - 60 * SECOND).look_again_ns == NOW + 25 * MS


def test_a_brake_needs_no_second_look():
    assert decide(is_braked=True).look_again_ns is None
    assert decide(is_offline_present=False).look_again_ns is None


def test_refusals_back_off_up_to_the_cooldown():
    """Proposals must not chase a service that launches every millisecond."""
    state, pauses = WakeState(), []
    for _ in range(7):
        state = after_refusal(state, 20 * MS, NOW, SETTINGS)
        pauses.append((state.blocked_until_ns - NOW) // MS)

    assert pauses == [1, 2, 4, 8, 16, 20, 20]
    assert decide(state).reason == WakeReason.REFUSED_LATELY


def test_being_busy_again_forgets_the_refusals():
    state = after_refusal(WakeState(), 20 * MS, NOW, SETTINGS)

    state, _ = decide_wake(state, dataclasses.replace(QUIET, launchers=(BUSY,)), NOW, SETTINGS)

    assert WakeState() == state


# Requests that are never ended


def leaked(count=3, state=WakeState(), **changes):  # noqa: B008 (frozen)
    observation = dataclasses.replace(
        QUIET,
        held_since_ns=NOW - 90 * SECOND,
        launchers=(MINUTE_IDLE,),
        hints=(HintView(open_requests=count, hint_ns=NOW),),
    )
    return decide_wake(state, dataclasses.replace(observation, **changes), NOW, SETTINGS)


def test_a_count_of_requests_that_leaked_never_stops_the_harvest_for_ever():
    state, decision = leaked()

    assert (decision.action, decision.reason) == (WakeAction.WAKE, WakeReason.COOLDOWN_OVER)
    assert (decision.leaked, state.leaked, decision.is_hinted) == (3, 3, False)


def test_after_a_leak_the_cooldown_decides_and_new_requests_still_hold():
    state, _ = leaked()

    _, again = leaked(state=state, launchers=(IDLE,), held_since_ns=NOW - SECOND)
    _, cooling = leaked(state=state, launchers=(IDLE,), held_since_ns=NOW - SECOND, cooldown_ns=50 * MS)
    _, more = leaked(count=4, state=state, launchers=(IDLE,), held_since_ns=NOW - SECOND)

    assert (again.action, again.reason) == (WakeAction.WAKE, WakeReason.COOLDOWN_OVER)
    assert cooling.reason is WakeReason.COOLING
    assert more.reason is WakeReason.OPEN_REQUESTS


def test_a_count_that_came_back_is_believed_again():
    state, _ = leaked()

    back, decision = leaked(count=0, state=state, launchers=(IDLE,), held_since_ns=NOW - SECOND)

    assert (back.leaked, decision.reason) == (0, WakeReason.NO_OPEN_REQUESTS)


@pytest.mark.parametrize(
    "changes",
    [
        {"launchers": (BUSY,)},
        {"launchers": (MINUTE_IDLE, IDLE)},
        {"held_since_ns": NOW - 59 * SECOND},
        {"cooldown_ns": 10 * SECOND},
    ],
)
def test_requests_that_may_be_served_are_never_called_leaked(changes):
    state, decision = leaked(**changes)

    assert state.leaked == 0
    assert decision.action is WakeAction.HOLD


def test_the_verdict_outlives_obstacles_and_refusals():
    state, _ = leaked()

    held, _ = leaked(state=state, launchers=(BUSY,))

    assert held.leaked == after_refusal(state, 20 * MS, NOW, SETTINGS).leaked == 3
