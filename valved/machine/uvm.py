"""Memory of other processes, changed from here: their uvm descriptors, and a thread for each that waits in the driver.

A call may take milliseconds, or never come back: the loop never waits for one. The thread owns the descriptor, closing
it as its last act, because the last close of a uvm file tears a whole address space down.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import threading
from collections.abc import Callable
from queue import SimpleQueue

from valved.machine.ports import Runs, SparseResult
from valved.native._gate import ffi, lib

UVM = "/dev/nvidia-uvm"
CONTROL = "/dev/nvidiactl"


def is_file(fd: int, path: str) -> bool:
    """Is that the file a client says it is? A driver's bare request number could mean anything to another file."""
    try:
        return _device_of(path) == _device(fd) is not None
    except OSError:
        return False


@functools.cache  # a card's nodes stay what they are; what cannot be opened is asked for again
def _device_of(path: str) -> tuple[int, int] | None:
    own = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        return _device(own)
    finally:
        os.close(own)


def _device(fd: int) -> tuple[int, int] | None:
    """Without asking whoever serves the file: fstat() of a FUSE file may never come back."""
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
        self._loop = loop
        self._fd = fd
        self._uuid = uuid
        self._work: SimpleQueue[tuple[Runs, Callable[[SparseResult], None]] | None] = SimpleQueue()
        # A daemon: a call that never comes back must not keep valved from leaving.
        threading.Thread(target=self._serve, name="valved-uvm", daemon=True).start()

    def make_sparse(self, runs: Runs, then: Callable[[SparseResult], None]) -> None:
        self._work.put((runs, then))

    def close(self) -> None:
        self._work.put(None)

    def _serve(self) -> None:
        while (work := self._work.get()) is not None:
            runs, then = work
            result = self._call(runs)
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(then, result)
        os.close(self._fd)

    def _call(self, runs: Runs) -> SparseResult:
        words = ffi.new("uint64_t[]", [word for run in runs for word in run])
        done, took = ffi.new("uint32_t *"), ffi.new("uint64_t *")
        status = lib.valve_uvm_sparse(self._fd, self._uuid, words, len(runs), done, took)
        return SparseResult(status=status, runs=done[0], took_ns=took[0])
