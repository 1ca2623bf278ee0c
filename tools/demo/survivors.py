"""Ends what a demo started if the demo itself was killed: nothing else would.

Run as a process of its own: survivors.py MARK. Its standard input is a pipe whose other end the demo alone holds, so
the kernel says when the demo is gone, however it went. Every process that it started has MARK in its environment.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

NAME = "DEMO_OF_VALVE"  # not VALVE_*, which an engine that shall know nothing of Valve is started without
TITLES = "SPT_NOENV"  # setproctitle, as engines use it, else writes a process's title over its environment
PATIENCE_S = 20.0  # only for a process that no kill ends at once


@contextlib.contextmanager
def ended_with_us() -> Iterator[None]:
    """What is started meanwhile ends with this process, at the latest."""
    mark = f"{os.getpid()}.{time.monotonic_ns()}"
    argv = [sys.executable, "-I", str(Path(__file__).resolve()), mark]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True):
        os.environ.update({NAME: mark, TITLES: "1"})
        try:
            yield
        finally:
            del os.environ[NAME], os.environ[TITLES]


def end_marked(mark: str) -> bool:
    """Whether there was any."""
    wanted, found = f"{NAME}={mark}".encode(), False
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            process = os.pidfd_open(int(entry.name))  # first: the number may be another process's by the signal
            try:
                if wanted in (entry / "environ").read_bytes().split(b"\0"):
                    found = True
                    signal.pidfd_send_signal(process, signal.SIGKILL)
            finally:
                os.close(process)
    return found


def main(mark: str) -> None:
    sys.stdin.buffer.read()
    deadline = time.monotonic() + PATIENCE_S
    while end_marked(mark) and time.monotonic() < deadline:
        time.sleep(0.01)


if __name__ == "__main__":
    main(sys.argv[1])
