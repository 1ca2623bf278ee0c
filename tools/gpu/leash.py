"""Ends what the lab started when the lab dies: a valved drains first, so that every channel is on, then the rest.

Run as a process of its own: leash.py LAB-PID RUN-DIR FOLDER. RUN-DIR is valved's, or "-"; the lab adds the pids of what
it starts to FOLDER/pids, and unties the leash with FOLDER/leash.off.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

LOOK_S = 0.1
PATIENCE_S = 15.0


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in {"Z", "X"}


def note(folder: Path, pids: Iterable[int]) -> None:
    """These processes are on the leash, too."""
    with (folder / "pids").open("a") as file:
        file.writelines(f"{pid}\n" for pid in pids)


def noted(folder: Path) -> list[int]:
    path = folder / "pids"
    return [int(word) for word in path.read_text().split()] if path.exists() else []


def tie(folder: Path, pids: Iterable[int] = (), run_dir: str = "-") -> Callable[[], None]:
    """Start a leash; the value unties it."""
    off = folder / "leash.off"
    off.unlink(missing_ok=True)
    note(folder, pids)
    argv = [sys.executable, str(Path(__file__).resolve()), str(os.getpid()), run_dir, str(folder)]
    with (folder / "leash.log").open("wb") as log:
        subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    return off.touch


def main(argv: list[str]) -> int:
    lab, run_dir, folder = int(argv[0]), argv[1], Path(argv[2])
    os.setsid()
    while is_alive(lab):
        if (folder / "leash.off").exists():
            return 0
        time.sleep(LOOK_S)
    if run_dir != "-":
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            env = {**os.environ, "VALVE_RUN_DIR": run_dir}
            subprocess.run(
                [sys.executable, "-m", "valved.cli.main", "drain", "--stop"], env=env, timeout=PATIENCE_S, check=False
            )
    for number in (signal.SIGTERM, signal.SIGKILL):  # the channels are on by now
        for pid in filter(is_alive, noted(folder)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        end = time.monotonic() + PATIENCE_S
        while any(map(is_alive, noted(folder))) and time.monotonic() < end:
            time.sleep(LOOK_S)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
