"""How much of the loop one peer may have, in time, whatever its messages are.

Each process that is not online has a bucket of time, and all of them share another. Handling a message takes out what
it took; an empty bucket means that the peer is not read until it has filled again. Nothing is lost or reordered. What
is said before a welcome has buckets of its own: one for each process, and one for each user.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

SECOND_NS = 1_000_000_000
SHARE = 0.1  # of the loop, for one process, when it goes on and on
SHARE_OF_ALL = 0.3  # for all processes together that are not online
BURST_NS = 200_000_000  # a process with eight GPUs tells of its channels within this
BURST_OF_ALL_NS = 500_000_000
# A HELLO costs 0.2 to 2 ms: it reads the files of each ancestor. Any user may knock, and an online process that comes
# meanwhile waits for what is handled before it.
KNOCKS_SHARE, KNOCKS_BURST_NS = 0.05, 10_000_000
USER_SHARE, USER_BURST_NS = 0.1, 100_000_000
MOST_KEPT = 4096


@dataclass(slots=True, kw_only=True)
class Bucket:
    share: float
    burst_ns: float
    left_ns: float
    seen_ns: int

    def wait_ns(self, now_ns: int) -> int:
        """How long until there is something in it."""
        self._fill(now_ns)
        return 0 if self.left_ns > 0 else round(-self.left_ns / self.share) + 1_000_000

    def take(self, ns: int, now_ns: int) -> None:
        self._fill(now_ns)
        self.left_ns -= ns

    def is_full(self, now_ns: int) -> bool:
        self._fill(now_ns)
        return self.left_ns >= self.burst_ns

    def _fill(self, now_ns: int) -> None:
        self.left_ns = min(self.burst_ns, self.left_ns + (now_ns - self.seen_ns) * self.share)
        self.seen_ns = now_ns


@dataclass(slots=True)
class Buckets:
    """One for each that took anything."""

    share: float
    burst_ns: float
    of: dict[Hashable, Bucket] = field(default_factory=dict)

    def wait_ns(self, who: Hashable, now_ns: int) -> int:
        """0: it may be read now."""
        mine = self.of.get(who)
        return mine.wait_ns(now_ns) if mine is not None else 0

    def took(self, who: Hashable, ns: int, now_ns: int) -> None:
        if who not in self.of:
            if len(self.of) > MOST_KEPT:  # one that is full says no more than none
                self.of = {key: bucket for key, bucket in self.of.items() if not bucket.is_full(now_ns)}
            self.of[who] = _full(self.share, self.burst_ns, now_ns)
        self.of[who].take(ns, now_ns)


@dataclass(slots=True)
class Turns:
    _each: Buckets = field(default_factory=lambda: Buckets(SHARE, BURST_NS))
    _all: Bucket | None = None

    def wait_ns(self, who: Hashable, now_ns: int) -> int:
        """0: it may be read now."""
        return max(self._each.wait_ns(who, now_ns), self._all.wait_ns(now_ns) if self._all is not None else 0)

    def took(self, who: Hashable, ns: int, now_ns: int) -> None:
        self._each.took(who, ns, now_ns)
        if self._all is None:
            self._all = _full(SHARE_OF_ALL, BURST_OF_ALL_NS, now_ns)
        self._all.take(ns, now_ns)


@dataclass(slots=True)
class Knocks:
    """Of peers before their welcome, and of those that leave. Root has no account: it is in every container. One of
    either takes no more than a process has: a goodbye costs more only for channels, which were paid for as they came,
    and for a driver that is busy, which keeps nobody out."""

    _processes: Buckets = field(default_factory=lambda: Buckets(KNOCKS_SHARE, KNOCKS_BURST_NS))
    _users: Buckets = field(default_factory=lambda: Buckets(USER_SHARE, USER_BURST_NS))

    def wait_ns(self, pid: int, uid: int, now_ns: int, is_awaited: Callable[[int], bool]) -> int:
        """`is_awaited`: whether a process need not wait for what others of its user took."""
        of_user_ns = self._users.wait_ns(uid, now_ns) if uid else 0
        own_ns = self._processes.wait_ns(pid, now_ns)
        return own_ns if of_user_ns <= own_ns or is_awaited(pid) else of_user_ns

    def took(self, pid: int, uid: int, ns: int, now_ns: int) -> None:
        ns = min(ns, KNOCKS_BURST_NS)
        self._processes.took(pid, ns, now_ns)
        if uid:
            self._users.took(uid, ns, now_ns)


def _full(share: float, burst_ns: float, now_ns: int) -> Bucket:
    return Bucket(share=share, burst_ns=burst_ns, left_ns=burst_ns, seen_ns=now_ns)
