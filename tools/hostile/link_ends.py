"""Ends of valved's link that are no shim: what hostile processes are made of."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable

from valved.abi import link
from valved.abi.link import LinkType
from valved.model.ids import Role

NOBODY = 65534
SHORT_S = 0.01
LENT = 0x8000  # proto/abi/link.h

Attack = Callable[[str], object]


def hello_of(role: Role) -> bytes:
    body = link.Hello(
        abi_min=1, abi_max=1, features=link.Feature.GAPS, wanted_role=role, driver=0, build="bench", comm="bench"
    )
    return link.build(LinkType.HELLO, body, seq=1, sent_ns=0)


OFFLINE_HELLO = hello_of(Role.OFFLINE)


def connect(path: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.connect(path)
    return sock


def packet_of(kind: LinkType, *, lent: bytes = b"") -> bytes:
    """A body of zeros."""
    size = link.packet_bytes(kind)
    header = struct.pack("<IHHIIQ", link.MAGIC, link.ABI, kind | (LENT if lent else 0), size + len(lent), 7, 0)
    return header.ljust(size, b"\0") + lent


def welcomed(path: str, hello: bytes = OFFLINE_HELLO) -> socket.socket:
    sock = connect(path)
    sock.send(hello)
    _, fds, _, _ = socket.recv_fds(sock, link.MAX_PACKET, 8)
    for fd in fds:
        os.close(fd)
    sock.settimeout(SHORT_S)
    return sock


class Says:
    """On one link, as often as valved takes it; a link that valved ended is made anew."""

    def __init__(self, say: Callable[[socket.socket], object]) -> None:
        self._say = say
        self._sock: socket.socket | None = None

    def __call__(self, path: str) -> None:
        self._sock = self._sock or welcomed(path)
        try:
            self._say(self._sock)
        except TimeoutError:
            pass
        except OSError:
            self._sock.close()
            self._sock = None
