"""The engine hook as its wheel would install it; in the environment of these tests it is not."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

HOOK = Path(__file__).resolve().parents[2] / "patches" / "hook"


def lay_in() -> None:
    if importlib.util.find_spec("valve_hook") is not None:
        return
    spec = importlib.util.spec_from_file_location(
        "valve_hook", HOOK / "__init__.py", submodule_search_locations=[str(HOOK)]
    )
    assert spec is not None
    assert spec.loader is not None
    sys.modules["valve_hook"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["valve_hook"])
