"""Names the processes that stand by a signal of valved to a small process beside it, which lets them go when valved is
killed (letgo.py). It is started with the first of them, and ends with valved. If it ends before, another one takes its
place as soon as valved's loop hears of that.

Whoever goes on so launches nothing: valved has told it to hold its launches before it stopped it. A process that valved
kills next is named no longer: its channels are on by then. Where the small process cannot be started, or is killed with
valved (a container that ends), who stands does so until the next valved.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Protocol

from valved.fds import Fds
from valved.machine.processes import boot_shift
from valved.model.ids import ProcessId

PROGRAM = Path(__file__).with_name("letgo.py")
AGAIN_S = 1.0  # between two starts, where the program ends at once or cannot be started


class ThawerPort(Protocol):
    def put(self, process: ProcessId) -> None:
        """It is stopped next."""
        ...

    def drop(self, process: ProcessId) -> None:
        """It was let go, or killed."""
        ...


class Thawer:
    """The ThawerPort of a real node."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop, self._shift = loop, boot_shift()
        self._standing: set[ProcessId] = set()
        self._child: subprocess.Popen[bytes] | None = None
        self._pipe = self._end = -1  # what it hears by, and its pidfd
        self._began_s = -AGAIN_S

    def put(self, process: ProcessId) -> None:
        self._standing.add(process)
        if self._child is None or not self._tell("+", process):
            self._begin()

    def drop(self, process: ProcessId) -> None:
        if process in self._standing:
            self._standing.discard(process)
            self._tell("-", process)

    def _begin(self) -> None:
        """For all who stand: the one before has ended."""
        self._forget()
        self._began_s = self._loop.time()
        try:
            with Fds() as ours, Fds() as theirs:
                read_end, write_end = os.pipe2(os.O_CLOEXEC)
                theirs.own(read_end)
                ours.own(write_end)
                os.set_blocking(write_end, False)
                command = [sys.executable, "-I", "-S", os.fspath(PROGRAM)]
                child = subprocess.Popen(command, stdin=read_end, cwd="/", start_new_session=True)
                end = ours.own(os.pidfd_open(child.pid))
                self._loop.add_reader(end, self._ended)
                ours.keep()
        except OSError:
            self._loop.call_later(AGAIN_S, self._replace)
            return
        self._child, self._pipe, self._end = child, write_end, end
        for process in self._standing:
            self._tell("+", process)

    def _ended(self) -> None:
        """At once, unless it has hardly lived: what ends it may end the next one as well."""
        self._forget()
        self._loop.call_at(max(self._loop.time(), self._began_s + AGAIN_S), self._replace)

    def _replace(self) -> None:
        if self._standing and self._child is None:
            self._begin()

    def _forget(self) -> None:
        if self._child is not None:
            self._child.poll()  # takes its exit status
            self._loop.remove_reader(self._end)
            os.close(self._end)
            os.close(self._pipe)
            self._child, self._pipe, self._end = None, -1, -1

    def _tell(self, sign: str, process: ProcessId) -> bool:
        try:
            start = process.start_time + self._shift  # as that program reads it
            os.write(self._pipe, f"{sign} {process.pid} {start}\n".encode())  # whole: below PIPE_BUF
        except BlockingIOError:  # thousands at once: the others are let go all the same
            return True
        except OSError:
            return False
        return True
