"""How much of the loop one peer may have, in time, whatever its messages are, and in which order peers have theirs.

Each process has a bucket of time, and all that are not online share another. To read and handle a message takes out
what it took; an empty bucket means that the peer is not read until it has filled again. Nothing is lost or reordered.
Free are answers to orders of valved, each of which has one, and what clients have to tell again (connection.py). While
valved awaits such an answer, the peer is read a little all the same: a service may wait for that answer. What is said
before a welcome has buckets of its own: one for each process, and one for each account (arrivals.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from valved.machine.clock import Clock

SECOND_NS = 1_000_000_000
LONGEST_NS = 60 * SECOND_NS  # nobody owes for longer after the last packet: a machine may have stood for hours
SHARE = 0.1  # of the loop, for one process, when it goes on and on
SHARE_OF_ALL = 0.3  # for all processes together that are not online
BURST_NS = 200_000_000  # a process with eight GPUs tells of its channels within this
BURST_OF_ALL_NS = 500_000_000
# For one online process: far more than it ever needs, and less than would keep others waiting.
SERVICE_SHARE, SERVICE_BURST_NS = 0.3, 500_000_000
AWAITED_BURST_NS = 2_000_000  # for one that owes an answer, and the share of any other
# A HELLO costs 0.2 to 2 ms: it reads the files of each ancestor. Any user may knock.
KNOCKS_SHARE, KNOCKS_BURST_NS = 0.05, 10_000_000
ACCOUNT_SHARE, ACCOUNT_BURST_NS = 0.1, 100_000_000
MOST_KEPT = 4096
# What strangers cause has so much of one pass of the loop, and one job more: a HELLO that comes meanwhile waits for it.
PASS_NS = 2_000_000


@dataclass(slots=True, kw_only=True)
class Bucket:
    share: float
    burst_ns: float
    left_ns: float
    seen_ns: int
    most_owed_ns: float = float("inf")

    def wait_ns(self, now_ns: int) -> int:
        """How long until there is something in it."""
        if self.left_ns <= 0:  # else time only adds to it
            self._fill(now_ns)
        return 0 if self.left_ns > 0 else round(-self.left_ns / self.share) + 1_000_000

    def take(self, ns: int, now_ns: int) -> None:
        self._fill(now_ns)
        self.left_ns = max(self.left_ns - ns, -self.most_owed_ns)

    def taken_ns(self, now_ns: int) -> float:
        self._fill(now_ns)
        return self.burst_ns - self.left_ns

    def _fill(self, now_ns: int) -> None:
        self.left_ns = min(self.burst_ns, self.left_ns + (now_ns - self.seen_ns) * self.share)
        self.seen_ns = now_ns


@dataclass(slots=True)
class Buckets:
    """One for each that took anything."""

    share: float
    burst_ns: float
    most_owed_ns: float = float("inf")
    of: dict[Hashable, Bucket] = field(default_factory=dict)
    most: int = MOST_KEPT  # beyond these the full ones are dropped

    def wait_ns(self, who: Hashable, now_ns: int) -> int:
        """0: it may be read now."""
        mine = self.of.get(who)
        return mine.wait_ns(now_ns) if mine is not None else 0

    def taken_ns(self, who: Hashable, now_ns: int) -> float:
        """And not filled again since."""
        mine = self.of.get(who)
        return mine.taken_ns(now_ns) if mine is not None else 0.0

    def took(self, who: Hashable, ns: int, now_ns: int) -> None:
        if who not in self.of:
            if len(self.of) > self.most:  # one that is full says no more than none
                self.of = {key: bucket for key, bucket in self.of.items() if bucket.taken_ns(now_ns) > 0}
                self.most = max(MOST_KEPT, 2 * len(self.of))  # else each new one would cost a look at all
            self.of[who] = _full(self.share, self.burst_ns, now_ns)
            self.of[who].most_owed_ns = self.most_owed_ns
        self.of[who].take(ns, now_ns)


@dataclass(slots=True)
class Turns:
    _each: Buckets = field(default_factory=lambda: Buckets(SHARE, BURST_NS, LONGEST_NS * SHARE))
    _services: Buckets = field(default_factory=lambda: Buckets(SERVICE_SHARE, SERVICE_BURST_NS))
    _awaited: Buckets = field(default_factory=lambda: Buckets(SHARE, AWAITED_BURST_NS, LONGEST_NS * SHARE))
    # True: what those that owe answers have in common, once all have used up theirs
    _all: Buckets = field(default_factory=lambda: Buckets(SHARE_OF_ALL, BURST_OF_ALL_NS, LONGEST_NS * SHARE_OF_ALL))

    def wait_ns(self, who: Hashable, now_ns: int, *, is_online: bool = False, is_awaited: bool = False) -> int:
        """0: it may be read now. `is_awaited`: it owes an answer, and need not wait for what others took."""
        own_ns = self.own_wait_ns(who, now_ns, is_online=is_online, is_awaited=is_awaited)
        return own_ns if is_online else max(own_ns, self.common_wait_ns(now_ns, is_awaited=is_awaited))

    def own_wait_ns(self, who: Hashable, now_ns: int, *, is_online: bool = False, is_awaited: bool = False) -> int:
        """Without what it has in common with others."""
        wait_ns = (self._services if is_online else self._each).wait_ns(who, now_ns)
        return min(wait_ns, self._awaited.wait_ns(who, now_ns)) if wait_ns and is_awaited else wait_ns

    def common_wait_ns(self, now_ns: int, *, is_awaited: bool) -> int:
        wait_ns = self._all.wait_ns(False, now_ns)
        return min(wait_ns, self._all.wait_ns(True, now_ns)) if wait_ns and is_awaited else wait_ns

    def took(self, who: Hashable, ns: int, now_ns: int, *, is_online: bool = False, is_awaited: bool = False) -> None:
        if is_awaited:
            self._awaited.took(who, ns, now_ns)
        if is_online:
            self._services.took(who, ns, now_ns)
            return
        self._each.took(who, ns, now_ns)
        # The one that owes less: a read takes more than is left, and neither may owe without end.
        self._all.took(min((False, is_awaited), key=lambda key: self._all.wait_ns(key, now_ns)), ns, now_ns)


@dataclass(slots=True)
class Knocks:
    """Of peers before their welcome, and of those that leave. One of either takes no more than a process has: a goodbye
    costs more only for channels, which were paid for as they came, and for a driver that is busy, which keeps nobody
    out."""

    _processes: Buckets = field(default_factory=lambda: Buckets(KNOCKS_SHARE, KNOCKS_BURST_NS))
    _accounts: Buckets = field(default_factory=lambda: Buckets(ACCOUNT_SHARE, ACCOUNT_BURST_NS))

    def wait_ns(self, pid: int, account: Hashable | None, now_ns: int) -> int:
        """`account` None: the process need not wait for what others took."""
        of_account_ns = self._accounts.wait_ns(account, now_ns) if account is not None else 0
        return max(of_account_ns, self._processes.wait_ns(pid, now_ns))

    def took(self, pid: int, account: Hashable | None, ns: int, now_ns: int) -> None:
        ns = min(ns, KNOCKS_BURST_NS)
        self._processes.took(pid, ns, now_ns)
        if account is not None:
            self._accounts.took(account, ns, now_ns)


T = TypeVar("T")


class TurnLine(Generic[T]):
    """Items of groups within groups. A group's next turn comes after one of every other beside it."""

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._groups: dict[Hashable, TurnLine[T]] = {}  # the first has the next turn

    def __bool__(self) -> bool:
        return bool(self._items or self._groups)

    def put(self, groups: Sequence[Hashable], item: T) -> None:
        if not groups:
            self._items.append(item)
            return
        if groups[0] not in self._groups:
            self._groups[groups[0]] = TurnLine()
        self._groups[groups[0]].put(groups[1:], item)

    def take(self, may: Callable[[T], bool] = lambda _: True) -> T | None:
        """The next that may be taken now. The others keep their turns."""
        for at, item in enumerate(self._items):
            if may(item):
                del self._items[at]
                return item
        for key in list(self._groups):
            found = (group := self._groups[key]).take(may)
            if found is None:
                continue
            del self._groups[key]
            if group:
                self._groups[key] = group  # behind the others
            return found
        return None


