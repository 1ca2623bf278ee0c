"""Connections whose HELLO was not read yet: how many one process may have, and whose is read next.

Any process may connect as often as it likes, and the kernel hands connections over in their order. So all that wait are
taken at once, cheaply, and what costs time has turns. First come processes that are awaited (awaited.py), by what they
belong to. The others have turns by *account*, then by control group, then by process: the account of a process is its
user, or for root, which is in every container, its control group. So whoever floods stands before another account with
one HELLO, however many processes and connections it has. All of it has a bounded part of each pass of the loop.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from valved.clients.awaited import Awaited
from valved.clients.turns import PASS_NS, Knocks, TurnLine
from valved.machine.callers import Accepted

if TYPE_CHECKING:
    from valved.clients.connection import LinkConnection
    from valved.clients.server import LinkServer

PENDING_PER_PROCESS = 8  # connections that have not said HELLO yet
PENDING = 512  # of all processes together, but for those that were claimed themselves
LOOKED_AT_ONCE = 16  # about a millisecond
SWEEPS = 4  # in the time that a silent connection has
SWEPT_AT_ONCE = 32
OFTEN = "too many connections at once"
SILENT = "too many silent connections"


@dataclass(slots=True, eq=False)
class LinkCaller:
    """A process with connections that wait."""

    pid: int
    uid: int
    root: int = 0  # the awaited process to which it belongs
    account: Hashable | None = None  # None: it is awaited, or nobody has looked who it is
    groups: tuple[Hashable, ...] = ()
    is_in_line: bool = False
    unread: deque[LinkConnection] = field(default_factory=deque)  # what they have to say may be there
    silent: dict[LinkConnection, None] = field(default_factory=dict)  # it was not

    def __len__(self) -> int:
        return len(self.unread) + len(self.silent)


class LinkArrivals:
    def __init__(self, loop: asyncio.AbstractEventLoop, server: LinkServer, awaited: Awaited, hello_s: float) -> None:
        self._loop = loop
        self._server = server
        self._awaited = awaited
        self._hello_s = hello_s
        self._knocks = Knocks()
        self._callers: dict[tuple[int, int], LinkCaller] = {}
        self._fresh: deque[LinkCaller] = deque()  # nobody has looked yet who they are
        self._lines: tuple[TurnLine[LinkCaller], TurnLine[LinkCaller]] = (
            TurnLine(),
            TurnLine(),
        )  # of those that are awaited; of the others
        self._wait_ns = 0  # until the next of them may be read
        self._next: asyncio.Handle | None = None
        self._sweep: asyncio.TimerHandle | None = None

    # They come and go

    def come(self, accepted: Iterable[Accepted]) -> bool:
        """Costs little for each: they may be a flood that stands before somebody else's. Whether there was room for
        all."""
        known = self._awaited.pids()
        refused: dict[LinkCaller, list[Accepted]] = {}
        for one in accepted:
            caller = self._callers.get((one.pid, one.uid))
            if caller is None:
                caller = self._begin(one, known)
            is_full = len(caller) >= PENDING_PER_PROCESS
            if is_full and (caller in refused or not self._make_room(caller)):
                refused.setdefault(caller, []).append(one)
                continue
            caller.unread.append(self._server.admit(one, caller))
            self._line_up(caller)
        for rejected in refused.values():
            self._server.turn_away(rejected, OFTEN)
        self._thin_out()
        if self._callers and self._sweep is None:
            self._sweep = self._loop.call_later(self._hello_s / SWEEPS, self._drop_silent)
        self._serve()
        return not refused

    def forget(self, peer: LinkConnection) -> None:
        """It has said HELLO, or is closed."""
        caller = peer.caller
        caller.silent.pop(peer, None)
        if peer in caller.unread:
            caller.unread.remove(peer)
        if not len(caller) and self._callers.get((caller.pid, caller.uid)) is caller:
            del self._callers[caller.pid, caller.uid]

    def took(self, caller: LinkCaller, ns: int) -> None:
        """`ns`: of a core. That the machine is busy is nobody's debt."""
        self._knocks.took(caller.pid, caller.account, ns, time.monotonic_ns())

    def close(self) -> None:
        for timer in filter(None, (self._next, self._sweep)):
            timer.cancel()

    def _make_room(self, caller: LinkCaller) -> bool:
        """By the oldest that said nothing. Not for a process that has had its time: to turn it away is cheaper."""
        if not caller.silent or self._knocks.wait_ns(caller.pid, caller.account, time.monotonic_ns()):
            return False
        began_ns = time.thread_time_ns()
        self._server.drop(next(iter(caller.silent)), SILENT, is_wrong=True)
        self.took(caller, time.thread_time_ns() - began_ns)
        return True

    def _begin(self, one: Accepted, known: set[int]) -> LinkCaller:
        caller = LinkCaller(one.pid, one.uid)
        if one.pid in known:
            self._place(caller, one.pid, "")
        self._callers[one.pid, one.uid] = caller
        return caller

    def _place(self, caller: LinkCaller, root: int, cgroup: str) -> None:
        if root:
            caller.root, caller.groups = root, (root,)
        else:
            caller.account = caller.uid or ("root", cgroup)
            caller.groups = (caller.account, cgroup)

    def _thin_out(self) -> None:
        """Those of which there are most make room, and the oldest of them first."""
        others = [caller for caller in self._callers.values() if caller.root != caller.pid]
        excess = sum(map(len, others)) - PENDING
        if excess <= 0:
            return
        most = max(map(len, others))
        for size in range(most, 0, -1):
            for caller in others:
                if excess > 0 and len(caller) >= size:
                    self._server.drop(next(iter(caller.silent), None) or caller.unread[0], OFTEN, is_wrong=True)
                    excess -= 1

    def _drop_silent(self) -> None:
        before_ns = time.monotonic_ns() - round(self._hello_s * 1e9)
        old = [peer for caller in self._callers.values() for peer in (*caller.silent, *caller.unread)]
        old = [peer for peer in old if peer.since_ns <= before_ns]
        for peer in old[:SWEPT_AT_ONCE]:
            self._server.drop(peer, "no HELLO", is_wrong=False)
        again_s = 0.0 if len(old) > SWEPT_AT_ONCE else self._hello_s / SWEEPS
        self._sweep = self._loop.call_later(again_s, self._drop_silent) if self._callers else None

    # Their turns

    def _line_up(self, caller: LinkCaller) -> None:
        if caller.is_in_line or not caller.unread:
            return
        caller.is_in_line = True
        if caller.groups:
            self._lines[not caller.root].put(caller.groups, caller)
        else:
            self._fresh.append(caller)

    def _serve(self) -> None:
        """At least one of each kind, so that none keeps the others waiting for ever."""
        if self._next is not None:
            self._next.cancel()
        self._next = None
        self._wait_ns = 0
        until_ns = time.monotonic_ns() + PASS_NS
        has_more = True  # if one of them fails, the others have their turns all the same
        try:
            has_more = any([self._look(), *(self._serve_line(line, until_ns) for line in self._lines)])
        finally:
            if has_more:
                self._next = self._loop.call_soon(self._serve)
            elif self._wait_ns:
                self._next = self._loop.call_later(self._wait_ns / 1e9, self._serve)

    def _look(self) -> bool:
        """Find out who some of them are, by up to five files each. Whether others are left."""
        known = self._awaited.pids() if self._fresh else set()
        for caller in [self._fresh.popleft() for _ in range(min(LOOKED_AT_ONCE, len(self._fresh)))]:
            caller.is_in_line = False
            if not caller.unread:
                continue
            cgroup = self._awaited.cgroup(caller.pid)
            self._place(caller, self._awaited.root_of(caller.pid, cgroup, known), cgroup)
            self._line_up(caller)
        return bool(self._fresh)

    def _serve_line(self, line: TurnLine[LinkCaller], until_ns: int) -> bool:
        """Whether there may be one that could be read now."""
        while (caller := line.take(self._may)) is not None:
            caller.is_in_line = False
            if caller.unread:
                try:
                    self._read(caller)
                finally:  # its others have their turns, whatever becomes of this one
                    self._line_up(caller)
                if time.monotonic_ns() > until_ns:
                    return bool(line)
        return False

    def _may(self, caller: LinkCaller) -> bool:
        if not caller.unread:  # all were dropped: it leaves the line
            return True
        wait_ns = self._knocks.wait_ns(caller.pid, caller.account, time.monotonic_ns())
        if wait_ns and (not self._wait_ns or wait_ns < self._wait_ns):
            self._wait_ns = wait_ns
        return not wait_ns

    def _read(self, caller: LinkCaller) -> None:
        peer = caller.unread[0]
        began_ns, has_spoken = time.thread_time_ns(), True
        try:
            has_spoken = self._server.read_hello(peer)
        finally:
            if not peer.is_online and (has_spoken or not caller.root):
                self.took(caller, time.thread_time_ns() - began_ns)
        if not has_spoken and peer.is_open:
            caller.unread.popleft()
            caller.silent[peer] = None
            self._loop.add_reader(peer.fileno(), self._heard, peer)

    def _heard(self, peer: LinkConnection) -> None:
        caller = peer.caller
        self._loop.remove_reader(peer.fileno())
        del caller.silent[peer]
        caller.unread.append(peer)
        self._line_up(caller)
        if self._next is None or isinstance(self._next, asyncio.TimerHandle):
            if self._next is not None:
                self._next.cancel()
            self._next = self._loop.call_soon(self._serve)
