"""Offline channels that the state file does not name yet, a line each.

That file is written a moment after something changed, to save many writes. A channel may be off before, and then
nobody but valved knows of it. So its line is there before it can be switched off, and goes with the next state file.
Each line says of which boot, driver and version it is: the state file beside it may be another's still.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import msgspec

from valved.fds import Fds, read_if_there, write_private
from valved.machine.ports import PromptPort
from valved.state.saved import SavedClient

FILE = "unsaved.jsonl"


class _Line(SavedClient, frozen=True, kw_only=True, omit_defaults=True):
    of: str = ""  # an older valved says nothing: then its line is of the state file beside it


class Unsaved:
    """`of`: this boot, driver and version. `is_ours`: whether its folder is still this daemon's."""

    def __init__(self, path: Path, of: str, files: PromptPort, is_ours: Callable[[], bool] = lambda: True) -> None:
        self._is_ours = is_ours
        self._path = path
        self._of = of
        self._files = files
        self._lock = threading.Lock()  # of all below: lines are added by one thread and removed by another
        self._lines: list[tuple[int, bytes]] = []  # since the last state that was written
        self._count = 0
        self._is_empty = False

    def put(self, client: SavedClient) -> None:
        """A file that takes no line must not keep a channel from being stopped."""
        fields = {name: getattr(client, name) for name in SavedClient.__struct_fields__}
        line = msgspec.json.encode(_Line(**fields, of=self._of))
        self._count += 1
        with contextlib.suppress(OSError):
            self._files.do(partial(self._append, self._count, b"\n" + line))  # ends one that a full disk cut short

    def mark(self) -> int:
        """All that was put up to now: a state that is taken now names those channels."""
        return self._count

    def clear(self, mark: int) -> None:
        """That state is written."""
        with self._lock:
            self._lines = [(number, line) for number, line in self._lines if number > mark]
            if self._is_empty:
                return
            with contextlib.suppress(OSError):
                if self._lines:
                    fresh = self._path.with_name(f".{self._path.name}.new")
                    write_private(fresh, b"".join(line for _, line in self._lines))
                    fresh.replace(self._path)
                else:
                    self._path.unlink(missing_ok=True)
                    self._is_empty = True

    def read(self, *, with_older: bool) -> Iterator[SavedClient]:
        """A predecessor's, as far as they are of this boot, driver and version. A line that was cut short costs its own
        channel alone. `with_older`: also those that do not say. OSError: nobody knows."""
        for text in (read_if_there(self._path) or b"").splitlines():
            with contextlib.suppress(msgspec.MsgspecError, ValueError):
                line = msgspec.json.decode(text, type=_Line)
                if line.of == self._of or (with_older and not line.of):
                    yield line

    def _append(self, number: int, line: bytes) -> None:
        with self._lock, contextlib.suppress(OSError), Fds() as fds:
            self._lines.append((number, line))
            if not self._is_ours():
                return
            self._is_empty = False
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC
            fd = fds.own(os.open(self._path, flags, 0o600))
            os.write(fd, line)
