"""A results page that a former product made fails the check: default settings and policy sources have a hash on it."""

from __future__ import annotations

import sys

from valve_tools.check.tree import ROOT, command


def findings() -> list[str]:
    # From another folder: in the root, `valved` would be the source tree, where nothing is compiled.
    argv = (sys.executable, "-m", "valve_tools.replay.command", "stale", str(ROOT / "docs" / "results"))
    return command(*argv, cwd=ROOT / "build")
