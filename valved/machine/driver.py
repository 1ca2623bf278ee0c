"""What this machine's NVIDIA driver says of itself."""

from __future__ import annotations

import contextlib
from pathlib import Path

from valved.model.states import DriverState

KNOWN_BRANCHES = range(535, 596)  # NV_BRANCH_FIRST to NV_BRANCH_LAST of proto/abi/nvrm.h
VERSION_FILE = Path("/proc/driver/nvidia/version")


def driver_state(version: str) -> DriverState:
    first = version.partition(".")[0]
    branch = int(first) if first.isdigit() else 0
    text = ""
    with contextlib.suppress(OSError):
        text = VERSION_FILE.read_text(encoding="ascii", errors="replace")
    return DriverState(
        version=version, branch=branch, known=branch in KNOWN_BRANCHES, open_modules="Open Kernel" in text
    )
