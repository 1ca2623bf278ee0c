"""Processes that come to valved and leave again, with and without channels: `joiner.py RUN_FOLDER JOINS SEED`.

Each process joins twenty times. It closes its link, or the file of its channels first, and ends by an exit or a kill.
Eight of them live at a time. Each user has a tenth of valved's loop (valved/clients/turns.py), so where this is root
they come as eight users: as one, ten thousand joins would take minutes.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

from valve_tools.bench import crowd

from valved.model.ids import Role

EACH = 20
USERS = 8
FIRST_UID = 61_000
HERE = Path()  # the run folder: its parents are closed to other users


@contextlib.contextmanager
def user(uid: int) -> Iterator[None]:
    """While it connects and says HELLO."""
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(uid)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)


def join(uid: int, chance: random.Random) -> None:
    with user(uid):
        sock, fds = crowd._welcome(HERE, Role.OFFLINE)
    before = set(os.listdir("/proc/self/fd"))
    if chance.random() < 0.3:
        crowd._show_channels(sock, 0, 2)
    opened = [int(fd) for fd in set(os.listdir("/proc/self/fd")) - before if os.path.exists(f"/proc/self/fd/{fd}")]
    leaves = [sock.detach(), *fds, *opened]
    chance.shuffle(leaves)
    for fd in leaves:
        os.close(fd)


def live(uid: int, joins: int, chance: random.Random) -> None:
    for _ in range(joins - 1):
        join(uid, chance)
    with user(uid):
        crowd._welcome(HERE, Role.OFFLINE)
    os.kill(os.getpid(), signal.SIGKILL) if chance.random() < 0.5 else os._exit(0)


def begin(uid: int, joins: int, seed: int) -> int:
    """The process that joins so often."""
    pid = os.fork()
    if not pid:
        try:
            live(uid, joins, random.Random(seed))
        finally:
            os._exit(1)
    return pid


def main(run_dir: str, joins: str, seed: str) -> None:
    os.chdir(run_dir)
    left, chance, living = int(joins), random.Random(int(seed)), dict[int, int]()
    free = [FIRST_UID + number for number in range(USERS)]
    while left or living:
        while left and free:
            each, uid = min(EACH, left), free.pop()
            left -= each
            living[begin(uid, each, chance.getrandbits(32))] = uid
        pid, status = os.wait()
        free.append(living.pop(pid))
        if os.WIFEXITED(status) and os.WEXITSTATUS(status):
            sys.exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
