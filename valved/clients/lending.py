"""Reads packets whose descriptors were lent by number: the server acts on each once those are here.

A fetch may wait for its client, as long as that likes: it is done by threads, of which no process keeps more than one
and no account more than a quarter. What lies fetched until the loop takes it counts as well. What it costs the client
pays for, whether anything came of it or not. And nothing of a link is read while something of it is being fetched.
"""

from __future__ import annotations

import time
from collections.abc import Hashable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from valved.abi.link import Ack, LinkType, Malformed
from valved.clients.connection import LinkConnection, Received
from valved.clients.deaf import Unheard
from valved.clients.fetching import FETCHERS, UNFETCHED, Lent, fetch
from valved.clients.turns import TurnLine
from valved.fds import is_scarce
from valved.machine.helpers import Helpers, Worker

if TYPE_CHECKING:
    from valved.clients.server import LinkServer

OF_ACCOUNT = FETCHERS // 4


@dataclass(slots=True, eq=False)
class _Loan:
    peer: LinkConnection
    received: Received
    lent: Lent
    ran_ns: int = 0  # of a core

    def fetch(self, pidfd: int) -> list[int]:
        began_ns = time.thread_time_ns()
        try:
            return fetch(pidfd, self.lent, self.peer.closer)
        finally:
            self.ran_ns += time.thread_time_ns() - began_ns


class FetchedReader:
    def __init__(self, server: LinkServer) -> None:
        self._server = server
        self._workers = Worker(server.loop, Helpers("valved-fetch", FETCHERS))
        self._line: TurnLine[_Loan] = TurnLine()
        self._busy: dict[int, Hashable] = {}  # processes of which something is fetched, and their accounts

    def read(self, peer: LinkConnection, received: Received, lent: Lent) -> None:
        kind = received.packet.type
        if peer.client is None or len(lent.numbers) > self._server.most_fds(kind):
            raise Malformed(f"{len(lent.numbers)} numbers of descriptors on {kind.name}")
        if received.sender != peer.pid:
            raise Malformed(f"numbers of process {received.sender} on a connection of process {peer.pid}")
        self._server.loop.remove_reader(peer.fileno())
        peer.is_fetching = True
        self._line.put((peer.lane.account, peer.pid), _Loan(peer, received, lent))
        self._go_on()

    def _may(self, loan: _Loan) -> bool:
        peer, busy = loan.peer, self._busy
        if not peer.is_open:  # it leaves the line, which would grow without end else
            return True
        return len(busy) < FETCHERS and peer.pid not in busy and [*busy.values()].count(peer.lane.account) < OF_ACCOUNT

    def _go_on(self) -> None:
        while (loan := self._line.take(self._may)) is not None:
            if loan.peer.is_open:
                self._begin(loan)

    def _begin(self, loan: _Loan) -> None:
        self._busy[loan.peer.pid] = loan.peer.lane.account
        came = partial(self._came, loan)
        try:
            pidfd = loan.peer.pidfd()
        except OSError as error:
            self._server.loop.call_soon(came, None, error)
        else:
            self._workers.do(partial(loan.fetch, pidfd), came)

    def _came(self, loan: _Loan, fds: list[int] | None, error: Exception | None) -> None:
        self._server.later(loan.peer).do(loan.peer.turn, partial(self._take, loan, fds, error))

    def _take(self, loan: _Loan, fds: list[int] | None, error: Exception | None) -> None:
        peer, wanted = loan.peer, loan.peer.wanted
        peer.is_fetching = False
        del self._busy[peer.pid]
        try:
            if peer.is_open:
                self._act_on(loan, fds, error)
            else:
                peer.closer.close(fds or ())
        finally:  # also if valved failed to handle it
            if peer.wanted == wanted:
                self._server.charge(peer, loan.ran_ns)
            self._server.go_on(peer)
            self._go_on()

    def _act_on(self, loan: _Loan, fds: list[int] | None, error: Exception | None) -> None:
        peer, packet = loan.peer, loan.received.packet

        def result() -> Received:
            if fds is None:
                raise Unheard
            return Received(packet, fds, peer.pid)

        if fds is None and not (isinstance(error, OSError) and is_scarce(error)):
            began_ns = time.thread_time_ns()
            peer.send(LinkType.ACK, Ack(status=UNFETCHED), packet.seq)
            loan.ran_ns += time.thread_time_ns() - began_ns
            return
        if fds is not None and packet.type is LinkType.KV_DONE:  # nothing else answers it
            peer.send(LinkType.ACK, Ack(), packet.seq)
        self._server.read_one(peer, result)
