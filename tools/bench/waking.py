"""The wake decision as the policy's Python makes it, for a gate in virtual time: permission, looks, wakes.

What valved/native/waking.c does in the listener, this does with valved/policy/wake.py: one is the oracle of the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import NamedTuple

from valved.gate.permits import ACTIONS
from valved.gate.records import REASONS
from valved.machine.clock import Clock, TimerHandle
from valved.machine.ports import ClientView, WakeLook, WakeOutcome, WakeRule
from valved.policy.wake import (
    HintView,
    LauncherView,
    WakeAction,
    WakeDecision,
    WakeObservation,
    WakeSettings,
    WakeState,
    after_refusal,
    decide_wake,
)

FLOOR_NS = 100_000  # between two looks, as waking.c has it


class ClientPages(NamedTuple):
    """One client of the service, as its pages show it."""

    view: ClientView  # with the gaps that the cooldown has not learned from
    is_launcher: bool
    is_hinting: bool


class PolicyWaker:
    """One service."""

    def __init__(
        self,
        clock: Clock,
        clients: Callable[[], Iterable[ClientPages]],
        wake: Callable[[], WakeOutcome],
        ask: Callable[[], None],
    ) -> None:
        self._clock = clock
        self._clients = clients
        self._wake = wake
        self._ask = ask
        self._rule: WakeRule | None = None
        self._settings = WakeSettings()
        self._state = WakeState()
        self._said: WakeDecision | None = None
        self._held_ns: int | None = clock.now_ns()
        self._timer: TimerHandle | None = None

    def look(self) -> WakeLook:
        said = self._said
        return WakeLook(
            holds=self._held_ns is not None,
            action=ACTIONS.index(said.action) if said is not None else 0,
            reason=REASONS.index(said.reason) if said is not None else 0,
            is_hinted=said is not None and said.is_hinted,
            quiet_ns=said.quiet_ns if said is not None else 0,
            leaked=said.leaked if said is not None else 0,
        )

    def permit(self, rule: WakeRule | None) -> None:
        self._rule = rule
        self._look_at(None)
        if rule is not None:
            own = {field.name for field in fields(WakeSettings)}
            self._settings = WakeSettings(**{name: getattr(rule, name) for name in own})
            if self._held_ns is not None:
                self._look_at(self._clock.now_ns())

    def held(self, since_ns: int) -> None:
        """By a ring, or by valved."""
        self._held_ns = since_ns
        if self._rule is not None:
            is_hinted = self._said is not None and self._said.is_hinted
            after_ns = self._settings.look_least_ns + (0 if is_hinted else self._rule.cooldown_ns)
            self._look_at(self._clock.now_ns() + after_ns)

    def opened(self) -> None:
        self._held_ns = None
        self._look_at(None)

    def _look_at(self, when_ns: int | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if when_ns is not None:
            self._timer = self._clock.call_at_ns(max(when_ns, self._clock.now_ns()), self._look)

    def _look(self) -> None:
        self._timer = None
        now_ns, rule = self._clock.now_ns(), self._rule
        if rule is None or self._held_ns is None:
            return
        self._state, said = decide_wake(self._state, self._observe(rule, now_ns), now_ns, self._settings)
        self._said = said
        if said.action is not WakeAction.WAKE:
            self._look_at(max(said.look_again_ns or 0, now_ns + FLOOR_NS))
        elif not said.is_hinted and self._teaches(rule, now_ns):
            self._ask()
        elif self._wake() is WakeOutcome.REFUSED:
            self._state = after_refusal(self._state, rule.cooldown_ns, now_ns, self._settings)
            self._look_at(self._state.blocked_until_ns)

    def _observe(self, rule: WakeRule, now_ns: int) -> WakeObservation:
        launchers, hints = [], []
        for client in self._clients():
            view = client.view
            if client.is_hinting:
                hints.append(HintView(open_requests=view.open_requests, hint_ns=view.hint_ns))
            if client.is_launcher:
                has_none = not (view.submitted or view.watcher_ns)
                heard_ns = now_ns if has_none else max(view.watcher_ns, rule.watch_since_ns)
                idle_ns = min(view.idle_ns, now_ns)
                launchers.append(LauncherView(is_idle=view.is_idle, idle_ns=idle_ns, watcher_ns=heard_ns))
        return WakeObservation(
            held_since_ns=self._held_ns or 0,
            cooldown_ns=rule.cooldown_ns,
            launchers=tuple(launchers),
            hints=tuple(hints),
        )

    def _teaches(self, rule: WakeRule, now_ns: int) -> bool:
        since_ns = max(self._held_ns or 0, rule.looking_since_ns)
        return any(
            gap.gap_ns > rule.learn_ns and gap.end_ns - gap.gap_ns >= since_ns and gap.end_ns <= now_ns
            for client in self._clients()
            if client.is_launcher
            for gap in client.view.gaps
        )
