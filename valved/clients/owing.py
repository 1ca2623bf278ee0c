"""Links that owe answers, while such links have used up what they have in common: whose turn it is.

One is read at a time. Each account has its turn, and in it each process: a service may wait for the answer of one, and
however many of another account owe answers and flood, that one is read behind a single message or two of theirs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from valved.clients.connection import LinkConnection
from valved.clients.turns import SECOND_NS, TurnLine


class OwingLine:
    """`wait_ns`: until the next of them may be read."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, wait_ns: Callable[[], int], read: Callable[[LinkConnection], object]
    ) -> None:
        self._loop = loop
        self._wait_ns = wait_ns
        self._read = read
        self._line: TurnLine[LinkConnection] = TurnLine()
        self._timer: asyncio.TimerHandle | None = None

    def has_to_wait(self) -> bool:
        """Also behind those that do."""
        return bool(self._line) or self._wait_ns() > 0

    def put(self, peer: LinkConnection) -> None:
        """It is not read until its turn comes."""
        self._loop.remove_reader(peer.fileno())
        self._line.put(peer.turn, peer)
        self._wait()

    def _wait(self) -> None:
        if self._line and self._timer is None:
            self._timer = self._loop.call_later(self._wait_ns() / SECOND_NS, self._next)

    def _next(self) -> None:
        self._timer = None
        try:
            if not self._wait_ns() and (peer := self._line.take()) is not None and peer.is_open:
                self._read(peer)
        finally:  # also if that failed
            self._wait()
