"""What a real node leaves on the machine when its process is killed, and how the next one takes it down.

Kubelet, containerd and valved die with the process that started them. What they started does not: containers and their
shims, the emulator's server, mounts below the node's folder."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

PREFIX, CONTAINERD = "vn-", "c.sock"  # of a node's folder, and of the socket in it


def sweep() -> list[Path]:
    """Take down what nodes whose process was killed left: containers, the emulator's server, mounts, folders.

    Every node holds the lock of its folder, so a lock that can be taken has no owner.
    """
    swept = []
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError), locked(folder):
            end_containers(folder)
            end_with(f"{folder}/emu")
            unmount(folder)
            shutil.rmtree(folder, ignore_errors=True)
            swept.append(folder)
    return swept


def end_containers(folder: Path) -> None:
    """Shims and containers that outlived their containerd, known by its socket in the folder that is ours alone."""
    for pid in end_with(f"-address {folder}/{CONTAINERD}"):
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def end_with(words: str) -> list[int]:
    """End the processes that have these words in their command; returns the children they had."""
    orphans: list[int] = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            pid = int(path.parent.name)
            if words not in path.read_text(errors="replace").replace("\0", " ") or pid == os.getpid():
                continue
            orphans += map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
            os.kill(pid, signal.SIGKILL)
    return orphans


def unmount(folder: Path) -> None:
    """What kubelet and containerd left mounted below the folder, the innermost first."""
    mounts = Path("/proc/mounts").read_text(encoding="utf-8").splitlines()
    inside = [line.split()[1] for line in mounts if line.split()[1].startswith(f"{folder}/")]
    for path in sorted(inside, reverse=True):
        subprocess.run(["umount", "-l", path], check=False, capture_output=True)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """As long as this process lives at most. BlockingIOError: another process has it."""
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(lock)
