"""The one clock of the daemon: CLOCK_MONOTONIC in ns, and calls at a time. Tests put virtual time in its place."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol


class TimerHandle(Protocol):
    def cancel(self) -> None: ...


class Clock(Protocol):
    def now_ns(self) -> int: ...

    def call_at_ns(self, when_ns: int, call: Callable[[], None]) -> TimerHandle: ...


class LoopClock:
    """Time of the asyncio loop, which is CLOCK_MONOTONIC as well."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def now_ns(self) -> int:
        return time.monotonic_ns()

    def call_at_ns(self, when_ns: int, call: Callable[[], None]) -> TimerHandle:
        return self._loop.call_at(when_ns / 1e9, call)


async def beat_of(period_s: float) -> None:
    """Sleep until the clock reads a multiple of this: whoever wakes on such beats wakes together, in one turn."""
    await asyncio.sleep(period_s - time.monotonic() % period_s)


class Ticker:
    """Calls again and again, a whole period after each call; `on_beat`: at multiples of the period, as `beat_of`. The
    next one is set before this one is made, too: one that fails is never the last."""

    def __init__(self, clock: Clock, call: Callable[[], None], *, on_beat: bool = False) -> None:
        self._clock = clock
        self._call = call
        self._on_beat = on_beat
        self._timer: TimerHandle | None = None
        self._every_ns = 0

    @property
    def runs(self) -> bool:
        return self._timer is not None

    def start(self, every_ns: int, *, after_ns: int | None = None) -> None:
        """The first call comes after one period, or `after_ns`. One that runs goes on, with this period from its next
        call on."""
        self._every_ns = every_ns
        if self._timer is None:
            self._set(every_ns if after_ns is None else after_ns)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None

    def _set(self, after_ns: int) -> None:
        when_ns = self._clock.now_ns() + after_ns
        self._timer = self._clock.call_at_ns(when_ns - when_ns % after_ns if self._on_beat else when_ns, self._due)

    def _due(self) -> None:
        self._set(self._every_ns)
        early = self._timer
        self._call()
        if early is not None and self._timer is early:
            early.cancel()
            self._set(self._every_ns)
