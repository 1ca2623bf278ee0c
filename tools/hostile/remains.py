"""Hostile processes that keep what valved pays for of links that have ended: their bells, and what they never read."""

from __future__ import annotations

import os
import socket

from valve_tools.hostile.link_ends import OFFLINE_HELLO, SHORT_S, connect, hello_of, packet_of

from valved.abi import link
from valved.abi.link import LinkType
from valved.model.ids import Role


class KeepsBells:
    """Of each link the two eventfds, and nothing that has a page."""

    def __init__(self) -> None:
        self.links = self.refused = 0
        self._kept: list[int] = []

    def __call__(self, path: str) -> None:
        with connect(path) as sock:
            sock.send(OFFLINE_HELLO)
            _, fds, _, _ = socket.recv_fds(sock, link.MAX_PACKET, 8)
        self.links, self.refused = self.links + bool(fds), self.refused + (not fds)
        for fd in fds[:2]:
            os.close(fd)
        self._kept += fds[2:]


class KeepsAnswers:
    """Reads nothing, asks until valved takes no more, ends its link by nonsense and keeps the socket."""

    def __init__(self, asks: int = 1 << 20) -> None:
        self._asks = asks
        self._kept: list[socket.socket] = []

    def __call__(self, path: str) -> None:
        sock = connect(path)
        self._kept.append(sock)
        sock.settimeout(50 * SHORT_S)
        try:
            sock.send(OFFLINE_HELLO)
            for _ in range(self._asks):
                sock.send(packet_of(LinkType.SCHEDULE_WAIT))
            sock.send(b"x")
        except TimeoutError:
            sock.shutdown(socket.SHUT_WR)


class KeepsRefusals:
    """Says what is refused, and never reads that."""

    def __init__(self) -> None:
        self._kept: list[socket.socket] = []

    def __call__(self, path: str) -> None:
        self._kept.append(connect(path))
        self._kept[-1].send(hello_of(Role.ONLINE))
        self._kept[-1].recv(1, socket.MSG_PEEK)
