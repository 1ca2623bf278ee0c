"""Memory of other processes, changed from here: their uvm descriptors, and a thread for each that waits in the driver
(native/sparse.c). The loop never waits for a call.
"""

from __future__ import annotations

import asyncio
import errno
import os
import stat
from collections import deque
from collections.abc import Callable

from valved.fds import Fds
from valved.machine.ports import Runs, SparseResult
from valved.native._gate import ffi, lib

UVM = "/dev/nvidia-uvm"
CONTROL = "/dev/nvidiactl"


def is_file(fd: int, path: str) -> bool:
    """Is that the file a client says it is? A driver's bare request number could mean anything to another file. Asked
    without a descriptor of our own: for want of one an honest client would be taken for a liar."""
    try:
        node = os.stat(path)
    except FileNotFoundError:
        return False
    return stat.S_ISCHR(node.st_mode) and (os.major(node.st_rdev), os.minor(node.st_rdev)) == _device(fd)


def _device(fd: int) -> tuple[int, int] | None:
    """Without asking the process that serves the file: fstat() of a FUSE file may never come back."""
    major, minor = ffi.new("uint32_t *"), ffi.new("uint32_t *")
    return (major[0], minor[0]) if lib.valve_fd_device(fd, major, minor) == 0 else None


class UvmDoors:
    """The OutsidePort of a real node."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def is_uvm(self, fd: int) -> bool:
        return is_file(fd, UVM)

    def is_handle(self, fd: int) -> bool:
        return is_file(fd, CONTROL)

    def open(self, fd: int, uuid: bytes) -> UvmDoor:
        return UvmDoor(self._loop, fd, uuid)


class UvmDoor:
    def __init__(self, loop: asyncio.AbstractEventLoop, fd: int, uuid: bytes) -> None:
        """Takes `fd` over if all of it succeeds."""
        self._loop = loop
        self._asked: deque[Callable[[SparseResult], None]] = deque()
        self._is_open = True
        with Fds() as fds:
            self._bell = fds.own(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))
            loop.add_reader(self._bell, self._hear)
            fds.callback(loop.remove_reader, self._bell)
            self._native = lib.valve_door_open(fd, self._bell, uuid)
            if self._native == ffi.NULL:
                raise OSError(errno.EAGAIN, "no thread could be started for a call on another process's memory")
            fds.keep()

    def make_sparse(self, runs: Runs, then: Callable[[SparseResult], None]) -> None:
        words = ffi.new("uint64_t[]", [word for run in runs for word in run])
        if lib.valve_door_ask(self._native, words, len(runs)):
            self._loop.call_soon(then, SparseResult(status=-errno.ENOMEM, runs=0, took_ns=0))
        else:
            self._asked.append(then)

    def close(self) -> None:
        self._is_open = False
        self._leave()

    def _hear(self) -> None:
        status, done, took = ffi.new("int *"), ffi.new("uint32_t *"), ffi.new("uint64_t *")
        answers = []
        while lib.valve_door_answer(self._native, status, done, took):
            answers.append((self._asked.popleft(), SparseResult(status=status[0], runs=done[0], took_ns=took[0])))
        self._leave()
        for then, result in answers[1:]:  # each for itself: one that fails takes no other along
            self._loop.call_soon(then, result)
        for then, result in answers[:1]:
            then(result)

    def _leave(self) -> None:
        if not self._is_open and not self._asked and self._native is not None:
            self._loop.remove_reader(self._bell)
            native, self._native = self._native, None
            lib.valve_door_close(native)
