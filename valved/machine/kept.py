"""Reads how much memory the kernel charges to valved that valved itself no longer uses: somebody else keeps it.

Who makes a page of a shared file pays for it until nobody keeps the file. The same holds for the kernel's own memory of
a file, and of a packet until it is read. Nothing tells whether a certain one is kept, but the control group says how
much all of them are. To read that may take milliseconds: call it in a thread.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

OWN_MOST = 64 << 20  # pages that a client brought count as own, too, and would hide what is kept
KERNEL_OWN = 8 << 20  # of the kernel's memory: at rest 1.3 MB, and 1 KiB for each descriptor
KERNEL_FILE = 1 << 10
OLD_GROUP_OWN = 16 << 20  # more in version 1, where the figure has what the kernel could take back: names in /proc, say
PROC = Path("/proc")
SO_MEMINFO, MEMINFO = 55, struct.Struct("9I")  # Linux 4.12


def kept_bytes(folder: Path, trace: str = "", own: Callable[[], int] | None = None, proc: Path = PROC) -> int | None:
    """`folder`, `trace`: valved's own files, which may lie in memory. None: nothing tells. There is no control group
    for memory, or other processes have this one, too."""
    try:
        group = _group(proc)
        if group is None or not all(_is_ours(int(pid), proc) for pid in (group / "cgroup.procs").read_text().split()):
            return None
        charged = dict(line.split(" ", 1) for line in (group / "memory.stat").read_text().splitlines())
        shared = int(charged["total_shmem"] if "total_shmem" in charged else charged["shmem"])
        pages = shared - (own or _mapped_bytes)() - sum(_file_bytes(folder, trace, proc))
        return max(0, pages) + max(0, _kernel_bytes(group, charged))  # neither hides the other
    except (OSError, ValueError, KeyError):
        return None


def _group(proc: Path) -> Path | None:
    """Of version 1 where that has memory, else of version 2."""
    groups = {names: path for _, names, path in (line.split(":", 2) for line in _lines(proc / "self/cgroup"))}
    old = next((path for names, path in groups.items() if "memory" in names.split(",")), None)
    path = groups.get("") if old is None else old
    for line in _lines(proc / "self/mountinfo"):
        left, _, right = line.partition(" - ")
        kind, _, options = right.split(" ", 2)
        root, at = left.split(" ")[3:5]
        is_it = kind == "cgroup2" if old is None else kind == "cgroup" and "memory" in options.split(",")
        if is_it and path is not None and not (inside := os.path.relpath(path, root)).startswith(".."):
            return Path(at) / inside
    return None


def _kernel_bytes(group: Path, charged: dict[str, str]) -> int:
    """An eventfd takes 400 bytes. Half is its name, which version 2 counts as what could be taken back. Own is what
    living links leave unread, too: each has a bound (clients/connection.py), and if thousands of one account counted,
    all others were refused."""
    own = KERNEL_OWN + sum(KERNEL_FILE + _unread_bytes(int(fd)) for fd in os.listdir(PROC / "self/fd"))
    if "slab_unreclaimable" in charged:
        return 2 * (int(charged["slab_unreclaimable"]) - own)
    with contextlib.suppress(FileNotFoundError):
        return int((group / "memory.kmem.usage_in_bytes").read_text()) - own - OLD_GROUP_OWN
    return 0


def _unread_bytes(fd: int) -> int:
    """At the other end of a local socket. No call that waits for a stranger, should the number be another file's."""
    with contextlib.suppress(OSError):
        sock = socket.socket(fileno=fd)
        try:
            if sock.family == socket.AF_UNIX:
                return int(MEMINFO.unpack(sock.getsockopt(socket.SOL_SOCKET, SO_MEMINFO, MEMINFO.size))[2])
        finally:
            sock.detach()
    return 0


def _is_ours(pid: int, proc: Path) -> bool:
    """valved, or what it started (letgo.py)."""
    return pid == os.getpid() or _lines(proc / f"{pid}/stat")[-1].rpartition(")")[2].split()[1] == str(os.getpid())


def _mapped_bytes() -> int:
    """Pages of shared files that valved has mapped and made or seen: those of living clients, tables, books."""
    status = dict(line.split(":", 1) for line in _lines(PROC / "self/status"))
    return min(OWN_MOST, int(status["RssShmem"].split()[0]) << 10)


def _file_bytes(folder: Path, trace: str, proc: Path) -> Iterator[int]:
    """Others may put files of their own there."""
    traces = (Path(trace), Path(f"{trace}.1")) if trace and _is_in_memory(trace, proc) else ()
    for path in {*folder.iterdir(), *traces}:
        with contextlib.suppress(FileNotFoundError):
            about = path.lstat()
            if stat.S_ISREG(about.st_mode) and about.st_uid == os.geteuid():
                yield about.st_blocks * 512


def _is_in_memory(trace: str, proc: Path) -> bool:
    """By its name alone: its disk may hang."""
    best, is_there = Path("/"), False
    for line in _lines(proc / "self/mountinfo"):
        left, _, kind = line.partition(" - ")
        at = Path(left.split(" ")[4])
        if Path(trace).is_relative_to(at) and at.is_relative_to(best):
            best, is_there = at, kind.startswith("tmpfs ")
    return is_there


def _lines(path: Path) -> list[str]:
    return path.read_text(errors="replace").splitlines()
