"""Accepts connections at a listening socket, many in one call, with who the kernel says made them."""

from __future__ import annotations

import socket
import struct
from typing import NamedTuple

MOST = 128  # in one call
CREDENTIALS = struct.Struct("3i")


class Accepted(NamedTuple):
    fd: int  # non-blocking; the caller's to close
    pid: int
    uid: int


def accept(listener: socket.socket) -> list[Accepted]:
    """Those that wait, at most MOST. OSError: there are some, and no descriptor for the first."""
    found: list[Accepted] = []
    while len(found) < MOST:
        try:
            sock, _ = listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            break
        except OSError:
            if found:
                break
            raise
        pid, uid, _ = CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size))
        sock.setblocking(False)
        found.append(Accepted(sock.detach(), pid, uid))
    return found
