"""The one clock of the daemon: CLOCK_MONOTONIC in ns, and calls at a time. Tests put virtual time in its place."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from typing import Protocol

CORES = len(os.sched_getaffinity(0))  # with one, it would be kept from those who are awaited
AWAKE_MOST_NS = 50_000_000  # at once: others may need the core, and a client chooses how often something is awaited
AWAKE_ONE_IN = 20  # of the time


class TimerHandle(Protocol):
    def cancel(self) -> None: ...


class Clock(Protocol):
    def now_ns(self) -> int: ...

    def call_at_ns(self, when_ns: int, call: Callable[[], None]) -> TimerHandle: ...

    def stay_awake(self, for_ns: int) -> None:
        """What comes within this time from now is heard at once; 0: nothing more is awaited. A core that has gone to
        sleep takes 50 to 100 us to wake where the machine is a virtual one."""


class LoopClock:
    """Time of the asyncio loop, which is CLOCK_MONOTONIC as well."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._awake_until_ns = self._seen_ns = 0
        self._purse_ns = AWAKE_MOST_NS
        self._is_turning = False

    def now_ns(self) -> int:
        return time.monotonic_ns()

    def call_at_ns(self, when_ns: int, call: Callable[[], None]) -> TimerHandle:
        return self._loop.call_at(when_ns / 1e9, call)

    def stay_awake(self, for_ns: int) -> None:
        self._awake_until_ns = self.now_ns() + for_ns if CORES > 1 else 0
        if not self._is_turning:
            self._turn()

    def _turn(self) -> None:
        """A loop that has something to do in its next turn asks for news without waiting for any."""
        now_ns = self.now_ns()
        passed_ns, self._seen_ns = now_ns - self._seen_ns, now_ns
        change_ns = -passed_ns if self._is_turning else passed_ns // AWAKE_ONE_IN
        self._purse_ns = min(self._purse_ns + change_ns, AWAKE_MOST_NS)
        self._is_turning = now_ns < self._awake_until_ns and self._purse_ns > 0
        if self._is_turning:
            os.sched_yield()  # what is awaited may need this very core
            self._loop.call_soon(self._turn)


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
