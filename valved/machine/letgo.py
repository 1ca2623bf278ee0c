"""Lets processes go that stand by a signal of valved, once that valved is gone. A program of its own: it imports
nothing of Valve, so it is there within milliseconds. It hears on its standard input who stands (thawer.py); the end of
that pipe is the end of valved, however it came.
"""

import contextlib
import os
import signal
import sys

_FIELD_START = 22 - 3  # of /proc/PID/stat, counted from the third field on


def main() -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):  # whoever ends valved sends them to us, too
        signal.signal(number, signal.SIG_IGN)
    standing: set[tuple[int, int]] = set()
    for line in sys.stdin.buffer:
        sign, pid, start_time = line.split()
        (standing.add if sign == b"+" else standing.discard)((int(pid), int(start_time)))
    for process in standing:
        with contextlib.suppress(OSError, ValueError, IndexError):  # it has ended
            _let_go(*process)


def _let_go(pid: int, start_time: int) -> None:
    fd = os.pidfd_open(pid)
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
        if int(fields[_FIELD_START]) == start_time:
            signal.pidfd_send_signal(fd, signal.SIGCONT)
    finally:  # a thousand may stand
        os.close(fd)


if __name__ == "__main__":
    main()
