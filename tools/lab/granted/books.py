"""What one run measured, and its time by what decided: a rule of the policy, or credit."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from valve_hook.policy.granting import GrantReason

Floats = NDArray[np.float64]
WINDOW_MS = 60_000.0
BOOKED_MS = 1_000.0
OPEN = frozenset((GrantReason.GRANTED, GrantReason.SHORT, GrantReason.LATE, GrantReason.RATE))
"""Credit, or the grant before, decides: the rules let the policy grant."""
PASSING = frozenset((GrantReason.PREFILL, GrantReason.WAITING, GrantReason.NO_REQUESTS))
"""They hide for a moment whether a rule refuses."""
RULES = frozenset(GrantReason) - OPEN - PASSING
"""Refusals by a rule that holds for a while."""


SHUT = PASSING | {
    GrantReason.MISSES,
    GrantReason.CLIENTS,
    GrantReason.CHUNK,
    GrantReason.TTFT,
    GrantReason.KV,
    GrantReason.SEQUENCES,
}
"""What refuses at a target and a gap refuses at every smaller target and gap, too, as long as nothing is granted."""


@dataclass(slots=True)
class Outcome:
    """What one run measured."""

    arrive_ms: Floats
    first_ms: Floats
    end_ms: Floats
    duration_ms: float = 0.0
    offline_idle_ms: float = 0.0
    offline_granted_ms: float = 0.0
    granted_ms: float = 0.0
    longest_ms: float = 0.0
    """The longest pause that grants added, with what ending it cost."""
    grants: int = 0
    refused: int = 0
    """Requests larger than the pool."""
    preempted: int = 0
    intervals_ms: list[float] = field(default_factory=list)
    readers: list[int] = field(default_factory=list)
    reason_ms: dict[GrantReason, float] = field(default_factory=dict)
    """Time by what last decided: a rule, or credit."""
    reasons: set[GrantReason] = field(default_factory=set)
    """All that was ever decided."""
    refused_ms: Floats = field(default_factory=lambda: np.zeros(1))
    open_ms: Floats = field(default_factory=lambda: np.zeros(1))
    """By window: time in which a rule refused, and in which credit alone decided."""


class Books:
    """The time since the last change belongs to what decided before. A prompt that passes changes nothing."""

    def __init__(self, outcome: Outcome, duration_ms: float, from_ms: float) -> None:
        self._outcome = outcome
        self._from_ms = from_ms
        self._since_ms = 0.0
        self._reason = GrantReason.MISSES
        windows = int(duration_ms // WINDOW_MS) + 1
        outcome.refused_ms, outcome.open_ms = np.zeros(windows), np.zeros(windows)

    def decided(self, now_ms: float, reason: GrantReason) -> None:
        if reason in PASSING:
            reason = self._reason
        elif reason is not self._reason:
            self._outcome.reasons.add(reason)
        if reason is not self._reason or now_ms > self._since_ms + BOOKED_MS:
            self._book(now_ms)
            self._reason = reason

    def pause(self, now_ms: float, until_ms: float) -> None:
        """Nobody is there: no time of anybody."""
        self._book(now_ms)
        self._since_ms = until_ms

    def _book(self, now_ms: float) -> None:
        out, passed_ms, was = self._outcome, now_ms - self._since_ms, self._reason
        self._since_ms = now_ms
        if now_ms < self._from_ms:
            return
        out.reason_ms[was] = out.reason_ms.get(was, 0.0) + passed_ms
        by_window = out.refused_ms if was in RULES else out.open_ms
        window = int(now_ms // WINDOW_MS)
        if window < by_window.size:
            by_window[window] += passed_ms
