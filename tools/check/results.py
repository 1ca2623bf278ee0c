"""A results page that a former product made fails the check: default settings and policy sources have a hash on it."""

from __future__ import annotations

import subprocess
import sys

from valve_tools.check.tree import ROOT


def findings() -> list[str]:
    return stale()


def stale() -> list[str]:
    # From another folder: in the root, `valved` would be the source tree, where nothing is compiled.
    folder = ROOT / "docs" / "results"
    argv = [sys.executable, "-m", "valve_tools.replay.command", "stale", str(folder)]
    done = subprocess.run(argv, cwd=ROOT / "build", check=False, capture_output=True, text=True)
    return (done.stdout + done.stderr).strip().splitlines() if done.returncode else []