class Postponed:
    """Jobs that strangers cause: done at once while this pass of the loop has time for them, else in later passes, one
    of each account in turn, and of each process in it."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._line: TurnLine[Callable[[], object]] = TurnLine()
        self._direct = _full(0.5, PASS_NS, clock.now_ns())
        self._once: set[Hashable] = set()

    def has_time(self) -> bool:
        """Whether the next job is done at once."""
        return not self._line and not self._direct.wait_ns(self._clock.now_ns())

    def do(self, who: Sequence[Hashable], job: Callable[[], object]) -> None:
        if not self.do_now(job):
            self.put(who, job)

    def do_now(self, job: Callable[[], object]) -> bool:
        """Whether this pass had time for it."""
        now_ns = self._clock.now_ns()
        if self._line or self._direct.wait_ns(now_ns):
            return False
        try:
            job()
        finally:
            done_ns = self._clock.now_ns()
            self._direct.take(done_ns - now_ns, done_ns)
        return True

    def put(self, who: Sequence[Hashable], job: Callable[[], object]) -> None:
        """For a later pass."""
        if not self._line:
            self._clock.call_at_ns(self._clock.now_ns(), self._go_on)
        self._line.put(who, job)

    def do_once(self, key: Hashable, who: Sequence[Hashable], job: Callable[[], object]) -> None:
        """Not again while it waits. One that fails may be asked for again."""
        if key in self._once:
            return

        def run() -> None:
            self._once.discard(key)
            job()

        self._once.add(key)
        self.do(who, run)

    def _go_on(self) -> None:
        until_ns = self._clock.now_ns() + PASS_NS
        try:
            while (job := self._line.take()) is not None:
                job()
                if self._clock.now_ns() >= until_ns:
                    break
        finally:  # also if one failed
            if self._line:
                self._clock.call_at_ns(self._clock.now_ns(), self._go_on)


def _full(share: float, burst_ns: float, now_ns: int) -> Bucket:
    return Bucket(share=share, burst_ns=burst_ns, left_ns=burst_ns, seen_ns=now_ns)
