"""Offline channels that the state file does not name yet, a line each.

That file is written a moment after something changed, to save many writes. A channel may be off before, and then
nobody but valved knows of it. So its line is there before it can be switched off, and goes with the next state file.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from valved.fds import Fds, read_if_there
from valved.state.saved import SavedClient

FILE = "unsaved.jsonl"


class Unsaved:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._is_empty = False

    def put(self, client: SavedClient) -> None:
        """A file that takes no line must not keep a channel from being stopped."""
        with contextlib.suppress(OSError), Fds() as fds:
            fd = fds.own(os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600))
            self._is_empty = False
            os.write(fd, b"\n" + msgspec.json.encode(client) + b"\n")  # the line before may be cut short

    def clear(self) -> None:
        """The state file names them."""
        if not self._is_empty:
            with contextlib.suppress(OSError):
                self._path.unlink(missing_ok=True)
                self._is_empty = True

    def read(self) -> Iterator[SavedClient]:
        """A predecessor's. A line that was cut short (killed, or a full disk) is left out. OSError: nobody knows."""
        for line in (read_if_there(self._path) or b"").splitlines():
            with contextlib.suppress(msgspec.MsgspecError, ValueError):
                yield msgspec.json.decode(line, type=SavedClient)
