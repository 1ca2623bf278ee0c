"""Watches how long each core of this machine kept a thread waiting that was due: what no program on it can help."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

PERIOD_NS = 5_000_000
LATE_NS = 2 * PERIOD_NS  # one turn of another task is no stall

Span = tuple[int, int]
"""Begin and end, CLOCK_MONOTONIC ns."""


def outside(spans: Iterable[Span], holes: Iterable[Span]) -> list[Span]:
    """What is left of the spans without the holes."""
    left = list(spans)
    for begin, end in holes:
        left = [
            part
            for first, last in left
            for part in ((first, min(last, begin)), (max(first, end), last))
            if part[0] < part[1]
        ]
    return left


@dataclass(slots=True)
class Stalls:
    """By core: spans of CLOCK_MONOTONIC in which its thread was due and did not run."""

    spans: dict[int, list[Span]] = field(default_factory=dict)

    def within(self, begin_ns: int, end_ns: int) -> int:
        """How long at most one core stood still between the two."""
        return max(
            (
                sum(max(0, min(end, end_ns) - max(begin, begin_ns)) for begin, end in core)
                for core in self.spans.values()
            ),
            default=0,
        )

    def in_all(self, spans: Iterable[Span]) -> int:
        return sum(self.within(begin, end) for begin, end in spans)


class StallWatch:
    """A thread on each core, for as long as the context lasts. What process `own` ran in a stall is its doing, and no
    stall of the machine.
    """

    def __init__(self, own: int) -> None:
        self.stalls = Stalls()
        self._clock = (~own << 3) | 2  # the kernel's name of the processor clock of a process
        self._is_over = threading.Event()
        self._threads = [
            threading.Thread(target=self._watch, args=(core,), daemon=True) for core in os.sched_getaffinity(0)
        ]

    def __enter__(self) -> StallWatch:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()

    def _watch(self, core: int) -> None:
        spans = self.stalls.spans.setdefault(core, [])
        os.sched_setaffinity(0, {core})  # of this thread alone
        before_ns, before_own_ns = time.monotonic_ns(), self._own_ns()
        while not self._is_over.is_set():
            time.sleep(PERIOD_NS / 1e9)
            now_ns, own_ns = time.monotonic_ns(), self._own_ns()
            due_ns = before_ns + PERIOD_NS + own_ns - before_own_ns
            if now_ns - due_ns > LATE_NS:
                spans.append((due_ns, now_ns))
            before_ns, before_own_ns = now_ns, own_ns

    def _own_ns(self) -> int:
        try:
            return time.clock_gettime_ns(self._clock)
        except OSError:  # it is gone
            return 0
