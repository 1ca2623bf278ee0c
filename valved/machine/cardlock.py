"""Sees to it that one valved manages a GPU: a lock on the card's own device node, held for the life of the process.

Two daemons in different run folders would each let offline work run beside the online services of the other. The node
is what both must open, whichever user starts them and in whichever folder. Containers with nodes of their own are not
seen. A user may lock any file that it may open, so a lock of some other user does not keep root's valved from starting.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from pathlib import Path

from valved.errors import AlreadyRunning
from valved.fds import Fds, is_scarce

PATIENCE_S = 3.0  # a predecessor whose run folder was removed ends within this
AGAIN_S = 0.05
LOCKS = Path("/proc/locks")


class CardLock:
    def __init__(self, folder: Path = Path("/dev"), locks: Path = LOCKS) -> None:
        self._folder = folder
        self._locks = locks
        self._held = Fds()

    def take(self) -> None:
        """Lock every card of this machine, or say which one another valved has."""
        deadline = time.monotonic() + PATIENCE_S
        with Fds() as held:
            for minor in range(256):
                path = self._folder / f"nvidia{minor}"
                try:
                    fd = held.own(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
                except OSError as error:
                    if is_scarce(error):
                        raise  # the card may well be there
                    continue  # minors have gaps where a card is missing or not ours to open
                held.callback(_unlock, fd)
                self._await(path, fd, deadline)
            self._held = held.pop_all()

    def _await(self, path: Path, fd: int, deadline: float) -> None:
        while not _lock(fd):
            owner = self._owner(fd)
            if os.geteuid() == 0 and owner and _uid(owner) not in (0, None):
                break  # no daemon of root's: nobody is kept out by a lock that any user could take
            if time.monotonic() > deadline:
                who = f"process {owner}" if owner else "another process"
                raise AlreadyRunning(
                    f"{who} manages {path} already, and two valved would undo each other's stops",
                    field="--run-dir",
                    next_step="use that one, or stop it (lslocks names it)",
                )
            time.sleep(AGAIN_S)

    def release(self) -> None:
        self._held.close()

    def _owner(self, fd: int) -> int:
        """The pid that holds the lock of this file, from "1: FLOCK ADVISORY WRITE 4711 00:06:123 0 EOF"; 0: unknown."""
        node = os.fstat(fd)
        wanted = f"{os.major(node.st_dev):02x}:{os.minor(node.st_dev):02x}:{node.st_ino}"
        with contextlib.suppress(OSError, ValueError, IndexError):
            for line in self._locks.read_text(encoding="ascii").splitlines():
                words = line.split()
                if "FLOCK" in words and "->" not in words and words[5] == wanted:
                    return max(0, int(words[4]))
        return 0


def _lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True  # a node that cannot be locked: nothing to go by
    return True


def _unlock(fd: int) -> None:
    with contextlib.suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_UN)


def _uid(pid: int) -> int | None:
    try:
        return os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return None
