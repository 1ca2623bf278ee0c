"""What is wanted of a running job, answered between any two tiles in less than a microsecond."""

from __future__ import annotations

import mmap
import os
import time

from valve_tune.serve.folder import GO, PAUSE, STOP, WANTED, JobFolder
from valve_tune.train.report import Answer

LOOK_S = 0.05  # how often a paused job looks whether it may go on
ANSWERS = {GO[0]: Answer.GO, PAUSE[0]: Answer.PAUSE, STOP[0]: Answer.STOP}


class FolderControl:
    """Reads the byte that `valve tune pause` and others write; `stop` is the same process's own wish (Ctrl-C)."""

    def __init__(self, folder: JobFolder) -> None:
        path = folder.path / WANTED
        if not path.exists() or not path.stat().st_size:
            folder.want(GO)
        descriptor = os.open(path, os.O_RDWR)
        try:
            self._byte = mmap.mmap(descriptor, 1)
        finally:
            os.close(descriptor)
        self._stopped = False
        self.waited_s = 0.0

    def stop(self) -> None:
        self._stopped = True

    def answer(self) -> Answer:
        return Answer.STOP if self._stopped else ANSWERS.get(self._byte[0], Answer.GO)

    def wait(self) -> None:
        began = time.monotonic()
        time.sleep(LOOK_S)
        self.waited_s += time.monotonic() - began
