"""How much of a thing a user may have in a second: what goes beyond it is put off, never refused.

Root and valved's own user are never put off. Each other user has a pace of its own, and all of them together have one:
who takes all he can keeps neither the loop nor another user's turn.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

MOST_KEPT = 1024  # users whose account is kept; one that is paid up needs none


class Rate(msgspec.Struct, frozen=True, kw_only=True):
    """In a second, for long; `burst_s` seconds of it may come at once."""

    per_user: float
    others: float  # all users together, other than root and valved's own
    burst_s: float


class CallPace:
    def __init__(self, rate: Rate, own: frozenset[int], now_s: Callable[[], float]) -> None:
        self._rate = rate
        self._own = own
        self._now_s = now_s
        self._paid_until_s: dict[int | None, float] = {}  # None: all of them together

    def wait_s(self, uid: int, amount: float = 1.0) -> float:
        """Takes so much, and says how long to wait before it is used."""
        if uid in self._own:
            return 0.0
        now_s = self._now_s()
        if len(self._paid_until_s) > MOST_KEPT:
            self._paid_until_s = {who: until_s for who, until_s in self._paid_until_s.items() if until_s > now_s}
        mine = self._take(uid, amount / self._rate.per_user, now_s)
        return max(mine, self._take(None, amount / self._rate.others, now_s))

    def _take(self, who: int | None, cost_s: float, now_s: float) -> float:
        until_s = max(self._paid_until_s.get(who, 0.0), now_s) + cost_s
        self._paid_until_s[who] = until_s
        return max(0.0, until_s - now_s - self._rate.burst_s)
