"""Reads links whose packets are dear, aside of the loop: one at a time, and the loop acts on it as on any other."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

from valved.clients.connection import LinkConnection, Received

if TYPE_CHECKING:
    from valved.clients.server import LinkServer

AGAIN_S = 0.05  # where valved is out of descriptors


class AsideReader:
    def __init__(self, server: LinkServer) -> None:
        self._server = server

    def read(self, peer: LinkConnection) -> None:
        try:
            job = peer.receive_aside()
        except OSError:
            self._server.rest(peer, AGAIN_S)
            return
        self._server.loop.remove_reader(peer.fileno())
        peer.lane.do(job, partial(self._come_back, peer))

    def _come_back(self, peer: LinkConnection, received: Received | None, error: Exception | None) -> None:
        self._server.later(peer).do(peer.pid, partial(self._take, peer, received, error))

    def _take(self, peer: LinkConnection, received: Received | None, error: Exception | None) -> None:
        if not peer.is_open:
            self._server.closer.close(received.fds if received is not None else ())
            return

        def result() -> Received | None:
            if error is not None:
                raise error
            return received

        began_ns, is_first = time.thread_time_ns(), peer.client is None
        if not self._server.read_one(peer, result) and is_first:
            self._server.drop_later(peer, "no HELLO")
        if is_first and not peer.is_online:
            self._server.arrivals.took(peer.caller, time.thread_time_ns() - began_ns)
        self._server.go_on(peer)
