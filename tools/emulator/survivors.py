"""Ends what a demo, a bench or a lab started if that itself was killed: nothing else would.

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


def _guarded() -> subprocess.Popen[bytes]:
    """From now on the environment holds a mark, and a process waits for our end to end what has it. That process has
    no mark itself: a guard that is ended with those of another would leave its own."""
    mark = f"{os.getpid()}.{time.monotonic_ns()}"
    argv = [sys.executable, "-I", str(Path(__file__).resolve()), mark]
    bare = {name: value for name, value in os.environ.items() if name != NAME}
    guard = subprocess.Popen(
        argv, env=bare, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, cwd="/", start_new_session=True
    )
    assert guard.stdin is not None
    os.register_at_fork(after_in_child=guard.stdin.close)  # a fork that lives longer would keep the guard waiting
    os.environ.update({NAME: mark, TITLES: "1"})
    return guard


@contextlib.contextmanager
def ended_with_us() -> Iterator[None]:
    """What is started meanwhile ends with this process, at the latest."""
    before = {name: os.environ.get(name) for name in (NAME, TITLES)}
    with _guarded():
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


_for_good: list[subprocess.Popen[bytes]] = []


def end_with_us() -> None:
    """The same for all that is started from now on, once for a process. For whoever brings up a node: a bench, a lab
    or a test that is killed has no other way to take it down."""
    if not os.environ.get(NAME, "").startswith(f"{os.getpid()}."):
        _for_good.append(_guarded())


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
