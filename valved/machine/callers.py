"""Accepts connections at a listening socket, many in one call, with who the kernel says made them."""

from __future__ import annotations

import os
import select
import socket
import struct
from collections.abc import Sequence
from typing import NamedTuple

from valved.native._gate import ffi, lib

MOST = 128  # in one call
CREDENTIALS = struct.Struct("3i")


class Accepted(NamedTuple):
    fd: int  # non-blocking; the caller's to close
    pid: int
    uid: int


def accept(listener: socket.socket) -> list[Accepted]:
    """Those that wait, at most MOST. OSError: there are some, and no descriptor for the first."""
    found = ffi.new("int32_t[]", 3 * MOST)
    count = lib.valve_knocks_take(listener.fileno(), found, MOST)
    if count < 0:
        raise OSError(-count, os.strerror(-count))
    numbers = ffi.unpack(found, 3 * count) if count else []
    return list(map(Accepted, numbers[::3], numbers[1::3], numbers[2::3]))


def close_all(fds: Sequence[int]) -> None:
    """Without the interpreter in between, for which the loop would have to wait each time."""
    lib.valve_knocks_close(fds, len(fds))


def has_left(fd: int) -> bool:
    """The other end of a connection is closed."""
    end = select.poll()
    end.register(fd, 0)
    return bool(end.poll(0))
