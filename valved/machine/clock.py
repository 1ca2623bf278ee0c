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
