"""May offline work run again on the GPUs of this online service?

Asked whenever something may have changed, and at the time that the last answer named. The answer is only a proposal:
the native side opens the gate word, re-reads every launch counter and refuses if a launch slipped in.

Every client of the service must have proven its GPU work done. Beyond that, an engine that reports its open requests
answers exactly (zero means now); without such a report the service must have been quiet for its cooldown. Each doubt
is settled against offline work: no proof, a stopped watcher or a stale report never wakes anybody.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

from valved.policy.cooldown import MS, SECOND


class WakeAction(enum.Enum):
    WAKE = "wake"  # propose it to the native side now
    WAIT = "wait"  # nothing is in the way but time
    HOLD = "hold"  # something is in the way


class WakeReason(enum.Enum):
    """Why. The values appear in traces, logs and `valve explain`."""

    NO_OPEN_REQUESTS = "no-open-requests"  # wake: the engine says so
    COOLDOWN_OVER = "cooldown-over"  # wake: quiet for long enough
    COOLING = "cooling"  # wait for the rest of the cooldown
    REFUSED_LATELY = "refused-lately"  # wait: a launch slipped into the last attempt
    BUSY = "busy"  # hold: GPU work not proven done
    OPEN_REQUESTS = "open-requests"  # hold: the engine still serves somebody
    WATCHER_DEAD = "watcher-dead"  # hold: nobody can prove the GPU idle
    NO_OFFLINE = "no-offline"  # hold: nobody would run; spare the service its doorbell
    BRAKED = "braked"  # hold: paused, mode off, or the breaker


@dataclass(frozen=True, slots=True, kw_only=True)
class WakeSettings:
    watcher_lease_ns: int = 2 * SECOND  # a watcher's heartbeat older than this: it is gone or stuck
    dead_look_ns: int = 100 * MS  # a service is born before its watcher runs: look again soon
    hint_lease_ns: int = 3 * SECOND  # an older report is not believed; a live process renews it every second
    refused_backoff_ns: int = MS  # first pause after a refusal, doubling up to the cooldown
    leak_ns: int = 60 * SECOND  # requests open while the GPU was proven idle for so long are a count that leaked ...
    leak_cooldowns: int = 20  # ... if that is also so many cooldowns
    look_share: int = 16  # a look at a busy service may be late by 1/16 of the time it has been busy ...
    look_least_ns: int = 2 * MS  # ... but is not repeated faster than this
    look_most_ns: int = 25 * MS  # ... nor slower than this, so that a long answer costs at most 25 ms of harvest


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherView:
    """A client that launches GPU work (role online)."""

    is_idle: bool  # everything it submitted is proven done
    idle_ns: int  # since when
    watcher_ns: int  # its watcher's heartbeat, or when it was asked to watch, whichever is later


@dataclass(frozen=True, slots=True, kw_only=True)
class HintView:
    """A client that reports open requests (engine hook)."""

    open_requests: int
    hint_ns: int  # when it last said so


@dataclass(frozen=True, slots=True, kw_only=True)
class WakeObservation:
    """One consistent look at a service that holds its GPUs."""

    held_since_ns: int
    cooldown_ns: int
    launchers: tuple[LauncherView, ...]
    hints: tuple[HintView, ...] = ()
    is_offline_present: bool = True
    is_braked: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class WakeState:
    """What the policy remembers between looks: refusals since something else last stood in the way."""

    refusals: int = 0
    blocked_until_ns: int = 0
    leaked: int = 0  # open requests that nobody believes in any more; the count may only fall to get it back


@dataclass(frozen=True, slots=True, kw_only=True)
class WakeDecision:
    action: WakeAction
    reason: WakeReason
    look_again_ns: int | None  # None: nothing but an event (offline arrives, brake released) changes the answer
    quiet_ns: int = 0
    is_hinted: bool = False  # the answer rests on fresh reports of open requests
    stale_hints: int = 0
    leaked: int = 0  # open requests that are not believed: the hook lost the ends of so many


def decide_wake(
    state: WakeState, observation: WakeObservation, now_ns: int, settings: WakeSettings
) -> tuple[WakeState, WakeDecision]:
    """Wake, wait or hold. Reports of a stale hook count as no report at all. A count that leaked is one that lies: the
    service is treated as one without hints until the count is back where it was.
    """
    fresh = tuple(hint for hint in observation.hints if now_ns - hint.hint_ns <= settings.hint_lease_ns)
    stale = len(observation.hints) - len(fresh)
    quiet_since_ns = max(
        (observation.held_since_ns, *(launcher.idle_ns for launcher in observation.launchers if launcher.is_idle))
    )
    quiet_ns = max(0, now_ns - quiet_since_ns)
    state = replace(state, leaked=_leaked(state, observation, fresh, quiet_ns, settings))
    is_hinted = bool(fresh) and stale == 0 and not state.leaked

    def decision(action: WakeAction, reason: WakeReason, look_again_ns: int | None) -> WakeDecision:
        return WakeDecision(
            action=action,
            reason=reason,
            look_again_ns=look_again_ns,
            quiet_ns=quiet_ns,
            is_hinted=is_hinted,
            stale_hints=stale,
            leaked=state.leaked,
        )

    obstacle = _obstacle(observation, fresh, state.leaked, now_ns, settings)
    if obstacle is not None:
        reason, look_again_ns = obstacle
        return WakeState(leaked=state.leaked), decision(WakeAction.HOLD, reason, look_again_ns)
    if not is_hinted and quiet_ns < observation.cooldown_ns:
        return state, decision(WakeAction.WAIT, WakeReason.COOLING, quiet_since_ns + observation.cooldown_ns)
    if now_ns < state.blocked_until_ns:
        return state, decision(WakeAction.WAIT, WakeReason.REFUSED_LATELY, state.blocked_until_ns)
    reason = WakeReason.NO_OPEN_REQUESTS if is_hinted else WakeReason.COOLDOWN_OVER
    return state, decision(WakeAction.WAKE, reason, None)


def after_refusal(state: WakeState, cooldown_ns: int, now_ns: int, settings: WakeSettings) -> WakeState:
    """The native side refused: pause, each time twice as long, so that proposals cannot chase launches."""
    pause_ns = min(settings.refused_backoff_ns << min(state.refusals, 20), cooldown_ns)
    return replace(state, refusals=state.refusals + 1, blocked_until_ns=now_ns + pause_ns)


def _leaked(
    state: WakeState, observation: WakeObservation, fresh: tuple[HintView, ...], quiet_ns: int, settings: WakeSettings
) -> int:
    """How many of the open requests are none. A request that is served keeps the GPU busy, now and then."""
    count = sum(hint.open_requests for hint in fresh)
    leak_ns = max(settings.leak_ns, settings.leak_cooldowns * observation.cooldown_ns)
    is_still = all(launcher.is_idle for launcher in observation.launchers)
    return count if is_still and quiet_ns >= leak_ns else min(state.leaked, count)


def _obstacle(
    observation: WakeObservation, fresh: tuple[HintView, ...], leaked: int, now_ns: int, settings: WakeSettings
) -> tuple[WakeReason, int | None] | None:
    """The first thing other than time that stands in the way, and when to look again."""
    if observation.is_braked:
        return WakeReason.BRAKED, None
    if not observation.is_offline_present:
        return WakeReason.NO_OFFLINE, None
    if any(now_ns - launcher.watcher_ns > settings.watcher_lease_ns for launcher in observation.launchers):
        return WakeReason.WATCHER_DEAD, now_ns + settings.dead_look_ns
    held_ns = now_ns - observation.held_since_ns
    soon_ns = min(max(held_ns // settings.look_share, settings.look_least_ns), settings.look_most_ns)
    if sum(hint.open_requests for hint in fresh) > leaked:
        return WakeReason.OPEN_REQUESTS, now_ns + soon_ns
    if not all(launcher.is_idle for launcher in observation.launchers):
        # Without reports the earliest wake is one cooldown after the proof of idleness: looking again in one cooldown
        # is never late. With reports the proof itself is the last thing missing.
        return WakeReason.BUSY, now_ns + (soon_ns if fresh else max(soon_ns, observation.cooldown_ns))
    return None
