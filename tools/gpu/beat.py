"""The page that a workload beats in (native/lab.h, struct beat), as far as the lab's Python reads and writes it."""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

BYTES = 12288
MAGIC = 0x54414542
READY, STOP, DONE, GATE, LAUNCHES, MARK = 8, 12, 16, 20, 32, 4104


class Beat:
    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            self._page = mmap.mmap(file.fileno(), BYTES)

    def _word(self, at: int) -> int:
        return int(struct.unpack_from("<I", self._page, at)[0])

    @property
    def is_ready(self) -> bool:
        return self._word(0) == MAGIC and self._word(READY) != 0

    @property
    def is_done(self) -> bool:
        return self._word(DONE) != 0

    @property
    def mark(self) -> int:
        """Differs at every beat."""
        return int(struct.unpack_from("<Q", self._page, MARK)[0])

    @property
    def launches(self) -> int:
        return int(struct.unpack_from("<Q", self._page, LAUNCHES)[0])

    def go(self) -> None:
        """Let a workload that was started held begin."""
        self._page[GATE : GATE + 4] = struct.pack("<I", 0)

    def stop(self) -> None:
        """Ask the workload to end by itself."""
        self._page[STOP : STOP + 4] = struct.pack("<I", 1)

    def close(self) -> None:
        self._page.close()
