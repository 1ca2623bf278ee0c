"""Hostile processes for bench hello whose end of the link, or whose own state, is out of the ordinary."""

from __future__ import annotations

import contextlib
import os
import socket

from valve_tools.hostile.link_ends import NOBODY, OFFLINE_HELLO, SHORT_S, Says, connect, packet_of

from valved.abi import link
from valved.abi.link import LinkType

SO_PASSSEC, SO_PEEK_OFF, SO_PASSPIDFD = 34, 42, 76
ODD_OPTIONS = (
    socket.SO_SNDBUF,
    socket.SO_RCVBUF,
    socket.SO_PASSCRED,
    socket.SO_RCVLOWAT,
    SO_PASSSEC,
    SO_PEEK_OFF,
    SO_PASSPIDFD,
)


class IsOdd:
    """Each option of its end that another end may have to pay for, at its extremes."""

    def __init__(self) -> None:
        self._says = Says(self._say)
        self._turn = 0

    def _say(self, sock: socket.socket) -> None:
        self._turn += 1
        value = (0, 1, 7, 0x7FFFFFFF)[self._turn % 4]
        for option in ODD_OPTIONS:
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, option, value)
        sock.send(packet_of(LinkType.SCHEDULE_WAIT))
        for _ in range(4):  # with a peek offset, each look is further on
            with contextlib.suppress(BlockingIOError):
                sock.recvmsg(8, 4096, socket.MSG_PEEK | socket.MSG_DONTWAIT)

    def __call__(self, path: str) -> None:
        self._says(path)


def is_another_since(path: str) -> None:
    """Connects as one user, speaks as another, and becomes a third program of a third."""
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(OSError):
            sock = connect(path)
            os.setresuid(NOBODY, NOBODY, 0)
            sock.send(OFFLINE_HELLO)
            sock.recv(link.MAX_PACKET)
            os.setresuid(0, 0, 0)
            sock.send(packet_of(LinkType.SCHEDULE_WAIT))
            os.set_inheritable(sock.fileno(), True)
            os.execv("/bin/true", ["true"])
        os._exit(0)
    os.waitpid(pid, 0)


def leaves_words(path: str) -> None:
    """Ends with a HELLO unread, and its end of the link is another's."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        pid = os.fork()
        if pid == 0:
            with contextlib.suppress(OSError):
                sock.connect(path)
                sock.send(OFFLINE_HELLO)
            os._exit(0)
        os.waitpid(pid, 0)
        sock.settimeout(SHORT_S)
        sock.recv(link.MAX_PACKET)
