"""Where valved and its clients meet, and where the preload library lies. One place decides, everyone asks it.

The run folder: VALVE_RUN_DIR if set; /run/valve for root or where one exists that we may enter; else a folder of the
user's own. The shim follows the same order in C (shim/src/link/link.c).
"""

from __future__ import annotations

import os
from pathlib import Path

SYSTEM_RUN_DIR = Path("/run/valve")
ENV_RUN_DIR = "VALVE_RUN_DIR"
ENV_ROLE = "VALVE_ROLE"
LINK_SOCKET = "link.sock"
CLIENT_FOLDER = "client"  # a folder with the link socket alone, to be mounted into containers
API_SOCKET = "valved.sock"
VIEW_SOCKET = "view.sock"  # answers questions, changes nothing
PAUSE_FILE = "pause"
DRAIN_FILE = "drain"
WEIGHTS_FILE = "weights.json"  # which online services share their weights (clients/sharing.py)
LOG_FILE = "valved.log"


def run_dir() -> Path:
    """The run folder this process should use."""
    asked = os.environ.get(ENV_RUN_DIR)
    if asked:
        return Path(asked).absolute()  # the daemon and the programs that hear of it may work elsewhere
    if os.geteuid() == 0 or os.access(SYSTEM_RUN_DIR / LINK_SOCKET, os.F_OK):
        return SYSTEM_RUN_DIR
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return Path(runtime, "valve") if runtime else Path(f"/tmp/valve-{os.geteuid()}")


def preload_library() -> Path:
    """libvalve.so of this installation."""
    return Path(__file__).resolve().parent / "lib" / "libvalve.so"
