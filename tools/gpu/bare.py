"""The lab from a bare checkout, with nothing installed: gives the folder tools/ its package name, valve_tools."""

from __future__ import annotations

import sys
import types
from pathlib import Path


def main() -> int:
    package = types.ModuleType("valve_tools")
    package.__path__ = [str(Path(__file__).resolve().parents[1])]
    sys.modules["valve_tools"] = package
    sys.path.pop(0)  # our own folder: its module names are not meant to be top-level ones
    from valve_tools.gpu.command import main as lab

    return lab(sys.argv[1:])


if __name__ == "__main__":
    raise SystemExit(main())
