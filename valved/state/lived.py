"""Which online processes were welcomed, as files: a successor must know them however suddenly this valved ends.

The state file is written a moment after something changed, to save many writes. A process may launch from its welcome
on, so what says that it lives is there before: an empty file, named by pid and start time, in the folder `online`.
A full disk takes that, and no state that names its claim: it is claimed again when it comes back (clients/claimed.py).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

from valved.machine.ports import PromptPort
from valved.model.ids import ProcessId

FOLDER = "online"


class Lived:
    def __init__(self, run_dir: Path, files: PromptPort) -> None:
        self._folder = run_dir / FOLDER
        self._files = files
        self.known: set[ProcessId] = set()
        # That predecessors welcomed, and that lived as this valved started: another boot has the same numbers again.
        self.former: frozenset[ProcessId] = frozenset()

    def read(self) -> set[ProcessId]:
        """The processes that predecessors welcomed and nobody has removed. OSError: that cannot be told."""
        for name in os.listdir(self._folder) if self._folder.exists() else ():
            pid, _, start_time = name.partition("-")
            if pid.isdecimal() and start_time.isdecimal():
                self.known.add(ProcessId(pid=int(pid), start_time=int(start_time)))
        return set(self.known)

    def put(self, process: ProcessId) -> None:
        """Before it is welcomed. A folder that takes no file must not keep it from being served."""
        if process in self.known:
            return
        try:
            self._files.do(partial(self._make, self._path(process)))
        except TimeoutError:  # it will be there, and is to be removed then
            pass
        except OSError:
            return
        self.known.add(process)

    def keep(self, is_alive: Callable[[ProcessId], bool]) -> None:
        """Remove those that have ended."""
        for process in [process for process in self.known if not is_alive(process)]:
            self.known.discard(process)
            with contextlib.suppress(OSError):
                self._files.do(partial(self._path(process).unlink, missing_ok=True))

    def _make(self, path: Path) -> None:
        self._folder.mkdir(mode=0o700, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            os.mknod(path, 0o600)  # which takes no descriptor

    def _path(self, process: ProcessId) -> Path:
        return self._folder / f"{process.pid}-{process.start_time}"
