"""Processes that come to valved and leave again, with and without channels: `joiner.py RUN_FOLDER JOINS SEED`.

Each process joins twenty times. It closes its link, or the file of its channels first, and ends by an exit or a kill.
"""

from __future__ import annotations

import os
import random
import signal
import sys
from pathlib import Path

from valve_tools.bench import crowd

from valved.model.ids import Role

EACH = 20


def join(run_dir: Path, chance: random.Random) -> None:
    sock, fds = crowd._welcome(run_dir, Role.OFFLINE)
    before = set(os.listdir("/proc/self/fd"))
    if chance.random() < 0.3:
        crowd._show_channels(sock, 0, 2)
    opened = [int(fd) for fd in set(os.listdir("/proc/self/fd")) - before if os.path.exists(f"/proc/self/fd/{fd}")]
    leaves = [sock.detach(), *fds, *opened]
    chance.shuffle(leaves)
    for fd in leaves:
        os.close(fd)


def live(run_dir: Path, joins: int, chance: random.Random) -> None:
    for _ in range(joins - 1):
        join(run_dir, chance)
    crowd._welcome(run_dir, Role.OFFLINE)
    os.kill(os.getpid(), signal.SIGKILL) if chance.random() < 0.5 else os._exit(0)


def main(run_dir: str, joins: str, seed: str) -> None:
    left, chance = int(joins), random.Random(int(seed))
    while left:
        each = min(EACH, left)
        left -= each
        child_seed = chance.getrandbits(32)
        pid = os.fork()
        if not pid:
            try:
                live(Path(run_dir), each, random.Random(child_seed))
            finally:
                os._exit(1)
        _, status = os.waitpid(pid, 0)
        if os.WIFEXITED(status) and os.WEXITSTATUS(status):
            sys.exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
