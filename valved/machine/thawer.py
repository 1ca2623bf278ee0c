"""Names the processes that stand by a signal of valved to a small process beside it, which lets them go when valved is
killed (letgo.py). It is started with the first of them, and ends with valved.

Whoever goes on so launches nothing: valved has told it to hold its launches before it stopped it. A process that valved
kills next is named no longer: its channels are on by then. Where the small process cannot be started, or is killed with
valved (a container that ends), who stands does so until the next valved.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Protocol

from valved.fds import Fds
from valved.model.ids import ProcessId

PROGRAM = Path(__file__).with_name("letgo.py")


class ThawerPort(Protocol):
    def put(self, process: ProcessId) -> None:
        """It is stopped next."""
        ...

    def drop(self, process: ProcessId) -> None:
        """It was let go, or killed."""
        ...


class Thawer:
    """The ThawerPort of a real node."""

    def __init__(self) -> None:
        self._standing: set[ProcessId] = set()
        self._pipe = -1
        self._child: subprocess.Popen[bytes] | None = None

    def put(self, process: ProcessId) -> None:
        self._standing.add(process)
        if self._pipe < 0 or not self._tell("+", process):
            self._begin()

    def drop(self, process: ProcessId) -> None:
        if process in self._standing:
            self._standing.discard(process)
            self._tell("-", process)

    def _begin(self) -> None:
        """For all who stand: the one before has ended. Tried again with the next who is to stand."""
        if self._pipe >= 0:
            os.close(self._pipe)
            self._pipe = -1
        with contextlib.suppress(OSError), Fds() as ends:
            theirs, ours = map(ends.own, os.pipe2(os.O_CLOEXEC))
            os.set_blocking(ours, False)
            command = [sys.executable, "-I", "-S", os.fspath(PROGRAM)]
            self._child = subprocess.Popen(command, stdin=theirs, cwd="/", start_new_session=True)
            self._pipe = os.dup(ours)
            for process in self._standing:
                self._tell("+", process)

    def _tell(self, sign: str, process: ProcessId) -> bool:
        try:
            os.write(self._pipe, f"{sign} {process.pid} {process.start_time}\n".encode())  # whole: below PIPE_BUF
        except BlockingIOError:  # thousands at once: the others are let go all the same
            return True
        except OSError:
            return False
        return True
