"""Whether a link may be read now. Those that owe answers have turns, once they have used up what they have in common.

One of these is read at a time. Each account has its turn, and in it each process: a service may wait for the answer of
one, and however many of another account owe answers and flood, that one is read behind a message or two of theirs.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from valved.clients.arrivals import BEHIND_NS
from valved.clients.connection import LinkConnection
from valved.clients.turns import SECOND_NS, TurnLine, Turns

if TYPE_CHECKING:
    from valved.clients.server import LinkServer


class OwingLine:
    def __init__(self, server: LinkServer, turns: Turns) -> None:
        self._server = server
        self._turns = turns
        self._line: TurnLine[LinkConnection] = TurnLine()
        self._timer: asyncio.TimerHandle | None = None

    def may_be_read(self, peer: LinkConnection) -> bool:
        """Now. Else it rests, or waits for its turn."""
        peer.was_awaited = peer.is_awaited
        owes = peer.was_awaited and not peer.is_online
        wait = self._turns.own_wait_ns if owes else self._turns.wait_ns
        wait_ns = wait(peer.pid, time.monotonic_ns(), is_online=peer.is_online, is_awaited=peer.was_awaited)
        if peer.is_behind:
            wait_ns = max(wait_ns, BEHIND_NS)
        wait_ns = max(wait_ns, peer.full_ns())
        if wait_ns:
            peer.rest(wait_ns / SECOND_NS)
        elif owes and (self._line or self._wait_ns() or not self._server.later(peer).has_time()):
            self._put(peer)  # not with what later passes do: all that were let in would owe at once
        else:
            return True
        return False

    def _wait_ns(self) -> int:
        return self._turns.common_wait_ns(time.monotonic_ns(), is_awaited=True)

    def _put(self, peer: LinkConnection) -> None:
        self._server.loop.remove_reader(peer.fileno())
        self._line.put(peer.turn, peer)
        self._go_on()

    def _go_on(self) -> None:
        if self._line and self._timer is None:
            self._timer = self._server.loop.call_later(self._wait_ns() / SECOND_NS, self._next)

    def _next(self) -> None:
        self._timer = None
        try:
            if not self._wait_ns() and (peer := self._line.take()) is not None and peer.is_open:
                self._server.go_on(peer)
                self._server.read_in_turn(peer)
        finally:  # also if that failed
            self._go_on()
