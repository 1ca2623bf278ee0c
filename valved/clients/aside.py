"""Reads links whose packets are dear, aside of the loop: one at a time, and the loop acts on it as on any other."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

from valved.abi.link import Ack, LinkType, Malformed, Packet, parse
from valved.clients.connection import LinkConnection, Received
from valved.clients.fetching import FETCHERS, UNFETCHED, Lent, fetch
from valved.machine.helpers import Helpers, Worker

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
        self._server.later(peer).do(peer.pid, partial(self._take, peer, received, error))

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
            self._server.closer.close(received.fds if received is not None else ())
            return

        def result() -> Received | None:
            if error is not None:
                raise error
            return received

        try:
            if not self._server.read_one(peer, result) and peer.client is None:
                self._server.drop_later(peer, "no HELLO")
        finally:  # also if valved failed to handle it
            self._server.go_on(peer)


class FetchedReader:
    """Packets whose descriptors were lent: the server acts on each once those are here."""

    def __init__(self, server: LinkServer) -> None:
        self._server = server
        self._workers = Worker(server.loop, Helpers("valved-fetch", FETCHERS))

    def read(self, peer: LinkConnection, received: Received, lent: Lent) -> None:
        """What it lent, by a thread. Nothing of this peer is read before that is over."""
        packet = parse(received.data)
        if peer.client is None or len(lent.numbers) > self._server.most_fds(packet.type):
            raise Malformed(f"{len(lent.numbers)} numbers of descriptors on {packet.type.name}")
        if received.sender != peer.pid:
            raise Malformed(f"numbers of process {received.sender} on a connection of process {peer.pid}")
        self._server.loop.remove_reader(peer.fileno())
        peer.is_fetching = True
        came = partial(self._fetched, peer, packet, received.data)
        try:
            pidfd = peer.pidfd()
        except OSError as error:
            self._server.loop.call_soon(came, None, error)
            return
        self._workers.do(partial(fetch, pidfd, lent, self._server.closer), came)

    def _fetched(
        self, peer: LinkConnection, packet: Packet, data: bytes, fds: list[int] | None, error: Exception | None
    ) -> None:
        peer.is_fetching = False
        self._server.later(peer).do(peer.pid, partial(self._take_fetched, peer, packet, data, fds))

    def _take_fetched(self, peer: LinkConnection, packet: Packet, data: bytes, fds: list[int] | None) -> None:
        if not peer.is_open:
            self._server.closer.close(fds or ())
            return
        try:
            if fds is None:
                peer.send(LinkType.ACK, Ack(status=UNFETCHED), packet.seq)
            else:
                if packet.type is LinkType.KV_DONE:  # nothing else answers it
                    peer.send(LinkType.ACK, Ack(), packet.seq)
                self._server.read_one(peer, lambda: Received(data, fds, peer.pid))
        finally:  # also if valved failed to handle it
            self._server.go_on(peer)
