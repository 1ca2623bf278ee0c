"""Where valved and its clients meet, and where the preload library lies. One place decides, everyone asks it.

The run folder: VALVE_RUN_DIR if set; /run/valve for root or where one exists that we may enter; else a folder of the
user's own. The shim follows the same order in C (shim/src/link/settings.c), but never looks in /tmp.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path
from urllib.parse import quote

SYSTEM_RUN_DIR = Path("/run/valve")
ENV_RUN_DIR = "VALVE_RUN_DIR"
ENV_ROLE = "VALVE_ROLE"
LINK_SOCKET = "link.sock"
CLIENT_FOLDER = "client"  # a folder with the link socket alone, to be mounted into containers
API_SOCKET = "valved.sock"
VIEW_SOCKET = "view.sock"  # answers questions, changes nothing
PAUSE_FILE = "pause"
DRAIN_FILE = "drain"
STATE_FILE = "state.json"
WEIGHTS_FILE = "weights.json"  # which online services share their weights (clients/sharing.py)
LOG_FILE = "valved.log"
MOST_NAME = 107 - len("/.link.sock.4194304")  # of a run folder, in bytes: Linux bounds the name of a socket


def run_dir() -> Path:
    """The run folder this process should use. PermissionError: its name is taken by another user."""
    asked = os.environ.get(ENV_RUN_DIR)
    if asked:
        return Path(asked).absolute()  # valved and the command that is run may have another folder to start from
    if os.geteuid() == 0 or os.access(SYSTEM_RUN_DIR / LINK_SOCKET, os.F_OK):
        return SYSTEM_RUN_DIR
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime:
        return Path(runtime, "valve")
    _refuse_strangers(_in_tmp())
    return _in_tmp()


def unfit(folder: Path) -> str:
    """Why no socket can be in this folder; empty: they can."""
    return f"its name is longer than {MOST_NAME} bytes" if len(os.fsencode(folder.absolute())) > MOST_NAME else ""


def make(folder: Path) -> None:
    """A run folder that is there from here on, and ours."""
    folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    if folder == _in_tmp():  # somebody may have been quicker
        _refuse_strangers(folder)


def _in_tmp() -> Path:
    return Path(f"/tmp/valve-{os.geteuid()}")


def _refuse_strangers(folder: Path) -> None:
    """Everybody may make a folder in /tmp. Its owner decides what is found in it: sockets, links, code of the hook."""
    with contextlib.suppress(FileNotFoundError):
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
            raise PermissionError(errno.EPERM, f"another user may write here; set {ENV_RUN_DIR}", str(folder))


def grpc_address(socket: Path) -> str:
    """A socket as gRPC's target, for servers and clients alike: the path is a part of a URI, in which %41 is an A, and
    need be no UTF-8."""
    return f"unix:{quote(os.fsencode(socket))}"


def preload_library() -> Path:
    """libvalve.so of this installation."""
    return Path(__file__).resolve().parent / "lib" / "libvalve.so"
