"""Connections whose HELLO was not read yet: how many one process may have, and whose is read next.

Any process may connect as often as it likes, and the kernel hands connections over in their order. So all that wait are
taken at once, and one that says nothing is a number in an epoll: it is looked at by nobody before its first packet or
its end. What costs time has turns. First come processes that are awaited (awaited.py), by what they belong to. The
others have turns by *account* (accounts.py), then by user, by control group and by process. So whoever floods stands
before another account with one HELLO, however many processes and connections it has. Offline processes of a
predecessor have turns like one account, which owes nothing. All of it has a bounded part of each pass of the loop.
"""

from __future__ import annotations

import asyncio
import select
import time
from collections import deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from valved.clients.accounts import AccountKind, LinkAccount, account_of
from valved.clients.awaited import Awaited
from valved.clients.turns import PASS_NS, Knocks, TurnLine
from valved.machine.callers import Accepted, has_left

if TYPE_CHECKING:
    from valved.clients.server import LinkServer

PENDING_PER_PROCESS = 8  # connections that have not said HELLO yet
PENDING = 512  # of all processes together, but for those that were claimed themselves
LOOKED_AT_ONCE = 16  # about a millisecond
SWEEPS = 4  # in the time that a silent connection has
SWEPT_AT_ONCE = 32
HEARD_AT_ONCE = 2 * PENDING
BEHIND_NS = 50_000_000  # while descriptors of an account pile up that nobody can close, offline links are not read
SILENT_NS = 50_000_000  # a shim speaks at once
EXPECTED = "expected"  # whoever is, has turns like one account
OFTEN = "too many connections at once"
SILENT = "too many silent connections"


@dataclass(slots=True, eq=False)
class LinkCaller:
    """A process with connections that wait: their descriptors, and since when."""

    pid: int
    uid: int
    root: int = 0  # the awaited process to which it belongs
    account: LinkAccount | None = None  # None: it is awaited or expected, or nobody has looked who it is
    groups: tuple[Hashable, ...] = ()
    is_in_line: bool = False
    unread: dict[int, int] = field(default_factory=dict)  # they have said something, in the order in which they did
    silent: dict[int, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.unread) + len(self.silent)

    def place(self, root: int, cgroup: str, *, is_expected: bool) -> None:
        self.root, self.account = root, None
        if root:
            self.groups = (root,)
        elif is_expected:
            self.groups = (EXPECTED,)
        else:
            self.account = account_of(self.uid, cgroup)
            self.groups = (self.account, self.uid, cgroup)

    @property
    def lane_account(self) -> LinkAccount:
        """Whose links are handled aside of the loop with its own (dear.py)."""
        return self.account or LinkAccount(AccountKind.AWAITED, self.root or self.pid)

    @property
    def is_known(self) -> bool:
        """It is awaited itself."""
        return self.root == self.pid


