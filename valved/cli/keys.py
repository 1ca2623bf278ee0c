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

from rich.console import Console

SHOWS, HIDES = b"\x1b[?25h", b"\x1b[?25l"  # the cursor
LEAVES, ENTERS = b"\x1b[?1049l", b"\x1b[?1049h"  # a screen of one's own
ENDS = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


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
def keys(console: Console) -> Iterator[Keys]:
    """The keys of this terminal. It is as it was before however the view ends, and while it is stopped (Ctrl-Z)."""
    if not (sys.stdin.isatty() and is_live(console)):
        yield Keys(None)
        return
    fd, out = sys.stdin.fileno(), console.file.fileno()
    before = termios.tcgetattr(fd)

    def end(number: int, _frame: object) -> None:
        sys.exit(128 + number)

    def stop(number: int, _frame: object) -> None:
        has_screen = console.is_alt_screen
        os.write(out, SHOWS + LEAVES)  # not by the console: it may be drawing, and would keep this until it is done
        termios.tcsetattr(fd, termios.TCSADRAIN, before)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)  # returns when the shell lets us go on
        signal.signal(number, stop)
        tty.setcbreak(fd)
        os.write(out, ENTERS + HIDES if has_screen else b"")

    with contextlib.ExitStack() as last:
        for number, handler in (*((number, end) for number in ENDS), (signal.SIGTSTP, stop)):
            if (former := signal.getsignal(number)) is not signal.SIG_IGN:  # nohup
                last.callback(signal.signal, number, former)
                signal.signal(number, handler)
        last.callback(termios.tcsetattr, fd, termios.TCSADRAIN, before)
        tty.setcbreak(fd)
        yield Keys(fd)


def is_live(console: Console) -> bool:
    """Whether what stands there can be drawn anew: no pipe can, nor a terminal like that of Emacs' shell."""
    return console.is_terminal and not console.is_dumb_terminal
