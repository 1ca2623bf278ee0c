"""What one grant costs, as its steps have shown: learnt by grants.py for the policy, and forgotten where that may be.

A cost that keeps all grants away would never be seen again, and one stall of the machine is enough to learn it. So half
of it is forgotten from time to time, which puts it to the test.
"""

from __future__ import annotations

from valve_hook.policy.granting import GrantCost, GrantPolicy, GrantReason

MS = 1_000_000
FIRST_COST = GrantCost(stop_ms=1.0, wake_ms=1.0, bubble_ms=0.0, damage_ms=0.5)
FIRST_SLICED = GrantCost(stop_ms=0.3, wake_ms=0.0, bubble_ms=0.0, damage_ms=0.5)
LEAD_LEAST_MS, LEAD_MOST_MS = 0.3, 10.0
LEAD_UP, LEAD_DOWN_MS = 1.25, 0.02  # a step that was late by more than the usual, and one that was not
WAIT_MOST_MS = 10.0  # a wait that ends later is a stall, which no plan can help
WAIT_UP_MS, WAIT_DOWN_MS = 1.0, 0.02  # one wait in fifty ends later than what is learnt
LEARN = 0.125
FADES_NS = 30_000 * MS  # a cost that kept grants away for so long, with none to show it again, is half forgotten
SPARED_NS, LATE_SHARE = 3_000 * MS, 0.001  # what it may cost a service to learn again what was forgotten
DEAR = {GrantReason.SHORT, GrantReason.LATE, GrantReason.GAP, GrantReason.TTFT, GrantReason.WORTH, GrantReason.GRANTED}
"""Why a cost keeps a grant away; granted, too: so short that it ends before it has begun."""


class LearntCost:
    """Of one engine loop, over all policies that it gets. Times are CLOCK_MONOTONIC in ns."""

    def __init__(self) -> None:
        self.lead_ms = FIRST_COST.stop_ms
        """How long before the next step a grant has to end."""
        self.wait_ms = 0.0
        """How late the engine's own waits end, nearly all of them."""
        self._first = FIRST_COST
        self._seen_ns = 0  # when a grant last showed what it costs; time without requests does not count
        self._paid_ns = -int(SPARED_NS / LATE_SHARE)  # when all that was forgotten is paid for

    def begin(self, *, by_slices: bool) -> GrantCost:
        """The first guess."""
        self._first, self.lead_ms = (FIRST_SLICED, 0.0) if by_slices else (FIRST_COST, FIRST_COST.stop_ms)
        return self._first

    def shared(self, policy: GrantPolicy, now_ns: int, late_ms: float) -> None:
        """A step beside offline work ended so much later than predicted."""
        self._seen(policy, now_ns, damage_ms=max(0.0, late_ms))

    def stopped(self, policy: GrantPolicy, now_ns: int, late_ms: float) -> None:
        """The first step after a pause did."""
        if late_ms > policy.model.late_ms:
            self.lead_ms = min(LEAD_MOST_MS, self.lead_ms * LEAD_UP)
        else:
            self.lead_ms = max(LEAD_LEAST_MS, self.lead_ms - LEAD_DOWN_MS)
        self._seen(policy, now_ns, stop_ms=self.lead_ms, damage_ms=max(0.0, late_ms))

    def waited(self, late_ms: float) -> None:
        """The wait of a pause ended so much later than it was to: where it is too late, the client sees it."""
        if late_ms > self.wait_ms:
            self.wait_ms = min(WAIT_MOST_MS, late_ms, self.wait_ms + WAIT_UP_MS)
        else:
            self.wait_ms = max(0.0, late_ms, self.wait_ms - WAIT_DOWN_MS)

    def opened(self, policy: GrantPolicy, now_ns: int, wake_ms: float) -> None:
        """valved took so long to open."""
        self._seen(policy, now_ns, wake_ms=wake_ms)

    def _seen(self, policy: GrantPolicy, now_ns: int, **seen: float) -> None:
        parts = parts_of(policy.cost)
        for name, ms in seen.items():
            parts[name] += LEARN * (ms - parts[name])
        policy.cost, self._seen_ns = GrantCost(**parts), now_ns

    def rested(self, idle_ns: int) -> None:
        """In this time no cost kept a grant away."""
        self._seen_ns += idle_ns

    def refused(self, policy: GrantPolicy, now_ns: int, reason: GrantReason) -> None:
        """If a cost that is real is forgotten, steps after grants are late by 1 / LEARN of what was forgotten, in sum,
        until it is learnt again. That is paid for with time, in which nothing is forgotten.
        """
        if reason not in DEAR or now_ns <= max(self._seen_ns + FADES_NS, self._paid_ns):
            return
        old, guess, self._seen_ns = policy.cost, parts_of(self._first), now_ns
        policy.cost = GrantCost(**{name: min(ms, (ms + guess[name]) / 2) for name, ms in parts_of(old).items()})
        self.lead_ms = min(self.lead_ms, (self.lead_ms + self._first.stop_ms) / 2)
        self.wait_ms /= 2
        late_ns = (old.after_ms - policy.cost.after_ms) / LEARN * MS
        self._paid_ns = max(self._paid_ns, now_ns - int(SPARED_NS / LATE_SHARE)) + int(late_ns / LATE_SHARE)


def parts_of(cost: GrantCost) -> dict[str, float]:
    return {name: getattr(cost, name) for name in ("stop_ms", "wake_ms", "bubble_ms", "damage_ms")}
