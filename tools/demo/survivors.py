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
PATIENCE_S = 20.0  # only for a process that no kill ends at once


@contextlib.contextmanager
def ended_with_us() -> Iterator[None]:
    """What is started meanwhile ends with this process, at the latest."""
    mark = f"{os.getpid()}.{time.monotonic_ns()}"
    argv = [sys.executable, "-I", str(Path(__file__).resolve()), mark]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True):
        os.environ[NAME] = mark
        try:
            yield
        finally:
            del os.environ[NAME]


def marked(mark: str) -> list[int]:
    wanted, found = f"{NAME}={mark}".encode(), []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if wanted in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return found


def main(mark: str) -> None:
    sys.stdin.buffer.read()
    deadline = time.monotonic() + PATIENCE_S
    while (left := marked(mark)) and time.monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


if __name__ == "__main__":
    main(sys.argv[1])
