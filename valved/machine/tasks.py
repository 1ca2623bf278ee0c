"""How many tasks its control groups and its user leave valved. gRPC ends it (SIGABRT) where it gets no thread."""

from __future__ import annotations

import os
import resource
from contextlib import suppress
from pathlib import Path

# One GPU: 24 threads after the start, 44 beside 64 callers of the API at once. Each further GPU has one more.
LEAST_LEFT = 40
MINE, ROOT, PROC = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"), Path("/proc")


def few_tasks(mine: Path = MINE, root: Path = ROOT, proc: Path = PROC) -> str:
    """What is wrong, for people; empty: there is room, or no limit can be read."""
    limits = [("pids.max", _left(group)) for group in _groups(mine, root)]
    limits.append(("its user's limit, ulimit -u", _left_to_user(proc)))
    left, name = min(((left, name) for name, left in limits if left is not None), default=(LEAST_LEFT, ""))
    if left >= LEAST_LEFT:
        return ""
    return f"valved gets {left} more tasks ({name}) and may need {LEAST_LEFT}: one that it does not get can end it"


def _left_to_user(proc: Path) -> int | None:
    """Each thread counts, of all its processes on this machine. Root has no such limit."""
    uid, most = os.geteuid(), resource.getrlimit(resource.RLIMIT_NPROC)[0]
    if uid == 0 or most == resource.RLIM_INFINITY:
        return None
    taken = 0
    for pid in filter(str.isdecimal, os.listdir(proc)):
        with suppress(OSError):  # it has ended
            tasks = (proc / pid / "task").stat()
            taken += (tasks.st_nlink - 2) * (tasks.st_uid == uid)
    return most - taken


def _groups(mine: Path, root: Path) -> list[Path]:
    """Its own and those above: each has a limit."""
    found: list[Path] = []
    with suppress(OSError):  # a name may have any byte but the end of a line
        lines = os.fsdecode(mine.read_bytes()).split("\n")
        for _, controllers, path in (line.split(":", 2) for line in lines if line.count(":") >= 2):
            if controllers in ("", "pids"):
                top = root / controllers
                own = top / path.lstrip("/")
                found += [own, *(group for group in own.parents if group.is_relative_to(top))]
    return found


def _left(group: Path) -> int | None:
    with suppress(OSError, ValueError):  # no such file, or "max"
        return int((group / "pids.max").read_text()) - int((group / "pids.current").read_text())
    return None
