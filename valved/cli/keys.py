"""Single keys of a terminal, while a live view is shown; where input or output is no terminal there are none."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Iterator


class Keys:
    """Waits, and hears keys."""

    def __init__(self, fd: int | None) -> None:
        """`fd`: a terminal in cbreak mode; None: there is none."""
        self._fd = fd

    @property
    def is_there(self) -> bool:
        return self._fd is not None

    def wait(self, seconds: float) -> str:
        """The keys that were pressed, once there is one within this time; of one that has no letter, nothing."""
        if self._fd is None:
            time.sleep(seconds)
            return ""
        readable, _, _ = select.select([self._fd], [], [], seconds)
        if not readable:
            return ""
        data = os.read(self._fd, 16)
        if not data:  # the terminal is gone
            self._fd = None
        text = data.decode(errors="replace")
        return "" if text.startswith("\x1b") else text


@contextlib.contextmanager
def keys() -> Iterator[Keys]:
    """The keys of this terminal; its settings come back however the view ends."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        yield Keys(None)
        return
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    former = signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))  # nor may a kill keep them
    try:
        tty.setcbreak(fd)
        yield Keys(fd)
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)
        signal.signal(signal.SIGTERM, former)
