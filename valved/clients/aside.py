"""Reads links whose packets are dear, aside of the loop: one at a time, and the loop acts on it as on any other."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

from valved.clients.connection import LinkConnection, Received

if TYPE_CHECKING:
    from valved.clients.server import LinkServer


class AsideReader:
    def __init__(self, server: LinkServer) -> None:
        self._server = server

    def read(self, peer: LinkConnection) -> None:
        self._server.loop.remove_reader(peer.fileno())
        if peer.client is None:
            self._server.arrivals.goes_aside(peer.lane.account)
        peer.lane.do(peer.receive_aside, partial(self._come_back, peer))

    def _come_back(self, peer: LinkConnection, received: Received | None, error: Exception | None) -> None:
        self._server.later(peer).do(peer.turn, partial(self._take, peer, received, error))

    def _take(self, peer: LinkConnection, received: Received | None, error: Exception | None) -> None:
        is_first, began_ns = peer.client is None, time.thread_time_ns()
        try:
            self._act_on(peer, received, error)
        finally:
            if is_first:
                self._server.arrivals.is_back(peer.lane.account)
        if is_first and not peer.is_online:
            self._server.arrivals.took(peer.caller, time.thread_time_ns() - began_ns)

    def _act_on(self, peer: LinkConnection, received: Received | None, error: Exception | None) -> None:
        if not peer.is_open:
            peer.closer.close(received.fds if received is not None else ())
            return

        def result() -> Received | None:
            if error is not None:
                raise error
            return received

        try:
            if not self._server.read_one(peer, result) and peer.client is None:
                self._server.drop_later(peer, EOFError("no HELLO"))
        finally:  # also if valved failed to handle it
            self._server.go_on(peer)
