"""Links on which a packet costs what their client likes.

Whoever writes to a socket, reads from it or ends it wakes what waits for the other end, and a client can let a million
epolls wait there: some 0.1 us each, of the thread that does it. So where one packet of an account has cost much, all
links of that account are read, written and ended on threads of their own, until none has cost much for a while.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

from valved.machine.helpers import Helpers, Worker

DEAR_NS = 5_000_000  # of a thread's own time; a packet takes some 10 us. Interrupts and collected garbage count, too
FORGOTTEN_NS = 60_000_000_000
THREADS = 4
MOST_KEPT = 1024


class DearAccounts:
    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.threads = Worker(loop, Helpers("valved-dear", THREADS))
        self._until_ns: dict[Hashable, int] = {}

    def note(self, account: Hashable) -> None:
        """Any thread."""
        now_ns = time.monotonic_ns()
        if len(self._until_ns) >= MOST_KEPT:
            self._until_ns = {key: until_ns for key, until_ns in self._until_ns.copy().items() if until_ns > now_ns}
        self._until_ns[account] = now_ns + FORGOTTEN_NS

    def has(self, account: Hashable) -> bool:
        return bool(self._until_ns) and self._until_ns.get(account, 0) > time.monotonic_ns()


@dataclass(frozen=True, slots=True)
class LinkLane:
    """Where one link's packets are handled: on the loop, or aside of it."""

    accounts: DearAccounts
    account: Callable[[], Hashable]

    @property
    def is_aside(self) -> bool:
        return self.accounts.has(self.account())

    def took(self, began_ns: int) -> None:
        """Since time.thread_time_ns() was that, by the same thread."""
        if time.thread_time_ns() - began_ns > DEAR_NS:
            self.accounts.note(self.account())

    def do(self, job: Callable[[], Any], then: Callable[[Any, Exception | None], None]) -> None:
        """Aside. `then` on the loop."""

        def measured() -> Any:
            began_ns = time.thread_time_ns()
            try:
                return job()
            finally:
                self.took(began_ns)

        self.accounts.threads.do(measured, then)
