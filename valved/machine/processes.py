"""ProcessPort: who a process is and whether it still exists, from /proc and pidfds. A process that is gone is an empty
value, never an error: it may vanish between any two lines."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path

_FIELD_STATE = 3
_FIELD_PARENT = 4
_FIELD_FLAGS = 9
_FIELD_START = 22
_EXITING = 0x4  # PF_EXITING of include/linux/sched.h
_NO_PROCESS = (errno.ESRCH, errno.EINVAL, errno.ENOENT)  # the last two: the number is a thread's by now
_DEPTH = 64  # no honest chain of ancestors is deeper; a torn one must not loop


class LinuxProcesses:
    """Processes as this machine's /proc shows them. `root` lets tests build a world of their own."""

    def __init__(self, root: Path = Path("/proc")) -> None:
        self._root = root

    def _read(self, pid: int | str, name: str) -> str | None:
        try:
            return (self._root / str(pid) / name).read_text(errors="replace")
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            return None

    def _stat(self, pid: int | str) -> list[str] | None:
        """Fields of stat from the third on: the second, the name, may hold blanks and brackets of its own."""
        text = self._read(pid, "stat")
        if text is None or ")" not in text:
            return None
        return text[text.rindex(")") + 1 :].split()

    def start_time(self, pid: int) -> int | None:
        """None also for a zombie: nothing of it runs any more."""
        fields = self._stat(pid)
        if fields is None or len(fields) <= _FIELD_START - _FIELD_STATE or fields[0] in ("Z", "X"):
            return None
        return int(fields[_FIELD_START - _FIELD_STATE])

    def is_ending(self, pid: int, start_time: int) -> bool:
        """A first thread that is a zombie says nothing of the others, one that runs says it all. No more is read than
        needed: a process may have thousands. Where it cannot be read, it lives."""
        try:
            leader = self._stat(pid)
            if leader is None or int(leader[_FIELD_START - _FIELD_STATE]) != start_time:
                return True
            if _runs(leader):
                return False
            with os.scandir(self._root / str(pid) / "task") as threads:
                found = (self._stat(f"{pid}/task/{thread.name}") for thread in threads)
                return not any(fields and _runs(fields) for fields in found)
        except (FileNotFoundError, ProcessLookupError):
            return True
        except OSError:
            return False

    def is_stopped(self, pid: int) -> bool:
        """A thread that the kernel keeps (D) meets the signal before it is back. Where it cannot be read, it is."""
        try:
            with os.scandir(self._root / str(pid) / "task") as threads:
                found = (self._stat(f"{pid}/task/{thread.name}") for thread in threads)
                return not any(fields and fields[0] in ("R", "S") for fields in found)
        except OSError:
            return True

    def ancestors(self, pid: int) -> Sequence[int]:
        chain: list[int] = []
        while pid > 0 and len(chain) < _DEPTH:
            fields = self._stat(pid)
            if fields is None or len(fields) <= _FIELD_PARENT - _FIELD_STATE:
                break
            chain.append(pid)
            pid = int(fields[_FIELD_PARENT - _FIELD_STATE])
        return chain

    def cgroup(self, pid: int) -> str | None:
        """The unified (v2) path, else that of the first v1 controller; on a hybrid machine the one that is not /."""
        text = self._read(pid, "cgroup")
        lines = [line.split(":", 2) for line in (text or "").splitlines() if line.count(":") >= 2]
        paths = sorted((path for _, _, path in lines), key=lambda path: path == "/")
        unified = [path for hierarchy, _, path in lines if hierarchy == "0" and path != "/"]
        return next(iter(unified or paths), None)

    def comm(self, pid: int) -> str:
        return (self._read(pid, "comm") or "").rstrip("\n")

    def open_pidfd(self, pid: int) -> int:
        try:
            return os.pidfd_open(pid)
        except OSError as error:
            if error.errno in _NO_PROCESS:
                return -1
            raise


def _runs(fields: list[str]) -> bool:
    """Fields of a thread's stat, from the third on."""
    return fields[0] not in ("Z", "X") and not int(fields[_FIELD_FLAGS - _FIELD_STATE]) & _EXITING
