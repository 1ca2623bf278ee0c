"""How many calls a user may make in a second: what goes beyond it is put off, never refused.

Root and valved's own user are never put off. Each other user has a line of its own, whose first call goes to the
line of all users. A call takes from an account only when its turn comes: a call that is given up before took nothing,
and a user that calls without end waits in its own line.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

MOST_KEPT = 1024  # users whose account is kept; one that is paid up needs none


class Rate(msgspec.Struct, frozen=True, kw_only=True):
    """In a second, for long; `burst_s` seconds of it may come at once."""

    per_user: float
    others: float  # all users together, other than root and valved's own
    burst_s: float


class Account:
    """What was taken, and the queue of those that wait."""

    def __init__(self, per_s: float) -> None:
        self.cost_s = 1 / per_s
        self.paid_until_s = 0.0
        self.line = asyncio.Lock()


class CallPace:
    def __init__(self, rate: Rate, own: frozenset[int], now_s: Callable[[], float]) -> None:
        self._rate = rate
        self._own = own
        self._now_s = now_s
        self._users: dict[int, Account] = {}
        self._others = Account(rate.others)

    async def turn(self, uid: int) -> None:
        """Comes back when it is this call's turn."""
        if uid in self._own:
            return
        now_s = self._now_s()
        if len(self._users) > MOST_KEPT:
            self._users = {who: one for who, one in self._users.items() if one.paid_until_s > now_s}
        await self._take(self._users.setdefault(uid, Account(self._rate.per_user)))
        await self._take(self._others)

    async def _take(self, account: Account) -> None:
        async with account.line:
            wait_s = account.paid_until_s + account.cost_s - self._now_s() - self._rate.burst_s
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            account.paid_until_s = max(account.paid_until_s, self._now_s()) + account.cost_s
