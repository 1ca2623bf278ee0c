"""Virtual time: hours of cooldown in milliseconds."""

from __future__ import annotations

import heapq
import itertools


class VirtualClock:
    """A `Clock` that moves only when told to."""

    def __init__(self, start_ns=1_000_000_000):
        self._now_ns = start_ns
        self._queue = []
        self._order = itertools.count()

    def now_ns(self):
        return self._now_ns

    def call_at_ns(self, when_ns, call):
        timer = _Timer(call)
        heapq.heappush(self._queue, (when_ns, next(self._order), timer))
        return timer

    def advance(self, ns):
        """Run everything that falls due, in order."""
        until = self._now_ns + ns
        while self._queue and self._queue[0][0] <= until:
            when, _, timer = heapq.heappop(self._queue)
            self._now_ns = max(self._now_ns, when)
            if timer.call is not None:
                timer.call()
        self._now_ns = until

    def settle(self):
        """Run what is due right now."""
        self.advance(0)

    @property
    def waiting(self):
        """Timers that will really fire."""
        return sum(timer.call is not None for _, _, timer in self._queue)


class _Timer:
    def __init__(self, call):
        self.call = call

    def cancel(self):
        self.call = None
