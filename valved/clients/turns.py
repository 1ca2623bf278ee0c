"""How much of the loop one peer may have, in time, whatever its messages are.

Each process that is not online has a bucket of time, and all of them share another. Handling a message takes out what
it took; an empty bucket means that the peer is not read until it has filled again. Nothing is lost or reordered.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

SECOND_NS = 1_000_000_000
SHARE = 0.1  # of the loop, for one process, when it goes on and on
SHARE_OF_ALL = 0.3  # for all processes together that are not online
BURST_NS = 200_000_000  # a process with eight GPUs tells of its channels within this
BURST_OF_ALL_NS = 500_000_000


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
class Turns:
    _each: dict[Hashable, Bucket] = field(default_factory=dict)
    _all: Bucket | None = None

    def wait_ns(self, who: Hashable, now_ns: int) -> int:
        """0: it may be read now."""
        mine = self._each.get(who)
        own_ns = mine.wait_ns(now_ns) if mine is not None else 0
        return max(own_ns, self._all.wait_ns(now_ns) if self._all is not None else 0)

    def took(self, who: Hashable, ns: int, now_ns: int) -> None:
        self._bucket(who, now_ns).take(ns, now_ns)
        if self._all is None:
            self._all = _full(SHARE_OF_ALL, BURST_OF_ALL_NS, now_ns)
        self._all.take(ns, now_ns)

    def _bucket(self, who: Hashable, now_ns: int) -> Bucket:
        found = self._each.get(who)
        if found is None:
            if len(self._each) > 4096:  # one that is full says no more than none
                self._each = {key: bucket for key, bucket in self._each.items() if not bucket.is_full(now_ns)}
            found = self._each[who] = _full(SHARE, BURST_NS, now_ns)
        return found


def _full(share: float, burst_ns: int, now_ns: int) -> Bucket:
    return Bucket(share=share, burst_ns=burst_ns, left_ns=burst_ns, seen_ns=now_ns)