class LinkArrivals:
    def __init__(self, loop: asyncio.AbstractEventLoop, server: LinkServer, awaited: Awaited, hello_s: float) -> None:
        self._loop = loop
        self._server = server
        self._awaited = awaited
        self._hello_s = hello_s
        self._knocks = Knocks()
        self._callers: dict[tuple[int, int], LinkCaller] = {}
        self._caller_of: dict[int, LinkCaller] = {}
        self._ears = select.epoll()  # of those that are silent
        loop.add_reader(self._ears, self._heard)
        self._fresh: deque[LinkCaller] = deque()  # nobody has looked yet who they are
        self._lines: tuple[TurnLine[LinkCaller], TurnLine[LinkCaller]] = (
            TurnLine(),
            TurnLine(),
        )  # of those that are awaited; of the others
        self._aside: set[Hashable] = set()  # accounts of which a HELLO is read aside of the loop: their next waits
        self._wait_ns = 0  # until the next of them may be read
        self._next: asyncio.Handle | None = None
        self._sweep: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._caller_of)

    # They come and go

    def come(self, accepted: Iterable[Accepted]) -> bool:
        """Costs little for each: they may be a flood that stands before somebody else's. Whether there was room for
        all."""
        known, refused = self._awaited.pids(), dict[LinkCaller, list[int]]()
        replaced: dict[LinkCaller, list[int]] = {}
        for one in accepted:
            caller = self._callers.get((one.pid, one.uid))
            if caller is None:
                caller = self._begin(one, known)
            may = len(caller) < PENDING_PER_PROCESS or (caller not in refused and self._make_room(caller, replaced))
            if may:
                self._listen_to(caller, one.fd)
            else:
                refused.setdefault(caller, []).append(one.fd)
        self._turn_away(replaced, SILENT)
        self._turn_away(refused, OFTEN)
        self._hear()
        self._thin_out()
        if self._callers and self._sweep is None:
            self._sweep = self._loop.call_later(self._hello_s / SWEEPS, self._drop_old)
        self._serve()
        return not refused

    def took(self, caller: LinkCaller, ns: int) -> None:
        """`ns`: of a core. That the machine is busy is nobody's debt."""
        self._knocks.took(caller.pid, caller.account, ns, time.monotonic_ns())

    def goes_aside(self, account: Hashable) -> None:
        """One HELLO of an account at a time. What waits for a thread is bounded nowhere else."""
        self._aside.add(account)

    def is_back(self, account: Hashable) -> None:
        self._aside.discard(account)
        self._serve_soon()

    def close(self) -> None:
        for timer in filter(None, (self._next, self._sweep)):
            timer.cancel()
        self._let_go({caller: [*caller.silent, *caller.unread] for caller in self._callers.values()})
        self._loop.remove_reader(self._ears)
        self._ears.close()

    def _listen_to(self, caller: LinkCaller, fd: int) -> None:
        try:
            self._ears.register(fd, select.EPOLLIN | select.EPOLLONESHOT)
        except OSError:  # the kernel has no room for it
            self._server.cannot_hear()
            self._server.turn_away(caller, [fd], "")
            return
        self._callers[caller.pid, caller.uid] = caller
        self._caller_of[fd] = caller
        caller.silent[fd] = time.monotonic_ns()

    def _make_room(self, caller: LinkCaller, replaced: dict[LinkCaller, list[int]]) -> bool:
        """By the oldest, if it has said nothing for a while. To turn the new one away is cheaper."""
        oldest, since_ns = next(iter(caller.silent.items()), (0, None))
        if since_ns is None or since_ns > time.monotonic_ns() - SILENT_NS:
            return False
        self._hear()  # it may have spoken by now
        if oldest in caller.silent:
            replaced.setdefault(caller, []).append(oldest)
            self._forget(caller, oldest)
        return len(caller) < PENDING_PER_PROCESS

    def _begin(self, one: Accepted, known: set[int]) -> LinkCaller:
        caller = LinkCaller(one.pid, one.uid)
        if one.pid in known:
            caller.place(one.pid, "", is_expected=False)
        elif one.pid in self._awaited.expected:
            caller.place(0, "", is_expected=True)
        return caller

    def _forget(self, caller: LinkCaller, fd: int) -> None:
        """It waits no more, and its descriptor is somebody else's business from here on."""
        self._ears.unregister(fd)
        del self._caller_of[fd]
        caller.silent.pop(fd, None)
        caller.unread.pop(fd, None)
        if not len(caller):
            self._callers.pop((caller.pid, caller.uid), None)

    def _let_go(self, of: dict[LinkCaller, list[int]], why: str = "") -> None:
        for caller, fds in of.items():
            for fd in fds:
                self._forget(caller, fd)
        self._turn_away(of, why)

    def _turn_away(self, of: dict[LinkCaller, list[int]], why: str) -> None:
        for caller, fds in of.items():
            if fds:
                self._server.turn_away(caller, fds, why)

    def _thin_out(self) -> None:
        """Those of which there are most make room, and the oldest of them first."""
        if len(self) <= PENDING:
            return
        others = {caller: [*caller.silent, *caller.unread] for caller in self._callers.values() if not caller.is_known}
        excess = sum(map(len, others.values())) - PENDING
        leaving: dict[LinkCaller, list[int]] = {}
        for size in range(max(map(len, others.values()), default=0), 0, -1):
            for caller, fds in others.items():
                if excess > 0 and len(fds) >= size:
                    leaving.setdefault(caller, []).append(fds.pop(0))
                    excess -= 1
        self._let_go(leaving, OFTEN)

    def _drop_old(self) -> None:
        before_ns = time.monotonic_ns() - round(self._hello_s * 1e9)
        left = SWEPT_AT_ONCE
        old: dict[LinkCaller, list[int]] = {}
        for caller in self._callers.values():
            waiting = (*caller.silent.items(), *caller.unread.items())
            if left > 0 and (fds := [fd for fd, since_ns in waiting if since_ns <= before_ns]):
                old[caller] = fds
                left -= len(fds)
        self._let_go(old)
        again_s = 0.0 if left <= 0 else self._hello_s / SWEEPS
        self._sweep = self._loop.call_later(again_s, self._drop_old) if self._callers else None

    # Their turns

    def _hear(self) -> None:
        """Who has spoken gets in line, and who is gone is let go."""
        gone: dict[LinkCaller, list[int]] = {}
        for fd, event in self._ears.poll(0, HEARD_AT_ONCE):
            caller = self._caller_of[fd]
            if event & (select.EPOLLHUP | select.EPOLLERR):
                gone.setdefault(caller, []).append(fd)
            else:
                caller.unread[fd] = caller.silent.pop(fd)
                self._line_up(caller)
        self._let_go(gone)

    def _heard(self) -> None:
        self._hear()
        self._serve_soon()

    def _serve_soon(self) -> None:
        if self._next is None or isinstance(self._next, asyncio.TimerHandle):
            if self._next is not None:
                self._next.cancel()
            self._next = self._loop.call_soon(self._serve)

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
        self._next, self._wait_ns = None, 0
        until_ns = time.monotonic_ns() + PASS_NS
        has_more = True  # if one of them fails, the others have their turns all the same
        try:
            self._look()
            has_more = any([*(self._serve_line(line, until_ns) for line in self._lines), self._fresh])
        finally:
            if has_more:
                self._next = self._loop.call_soon(self._serve)
            elif self._wait_ns:
                self._next = self._loop.call_later(self._wait_ns / 1e9, self._serve)

    def _look(self) -> None:
        """Find out who some of them are, by up to five files each."""
        known = self._awaited.pids() if self._fresh else set()
        left = LOOKED_AT_ONCE
        while left and self._fresh:
            caller = self._fresh.popleft()
            caller.is_in_line = False
            if not caller.unread:  # it is gone: more may go in one pass than are looked at
                continue
            left -= 1
            cgroup = self._awaited.cgroup(caller.pid)
            root = self._awaited.root_of(caller.pid, cgroup, known)
            caller.place(root, cgroup, is_expected=caller.pid in self._awaited.expected)
            self._line_up(caller)

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
        if caller.lane_account in self._aside:
            return False
        wait_ns = self._knocks.wait_ns(caller.pid, caller.account, time.monotonic_ns())
        if caller.account is not None and self._server.closer.is_behind_with(caller.account):
            wait_ns = max(wait_ns, BEHIND_NS)  # the sockets of links that end would pile up, too
        if wait_ns and (not self._wait_ns or wait_ns < self._wait_ns):
            self._wait_ns = wait_ns
        return not wait_ns

    def _read(self, caller: LinkCaller) -> None:
        """The oldest. A HELLO that waited for long may be nobody's by now, and costs far more than to see that."""
        fd = next(iter(caller.unread))
        if has_left(fd):
            self._let_go({caller: [fd]})
            return
        self._forget(caller, fd)
        began_ns, is_online = time.thread_time_ns(), False
        try:
            is_online = self._server.read_hello(fd, caller)
        finally:
            if not is_online:
                self.took(caller, time.thread_time_ns() - began_ns)
            if caller.groups == (EXPECTED,):
                self._awaited.came(caller.pid)
                caller.groups = ()  # what it says next has a turn like any other: nobody has looked who it is
