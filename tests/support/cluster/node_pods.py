"""Workloads of tests/support/card/node_workload.py as pods of a real node, told what to do through files they share."""

from __future__ import annotations

import mmap
import os
import struct
import sys
from pathlib import Path
from typing import Any

import node_workload
from valve_kube import names
from valve_tools.cluster.controlplane import wait_for
from valve_tools.cluster.node import RealNode
from valve_tools.cluster.workpods import HOST_FOLDERS

WORKLOAD = Path(node_workload.__file__)
PATIENCE_S = 200.0  # ends only a hung test


def folders() -> list[str]:
    """Where Python and the workload are, less what every pod has."""
    wanted = [sys.prefix, sys.base_prefix, str(WORKLOAD.parent)]
    return [path for path in dict.fromkeys(wanted) if not any(path.startswith(f"{one}/") for one in HOST_FOLDERS)]


class OfflinePod:
    """An endless heartbeat in a pod. `beats` rise while it may run."""

    def __init__(self, node: RealNode, name: str, **pod: Any) -> None:
        self.node, self.name = node, name
        shared = node.folder / name
        shared.mkdir(exist_ok=True)  # by a pod of this name that the kubelet turned away
        page = shared / "page"
        page.write_bytes(bytes(4096))
        with page.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 4096)
        command = [sys.executable, str(WORKLOAD), "offline", str(page)]
        self.made = node.pods.create(node.pods.make(name, command, folders=[*folders(), str(shared)], **pod))

    @property
    def beats(self) -> int:
        return int(struct.unpack_from("<Q", self._map, 0)[0])

    def wait_beating(self) -> None:
        seen = self.beats
        wait_for(f"{self.name} beats", lambda: self.beats > seen + 2, PATIENCE_S)


class OnlinePod:
    """A service in a pod that launches on command, through two pipes in a shared folder."""

    def __init__(self, node: RealNode, name: str, *, limit: str = names.ONLINE_RESOURCE, **pod: Any) -> None:
        self.node, self.name = node, name
        shared = node.folder / name
        shared.mkdir()
        for pipe in ("in", "out"):
            os.mkfifo(shared / pipe)
        program = f"exec {sys.executable} {WORKLOAD} online < {shared}/in > {shared}/out"
        self.made = node.pods.create(
            node.pods.make(name, ["/box/sh", "-c", program], limit=limit, folders=[*folders(), str(shared)], **pod)
        )
        # Both ends for reading and writing: opening never waits, and a container that is slow finds its end open.
        self._in = os.open(shared / "in", os.O_RDWR)
        self._out = os.fdopen(os.open(shared / "out", os.O_RDWR), "r")

    def wait_ready(self) -> None:
        self.node.pods.wait_phase(self.name)
        assert self._line() == "ready\n"

    def begin(self, us: int) -> None:
        """A launch whose end nobody waits for."""
        os.write(self._in, f"spin {us}\n".encode())
        self._line()

    def launch(self, us: int = 100) -> tuple[int, int, int]:
        os.write(self._in, f"launch {us}\n".encode())
        before, launched, done = map(int, self._line().split())
        return before, launched, done

    def _line(self) -> str:
        import select

        readable, _, _ = select.select([self._out], [], [], PATIENCE_S)
        assert readable, f"{self.name} says nothing:\n{self.node.pods.log(self.name)}"
        return self._out.readline()

    def close(self) -> None:
        os.close(self._in)
        self._out.close()
