"""Descriptors that a client lends by number, because the kernel passes none of its user's now (proto/abi/link.h).

They are fetched from the process that made the connection, by the pidfd that the kernel has of it: no number of a
process that came again is trusted. The call waits for an exec of that process, so it is never done on the loop.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import errno
import fcntl
import os
import select
import socket
import struct
from dataclasses import dataclass
from functools import cache

import valve_abi

from valved.abi.link import MAX_FDS, Feature, Malformed
from valved.machine.helpers import Closer

SO_PEERPIDFD = 77  # Linux 6.5
SYS_PIDFD_GETFD = 438
FETCHERS = 32  # threads: each waits at most for the exec of one client
F_GETSIG = 11
UNFETCHED = valve_abi.LINK_UNFETCHED
LENT = valve_abi.LINK_LENT
_TYPE, _LENGTH = struct.Struct("=H"), struct.Struct("=I")
_TYPE_AT, _LENGTH_AT = 6, 8
_HEADER_BYTES = valve_abi.LINK_HEADER.size
_syscall = ctypes.CDLL(None, use_errno=True).syscall


@dataclass(frozen=True, slots=True)
class Lent:
    numbers: tuple[int, ...]
    mark: int  # what each file has as its signal; 0: nothing


def split(data: bytes) -> tuple[bytes, Lent | None]:
    """The packet as it were without numbers, and those."""
    if len(data) < _HEADER_BYTES:
        return data, None
    (kind,) = _TYPE.unpack_from(data, _TYPE_AT)
    if not kind & LENT:
        return data, None
    (length,) = _LENGTH.unpack_from(data, _LENGTH_AT)
    (count,) = _LENGTH.unpack_from(data, len(data) - 4)
    end = len(data) - 4 * (count + 2)
    if length != len(data) or not 1 <= count <= MAX_FDS or end < _HEADER_BYTES:
        raise Malformed(f"{count} numbers of descriptors behind a packet of {len(data)} bytes")
    numbers = array.array("i", data[end : end + 4 * count])
    if min(numbers) < 0:
        raise Malformed("a negative number of a descriptor")
    (mark,) = _LENGTH.unpack_from(data, len(data) - 8)
    plain = data[:_TYPE_AT] + _TYPE.pack(kind & ~LENT) + _LENGTH.pack(end) + data[_LENGTH_AT + _LENGTH.size : end]
    return plain, Lent(tuple(numbers), mark)


def pidfd_of(sock: socket.socket) -> int:
    """Of the process that connected."""
    return sock.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD)


def is_dead(sock: socket.socket) -> bool:
    """The process that connected, with all of its threads. OSError: there is no descriptor to look with."""
    try:
        pidfd = pidfd_of(sock)
    except OSError as error:
        if error.errno == errno.ENOPROTOOPT:
            return False
        if error.errno in (errno.ESRCH, errno.EINVAL):  # nobody has that number, or a process that is none of them
            return True
        raise
    try:
        end = select.poll()
        end.register(pidfd, select.POLLIN)
        return bool(end.poll(0))
    finally:
        os.close(pidfd)


def fetch(pidfd: int, lent: Lent, closer: Closer) -> list[int]:
    """All of them, or OSError. Takes over the pidfd. Not on the loop."""
    found: list[int] = []
    try:
        for number in lent.numbers:
            found.append(_fetch_one(pidfd, number))
            if lent.mark and fcntl.fcntl(found[-1], F_GETSIG) != lent.mark:
                raise OSError(errno.EBADF, "another file has that number now")
    except OSError:
        closer.close(found)
        raise
    finally:
        os.close(pidfd)
    return found


def _fetch_one(pidfd: int, number: int) -> int:
    fd: int = _syscall(SYS_PIDFD_GETFD, pidfd, number, 0)
    if fd < 0:
        raise OSError(ctypes.get_errno(), "pidfd_getfd")
    return fd


@cache
def fetched() -> Feature:
    """What is announced: whether this kernel has both calls, and lets us use them. A client of which it lets us fetch
    nothing is told so when it lends something."""
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with one, other, contextlib.suppress(OSError):
        pidfd = pidfd_of(one)
        try:
            os.close(_fetch_one(pidfd, one.fileno()))
        finally:
            os.close(pidfd)
        return Feature.FETCH
    return Feature(0)
