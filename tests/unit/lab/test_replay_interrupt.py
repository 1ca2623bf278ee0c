"""An experiment that is interrupted or killed leaves no process behind, and gives the machine back at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = """
import os, pathlib, signal, sys, time
from valve_tools.replay.work import Workers, silent, spread

def work(folder):
    pathlib.Path(folder, str(os.getpid())).touch()
    time.sleep(600)

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # tests that run in a background job inherit "ignore"
    spread(work, [sys.argv[1]] * 6, silent, Workers(processes=2))
"""
PATIENCE_S = 200.0


def wait_until(what, is_so) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def is_alive(pid: int) -> bool:
    """A dead process that nobody has waited for yet is not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_workers_end_with_their_parent_however_it_ends(tmp_path, sent):
    script, began = tmp_path / "script.py", tmp_path / "began"
    script.write_text(SCRIPT)
    began.mkdir()
    parent = subprocess.Popen([sys.executable, str(script), str(began)], start_new_session=True)
    try:
        wait_until("both workers are at work", lambda: len(list(began.iterdir())) == 2 or parent.poll() is not None)
        workers = [int(path.name) for path in began.iterdir()]
        assert len(workers) == 2

        if sent == signal.SIGINT:
            os.killpg(parent.pid, sent)  # as a terminal does
        else:
            parent.send_signal(sent)

        assert parent.wait(PATIENCE_S) != 0
        wait_until("no worker is left", lambda: not any(is_alive(pid) for pid in workers))
        assert len(list(began.iterdir())) == 2  # no worker began the next task
    finally:
        parent.kill()
        parent.wait()
