"""Runs `valve tune` as its users do: a process of its own, with a home of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import IO

import pytest

HERE = Path(__file__).resolve().parent
ROOM = HERE.parents[1] / "tune"
LONG_S = 1500.0  # only ends a test that hangs


class Command:
    def __init__(self, home: Path, *, fake: bool = True) -> None:
        self.home, self._fake = home, fake

    def environment(self, **more: str) -> dict[str, str]:
        paths = [*([str(HERE / "fake")] if self._fake else []), str(ROOM)]
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VALVE_"))}
        state = str(self.home / "state")
        return {**kept, "PYTHONPATH": ":".join(paths), "XDG_STATE_HOME": state, "HF_HUB_OFFLINE": "1", **more}

    def start(self, *arguments: str, errors: IO[str] | int = subprocess.PIPE, **more: str) -> subprocess.Popen[str]:
        argv = [sys.executable, "-m", "valve_tune.serve", *map(str, arguments)]
        return subprocess.Popen(
            argv, env=self.environment(**more), cwd=self.home, text=True, stdout=subprocess.PIPE, stderr=errors
        )

    def run(self, *arguments: str, code: int = 0, **more: str) -> str:
        process = self.start(*arguments, **more)
        out, err = process.communicate(timeout=LONG_S)
        assert process.returncode == code, (process.returncode, out, err)
        return out + err


def until(condition, what: str):
    """What the condition gives, once it gives something."""
    deadline = time.monotonic() + LONG_S
    while time.monotonic() < deadline:
        if found := condition():
            return found
        time.sleep(0.02)
    pytest.fail(f"never: {what}")
