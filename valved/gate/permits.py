"""What the native side is told before it may wake a service by itself, and what it says of its last look."""

from __future__ import annotations

from valved.gate.online import OnlineService
from valved.machine.ports import WakeLook, WakeRule
from valved.policy.wake import WakeAction, WakeDecision, WakeReason, WakeSettings

LEAST_CHANGE = 50  # a cooldown that has shrunk by less than this part is not worth telling

# As enum valve_wake_reason and enum valve_wake_action of native/gate.h count them. 0: nobody has looked yet.
REASONS = (
    None,
    WakeReason.NO_OPEN_REQUESTS,
    WakeReason.COOLDOWN_OVER,
    WakeReason.COOLING,
    WakeReason.REFUSED_LATELY,
    WakeReason.BUSY,
    WakeReason.OPEN_REQUESTS,
    WakeReason.WATCHER_DEAD,
)
ACTIONS = (WakeAction.HOLD, WakeAction.WAIT, WakeAction.WAKE)


def rule_of(online: OnlineService, settings: WakeSettings) -> WakeRule:
    return WakeRule(
        cooldown_ns=online.cooldown.cooldown_ns,
        learn_ns=online.cooldown.gap_ns,
        watch_since_ns=online.watch_since_ns,
        looking_since_ns=online.watch_since_ns,
        watcher_lease_ns=settings.watcher_lease_ns,
        dead_look_ns=settings.dead_look_ns,
        hint_lease_ns=settings.hint_lease_ns,
        refused_backoff_ns=settings.refused_backoff_ns,
        leak_ns=settings.leak_ns,
        leak_cooldowns=settings.leak_cooldowns,
        look_share=settings.look_share,
        look_least_ns=settings.look_least_ns,
        look_most_ns=settings.look_most_ns,
    )


def is_news(old: WakeRule | None, new: WakeRule) -> bool:
    """Whether the native side must hear of it. A mark that ages shortens the cooldown a little at every look."""
    if old is None or old.watch_since_ns != new.watch_since_ns or old.watcher_lease_ns != new.watcher_lease_ns:
        return True
    return not 0 <= old.cooldown_ns - new.cooldown_ns < old.cooldown_ns // LEAST_CHANGE


def reason_of(code: int) -> WakeReason | None:
    return REASONS[code] if 0 <= code < len(REASONS) else None


def decision_of(look: WakeLook, before: WakeDecision | None) -> WakeDecision | None:
    reason = reason_of(look.reason)
    if reason is None:
        return before
    return WakeDecision(
        action=ACTIONS[look.action],
        reason=reason,
        look_again_ns=None,
        quiet_ns=look.quiet_ns,
        is_hinted=look.is_hinted,
        leaked=look.leaked,
    )


def no_permit(reason: WakeReason, before: WakeDecision | None) -> WakeDecision:
    """The answer while nobody may look."""
    is_hinted = before is not None and before.is_hinted
    return WakeDecision(action=WakeAction.HOLD, reason=reason, look_again_ns=None, is_hinted=is_hinted)
