"""How many tasks its control groups leave valved. gRPC ends the process (SIGABRT) where it gets no thread."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

# One GPU: 24 threads after the start, 44 beside 64 callers of the API at once. Each further GPU has one more.
LEAST_LEFT = 40
MINE, ROOT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def few_tasks(mine: Path = MINE, root: Path = ROOT) -> str:
    """What is wrong, for people; empty: there is room, or no limit can be read."""
    left = min((found for group in _groups(mine, root) if (found := _left(group)) is not None), default=LEAST_LEFT)
    if left >= LEAST_LEFT:
        return ""
    return f"valved gets {left} more tasks (pids.max) and may need {LEAST_LEFT}: one that it does not get can end it"


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
