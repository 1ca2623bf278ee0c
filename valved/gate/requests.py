"""How often was one request of an engine preempted? Counted from nothing but started and ended totals.

The engine says how many requests it started and ended, not which. A preemption hits every request open at that
moment. Ends are taken from the youngest open request, so the oldest one collects all preemptions: the maximum that
comes out is never below the true one, which is what a promise of "at most one" needs.
"""

from __future__ import annotations

from collections.abc import Iterable

BUCKETS = 8  # the last one means "7 or more"
MOST_RUNS = 256  # requests that were never ended would else be kept for ever, each by itself


class RequestTally:
    def __init__(self) -> None:
        self.histogram = [0] * BUCKETS  # ended requests by preemptions
        self.most = 0
        self.ended = 0
        self._open: list[list[int]] = []  # runs of [preemptions at start, how many started then], oldest first
        self._preemptions = 0
        self._unclaimed = 0  # preemptions that a request may have met which is not reported yet
        self._seen_started = 0
        self._seen_ended = 0

    @classmethod
    def resumed(cls, started: int, ended: int, open_: Iterable[tuple[int, int]]) -> RequestTally:
        """Of a process that another object counted before; `open_` as `open_hits` gave it."""
        tally = cls()
        tally._seen_started, tally._seen_ended = started, ended
        tally._open = [[-hits, count] for hits, count in open_]
        return tally

    def absorb(self, other: RequestTally) -> None:
        """Of a process that counts no more."""
        self.histogram = [mine + its for mine, its in zip(self.histogram, other.histogram, strict=True)]
        self.most, self.ended = max(self.most, other.most), self.ended + other.ended

    @property
    def is_heard(self) -> bool:
        return self._seen_started > 0

    @property
    def seen(self) -> tuple[int, int]:
        """Started and ended, as last reported."""
        return self._seen_started, self._seen_ended

    def open_hits(self) -> list[tuple[int, int]]:
        """(preemptions so far, how many requests), oldest first."""
        return [(self._preemptions - base, count) for base, count in self._open]

    def preempted(self) -> None:
        """A preemption; it is not known which requests began since the last report."""
        self._preemptions += 1
        self._unclaimed += 1
        if self._open:
            self.most = max(self.most, self._preemptions - self._open[0][0])

    def woken(self) -> None:
        """Offline runs again: a preemption that no request claimed by now belonged to none (a warm-up, a probe)."""
        self._unclaimed = 0

    def report(self, started: int, ended: int) -> None:
        """Totals from the engine. They are a client's claim: totals that fall or end more than started are ignored."""
        if not self._is_sound(started, ended):
            return
        self._begin(started)
        done, self._seen_ended = ended - self._seen_ended, ended
        self._finish(done)

    def preempted_amid(self, started: int, ended: int) -> None:
        """A preemption, and the totals read after it. A request that started and ended since the last look may have
        been open when it came: it counts as hit, because a promise of "at most" must not be helped by looking late."""
        if self._is_sound(started, ended):
            self._begin(started)
        self.preempted()
        self.report(started, ended)

    def _is_sound(self, started: int, ended: int) -> bool:
        return ended <= started and started >= self._seen_started and ended >= self._seen_ended

    def _begin(self, started: int) -> None:
        begun, self._seen_started = started - self._seen_started, started
        if begun:
            self._open_run(self._preemptions - self._unclaimed, begun)
            self.most = max(self.most, self._unclaimed)
        if self._open:
            self._unclaimed = 0  # theirs: a request that begins from here on was not there

    def _open_run(self, base: int, count: int) -> None:
        if self._open and self._open[-1][0] == base:
            self._open[-1][1] += count
            return
        self._open.append([base, count])
        if len(self._open) > MOST_RUNS:  # the older of two: never fewer preemptions than were met
            self._open[0][1] += self._open.pop(1)[1]

    def _finish(self, done: int) -> None:
        self.ended += done
        while done and self._open:
            run = self._open[-1]
            part = min(done, run[1])
            self.histogram[min(self._preemptions - run[0], BUCKETS - 1)] += part
            run[1] -= part
            done -= part
            if not run[1]:
                self._open.pop()
