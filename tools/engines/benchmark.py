"""vLLM's benchmark client as the demo drives it: client.py, in a process of its own."""

from __future__ import annotations

import json
import queue
import subprocess
import threading

START_S = 600.0  # only ends a hung run


class Client:
    """One process; one benchmark at a time."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()
        assert self._lines.get(timeout=START_S) == "ready\n", "the benchmark client failed; see client.log"

    def begin(self, flags: list[str]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(flags) + "\n")
        self._process.stdin.flush()

    def is_over(self) -> bool:
        """True once for each benchmark."""
        if self._lines.empty():
            return False
        assert self._lines.get() == "over\n", "the benchmark client failed; see client.log"
        return True

    def _read(self) -> None:
        """One empty line says that it has ended."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")
