"""Another process that stops and starts this one's compute channels by the driver's own call, as valved does."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from cuda_driver import Cuda
from rm_process import RmProcess, Tree, grow_tree
from valve_tools.emulator.client import NodeMoment


@dataclass(frozen=True, slots=True)
class Gate:
    cuda: Cuda
    tree: Tree

    def _switch(self, on: bool) -> None:
        pairs = [(c.h_client, c.h_channel) for c in self.cuda.channels() if c.is_compute]
        status = self.tree.gate(pairs, on)
        assert status == 0, f"the driver refused the gate with {status:#x}"

    def close(self) -> None:
        self._switch(False)

    def open(self) -> None:
        self._switch(True)

    def wait(self, what: str, **wanted: int) -> NodeMoment:
        """Until a field, summed over our compute channels, has the value: wait("queued", pending=3)."""

        def holds(state: NodeMoment) -> bool:
            mine = [c for c in state.of(os.getpid()) if c.is_compute]
            return all(sum(getattr(c, name) for c in mine) == value for name, value in wanted.items())

        return self.cuda.emulator.wait(holds, what)


@contextmanager
def gate_of(cuda: Cuda) -> Iterator[Gate]:
    with RmProcess(cuda.emulator.directory) as process:
        yield Gate(cuda, grow_tree(process, gpu=cuda.device, channels=0, scheduled=False))
