"""Links on which a packet costs what their client likes.

Whoever writes to a socket, reads from it or ends it wakes what waits for the other end, and a client can let a million
epolls wait there: some 0.1 us each, of the thread that does it. So where one packet of an account has cost much, all
links of that account are read, written and ended on threads of their own, until none has cost much for a while. Such
jobs of one account are done one after another. So it never keeps more than one thread from the other accounts, and no
job of a link runs beside another of it, or before.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

from valved.machine.helpers import Helpers, Worker

DEAR_NS = 5_000_000  # of a thread's own time; a packet takes some 10 us. Interrupts and collected garbage count, too
FORGOTTEN_NS = 60_000_000_000
THREADS = 4
MOST_KEPT = 1024

Job = Callable[[], Any]
Then = Callable[[Any, Exception | None], None]


class DearAccounts:
    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._threads = Worker(loop, Helpers("valved-dear", THREADS))
        self._until_ns: dict[Hashable, int] = {}
        self._waiting: dict[Hashable, deque[tuple[Job, Then]]] = {}  # behind the job that a thread has

    def note(self, account: Hashable) -> None:
        """Any thread."""
        now_ns = time.monotonic_ns()
        if len(self._until_ns) >= MOST_KEPT:
            self._until_ns = {key: until_ns for key, until_ns in self._until_ns.copy().items() if until_ns > now_ns}
        self._until_ns[account] = now_ns + FORGOTTEN_NS

    def has(self, account: Hashable) -> bool:
        return bool(self._until_ns) and self._until_ns.get(account, 0) > time.monotonic_ns()

    def do(self, account: Hashable, job: Job, then: Then) -> None:
        """Aside, after all that this account was given before. `then` on the loop."""
        waiting = self._waiting.get(account)
        if waiting is not None:
            waiting.append((job, then))
            return
        self._waiting[account] = deque()
        self._threads.do(job, partial(self._done, account, then))

    def _done(self, account: Hashable, then: Then, result: Any, error: Exception | None) -> None:
        waiting = self._waiting[account]
        if waiting:
            job, following = waiting.popleft()
            self._threads.do(job, partial(self._done, account, following))
        else:
            del self._waiting[account]
        then(result, error)


class LinkLane:
    """Where one link's packets are handled: on the loop, or aside of it."""

    def __init__(self, accounts: DearAccounts, account: Hashable) -> None:
        self._accounts = accounts
        self.account = account
        self._under_way = 0

    @property
    def is_aside(self) -> bool:
        """Also while a thread has a job of this link, so that the loop ends no socket that a thread uses."""
        return self._under_way > 0 or self._accounts.has(self.account)

    def took(self, began_ns: int) -> None:
        """Since time.thread_time_ns() was that, by the same thread."""
        if time.thread_time_ns() - began_ns > DEAR_NS:
            self._accounts.note(self.account)

    def do(self, job: Job, then: Then) -> None:
        """Aside. `then` on the loop."""
        self._under_way += 1

        def measured() -> Any:
            began_ns = time.thread_time_ns()
            try:
                return job()
            finally:
                self.took(began_ns)

        def done(result: Any, error: Exception | None) -> None:
            self._under_way -= 1
            then(result, error)

        self._accounts.do(self.account, measured, done)
