"""A product node for the lab: valved and engines on the card at hand, or on an emulated one. Imported only where the
product is installed.

Leaving it drains valved first, which ends offline workloads and enables their channels for that moment. A leash does
the same when the lab dies.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from valve_tools.demo.node import PATIENCE_S, EmulatedNode
from valve_tools.gpu import leash

Seen = TypeVar("Seen")
VALVE = (sys.executable, "-m", "valved.cli.main")  # a package installed with --target has no `valve` beside python
GRACE_S = 3.0  # an offline workload has so long to end; well within a leash's patience
ENGINE_S = 240.0  # a cold PyTorch reads gigabytes before it says a word


class LabNode(EmulatedNode):
    valve = VALVE
    ends_with_us = False  # its leash ends what it started, and drains valved before

    def __init__(self, folder: Path, *, emulated: bool) -> None:
        super().__init__(folder)
        self.config = f"leave_grace_s = {GRACE_S}\n{self.config}"
        self._is_emulated = emulated

    def __enter__(self) -> LabNode:
        self.run_dir.mkdir(parents=True, exist_ok=True)
        self._untie = leash.tie(self.folder, run_dir=str(self.run_dir))
        if self._is_emulated:
            super().__enter__()
            assert self._server is not None
            leash.note(self.folder, [self._server.pid])
        return self

    def wait_for(self, look: Callable[[], Seen], what: str, patience_s: float = ENGINE_S) -> Seen:
        return super().wait_for(look, what, patience_s)

    def environment(self, extra: Mapping[str, str] | None = None) -> dict[str, str]:
        if self._is_emulated:
            return super().environment(extra)
        return {**os.environ, "VALVE_RUN_DIR": str(self.run_dir), **(extra or {})}

    def start_valved(self, *flags: str) -> subprocess.Popen[bytes]:
        valved = super().start_valved(*flags)
        leash.note(self.folder, [valved.pid])
        return valved

    def adopt(self, child: subprocess.Popen[Any]) -> None:
        super().adopt(child)
        leash.note(self.folder, [child.pid])

    def __exit__(self, *_: object) -> None:
        if self.valved is not None and self.valved.poll() is None:
            subprocess.run([*VALVE, "drain", "--stop"], env=self.environment(), check=False, capture_output=True)
            try:
                self.valved.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                self.valved.kill()
        for child in self._children:
            if child.poll() is None:
                child.terminate()
                try:
                    child.wait(PATIENCE_S)
                except subprocess.TimeoutExpired:
                    child.kill()
        super().__exit__()
        self._untie()
