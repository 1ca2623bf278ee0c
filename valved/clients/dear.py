"""Where the packets of a link are handled, for what one costs is for its client to choose.

Whoever writes to a socket, reads from it or ends it wakes what waits for the other end, and a client can let millions
of epolls wait there: some 0.1 us each, of the thread that does it. So:

- The loop handles links of services, which are awaited or were welcomed as such. What their packets take beyond the
  usual, all services owe together: 10 ms, and a thousandth of the loop. While that is used up, threads handle them.
- Threads handle a link of anybody else until it was welcomed. Then the loop does, and all others owe as services do;
  while that is used up, or the account owes something for its own part, threads do.
- A thread has one job of an account at a time, and new links come first. What a job takes beyond the usual its account
  owes: a second, and a sixtieth of a core. Accounts that owe something keep no thread from the others.

An interrupt, or time that a hypervisor took, looks like such a packet, and nothing tells the two apart at once. So
nobody owes for longer than a minute, and what is handled by threads suffers little: it is a hop later.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from valved.clients.turns import LONGEST_NS, SECOND_NS, Bucket, Buckets
from valved.machine.helpers import Helpers, Worker

USUAL_NS = 100_000  # of a thread's own time; a packet takes some 10 us, one with 64 descriptors 40
DEAR_THREADS = 4  # of accounts that owe something
THREADS = 32  # of the others: each keeps one at most until it owes something
MOST_KEPT = 1024
LOOP_SHARE, LOOP_BURST_NS = 0.001, 10_000_000
CORE_SHARE, CORE_BURST_NS = 1 / 60, SECOND_NS
OWES_NS = 10_000_000  # interrupts and collected garbage make less

Job = Callable[[], Any]
Then = Callable[[Any, Exception | None], None]
Told = Callable[[Any, str], object]  # an account, and what is to be said of it


@dataclass(slots=True)
class _Waiting:
    """Jobs of one account behind the one that a thread has."""

    new: deque[tuple[Job, Then]] = field(default_factory=deque)  # of links that nobody has answered yet
    others: deque[tuple[Job, Then]] = field(default_factory=deque)


class DearAccounts:
    def __init__(self, loop: asyncio.AbstractEventLoop, told: Told = lambda *_: None) -> None:
        self._loop = loop
        self._told = told
        self._dear = Worker(loop, Helpers("valved-dear", DEAR_THREADS))
        self._others = Worker(loop, Helpers("valved-aside", THREADS))
        self._of_loop = {is_awaited: _of_loop() for is_awaited in (True, False)}
        self._of_each = Buckets(CORE_SHARE, CORE_BURST_NS, LONGEST_NS * CORE_SHARE)
        self._waiting: dict[Hashable, _Waiting] = {}
        self._slow: deque[Hashable] = deque(maxlen=MOST_KEPT)  # that was told

    def has_used_up(self, *, is_awaited: bool) -> bool:
        """What all services, or all others, may have of the loop."""
        bucket = self._of_loop[is_awaited]
        return bucket.left_ns < bucket.burst_ns and bucket.wait_ns(time.monotonic_ns()) > 0

    def owes(self, account: Hashable) -> bool:
        return self._of_each.taken_ns(account, time.monotonic_ns()) > OWES_NS

    def took_of_loop(self, account: Hashable, ns: int, *, is_awaited: bool) -> None:
        """A packet of it took so much of the loop's own time."""
        if ns <= USUAL_NS:
            return
        had_used_up = self.has_used_up(is_awaited=is_awaited)
        self._of_loop[is_awaited].take(ns - USUAL_NS, time.monotonic_ns())
        if self.has_used_up(is_awaited=is_awaited) and not had_used_up:
            whose = "services" if is_awaited else "others"
            self._told(account, f"a packet took {ns / 1e6:.1f} ms, so threads handle the links of all {whose} for now")
        self.took(account, ns)

    def took(self, account: Hashable, ns: int) -> None:
        """The same, of whatever thread."""
        if ns <= USUAL_NS:
            return
        owed = self.owes(account)
        self._of_each.took(account, ns - USUAL_NS, time.monotonic_ns())
        if self.owes(account) and not owed:
            self._told(account, f"a packet took {ns / 1e6:.1f} ms, so its links have threads of their own for now")

    def do(self, account: Hashable, job: Job, then: Then, *, is_new: bool = False) -> None:
        """By a thread, after what the account was given before; `is_new`: of new links alone. `then` on the loop."""
        waiting = self._waiting.get(account)
        if waiting is not None:
            (waiting.new if is_new else waiting.others).append((job, then))
            return
        self._waiting[account] = _Waiting()
        self._begin(account, job, then)

    def _begin(self, account: Hashable, job: Job, then: Then) -> None:
        if wait_ns := self._of_each.wait_ns(account, time.monotonic_ns()):
            self._tell_slow(account)
            self._loop.call_later(wait_ns / SECOND_NS, self._begin, account, job, then)
            return
        ran = [0]

        def measured() -> Any:
            began_ns = time.thread_time_ns()
            try:
                return job()
            finally:
                ran[0] = time.thread_time_ns() - began_ns

        threads = self._dear if self.owes(account) else self._others
        threads.do(measured, partial(self._done, account, then, ran))

    def _tell_slow(self, account: Hashable) -> None:
        if account not in self._slow:
            self._told(account, "its links kept a thread busy for a second: they have a sixtieth of a core from now on")
            self._slow.append(account)

    def _done(self, account: Hashable, then: Then, ran: list[int], result: Any, error: Exception | None) -> None:
        self.took(account, ran[0])
        waiting = self._waiting[account]
        if line := waiting.new or waiting.others:
            self._begin(account, *line.popleft())
        else:
            del self._waiting[account]
        then(result, error)


def _of_loop() -> Bucket:
    most_owed_ns = LONGEST_NS * LOOP_SHARE
    return Bucket(share=LOOP_SHARE, burst_ns=LOOP_BURST_NS, left_ns=LOOP_BURST_NS, seen_ns=0, most_owed_ns=most_owed_ns)


class LinkLane:
    """Where one link's packets are handled: on the loop, or aside of it."""

    def __init__(self, accounts: DearAccounts, account: Hashable, *, is_awaited: bool = False) -> None:
        self._accounts = accounts
        self.account = account
        self.is_awaited = is_awaited  # or was welcomed as online work since
        self.is_new = True  # its HELLO was not answered yet
        self._under_way = 0

    @property
    def is_aside(self) -> bool:
        """Also while a thread has a job of this link, so that the loop ends no socket that a thread uses."""
        accounts, is_awaited = self._accounts, self.is_awaited
        if self._under_way > 0 or accounts.has_used_up(is_awaited=is_awaited):
            return True
        return not is_awaited and (self.is_new or accounts.owes(self.account))

    def took(self, began_ns: int) -> None:
        """By the loop, since time.thread_time_ns() was that."""
        ran_ns = time.thread_time_ns() - began_ns
        self._accounts.took_of_loop(self.account, ran_ns, is_awaited=self.is_awaited)

    def do(self, job: Job, then: Then) -> None:
        """Aside. `then` on the loop."""
        self._under_way += 1

        def done(result: Any, error: Exception | None) -> None:
            self._under_way -= 1
            then(result, error)

        self._accounts.do(self.account, job, done, is_new=self.is_new)
