"""Links on which a packet costs what their client likes.

Whoever writes to a socket, reads from it or ends it wakes what waits for the other end, and a client can let a million
epolls wait there: some 0.1 us each, of the thread that does it. So an account has a little of the loop for packets
that cost much; while that is used up, all links of the account are read, written and ended on threads of their own.
Such jobs of one account are done one after another. So it never keeps more than one thread from the other accounts, and
no job of a link runs beside another of it, or before.

An interrupt, or time that a hypervisor took, looks like such a packet, and nothing tells the two apart at once. But
nobody can make many of them fall into packets of 10 us. So one of them puts nobody aside, and a longer one does so for
as long as it takes the account to pay for it. And what is aside suffers little: a new link is welcomed before anything
else of its account is done.

There may be many accounts, each with a packet that was the first. So all of them together have as little of the loop as
one; once that is used up, links of accounts that are not awaited are handled by threads, too, and by others than those
of the dear ones. What the threads run for an account it pays for: beyond a second it has a sixtieth of a core.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from valved.clients.turns import SECOND_NS, Bucket, Buckets
from valved.machine.helpers import Helpers, Worker

DEAR_NS = 5_000_000  # of a thread's own time; a packet takes some 10 us. Interrupts and collected garbage count, too
THREADS = 4  # for the dear ones, and as many for those that may become dear
MOST_KEPT = 1024
# Of the loop, for dear packets: of each account, and of all together that are not awaited.
LOOP_SHARE, LOOP_BURST_NS = 0.001, 2 * DEAR_NS
LONGEST_NS = 60 * SECOND_NS  # nobody is aside for longer after the last dear packet: a machine may have stood for hours
MOST_OWED_NS = LONGEST_NS * LOOP_SHARE
CORE_SHARE, CORE_BURST_NS = 1 / 60, SECOND_NS  # of a core, for what is done aside for one account

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
        self._dear = Worker(loop, Helpers("valved-dear", THREADS))
        self._others = Worker(loop, Helpers("valved-aside", THREADS))
        self._of_each = Buckets(LOOP_SHARE, LOOP_BURST_NS, MOST_OWED_NS)
        self._of_loop = Bucket(
            share=LOOP_SHARE, burst_ns=LOOP_BURST_NS, left_ns=LOOP_BURST_NS, seen_ns=0, most_owed_ns=MOST_OWED_NS
        )
        self._of_threads = Buckets(CORE_SHARE, CORE_BURST_NS)
        self._waiting: dict[Hashable, _Waiting] = {}
        self._slow: deque[Hashable] = deque(maxlen=MOST_KEPT)  # that was told

    def note(self, account: Hashable, ns: int) -> None:
        """A packet of it took so much, of whatever thread."""
        was_dear = self.has(account)
        self._of_each.took(account, ns, time.monotonic_ns())
        if not was_dear and self.has(account):
            self._told(account, f"a packet took {ns / 1e6:.0f} ms, so its links are handled aside")

    def note_loop(self, account: Hashable, ns: int, *, is_awaited: bool) -> None:
        """That the loop itself has paid."""
        if not is_awaited:
            self._of_loop.take(ns, time.monotonic_ns())
        self.note(account, ns)

    def has(self, account: Hashable) -> bool:
        return self._of_each.wait_ns(account, time.monotonic_ns()) > 0 if self._of_each.of else False

    @property
    def are_many(self) -> bool:
        """No account that is not awaited may cost the loop another such packet now."""
        return bool(self._of_each.of) and self._of_loop.wait_ns(time.monotonic_ns()) > 0

    def do(self, account: Hashable, job: Job, then: Then, *, is_new: bool = False) -> None:
        """Aside, after what the account was given before; `is_new`: of new links alone. `then` on the loop."""
        waiting = self._waiting.get(account)
        if waiting is not None:
            (waiting.new if is_new else waiting.others).append((job, then))
            return
        self._waiting[account] = _Waiting()
        self._begin(account, job, then)

    def _begin(self, account: Hashable, job: Job, then: Then) -> None:
        if wait_ns := self._of_threads.wait_ns(account, time.monotonic_ns()):
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

        threads = self._dear if self.has(account) else self._others
        threads.do(measured, partial(self._done, account, then, ran))

    def _tell_slow(self, account: Hashable) -> None:
        if account not in self._slow:
            self._told(account, "its links kept a thread busy for a second: they have a sixtieth of a core from now on")
            self._slow.append(account)

    def _done(self, account: Hashable, then: Then, ran: list[int], result: Any, error: Exception | None) -> None:
        self._of_threads.took(account, ran[0], time.monotonic_ns())
        if ran[0] > DEAR_NS:
            self.note(account, ran[0])
        waiting = self._waiting[account]
        if line := waiting.new or waiting.others:
            self._begin(account, *line.popleft())
        else:
            del self._waiting[account]
        then(result, error)


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
        accounts = self._accounts
        return self._under_way > 0 or accounts.has(self.account) or (not self.is_awaited and accounts.are_many)

    def took(self, began_ns: int) -> None:
        """By the loop, since time.thread_time_ns() was that."""
        ran_ns = time.thread_time_ns() - began_ns
        if ran_ns > DEAR_NS:
            self._accounts.note_loop(self.account, ran_ns, is_awaited=self.is_awaited)

    def do(self, job: Job, then: Then) -> None:
        """Aside. `then` on the loop."""
        self._under_way += 1

        def done(result: Any, error: Exception | None) -> None:
            self._under_way -= 1
            then(result, error)

        self._accounts.do(self.account, job, done, is_new=self.is_new)
