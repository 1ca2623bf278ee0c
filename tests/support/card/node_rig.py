"""A node with small workloads on it: what tests/node stand on. Waits on conditions, never on the clock."""

from __future__ import annotations

import mmap
import struct
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from valve.v1 import node_pb2
from valve_tools.demo.node import EmulatedNode
from valve_tools.emulator.client import NodeMoment

from valved.cli.client import NodeClient

WORKLOAD = Path(__file__).parent / "node_workload.py"


class Offline:
    """An endless heartbeat under `valve run --offline`."""

    def __init__(
        self,
        node: EmulatedNode,
        name: str,
        role: str = "offline",
        env: Mapping[str, str] | None = None,
        prefix: Sequence[str] = (),
    ) -> None:
        self.node = node
        self.page = node.folder / f"{name}.page"
        self.page.write_bytes(bytes(4096))
        with self.page.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 4096)
        argv = [*prefix, sys.executable, WORKLOAD, "offline", self.page]
        self.process = node.run(role, argv, name=name, env=env)
        self._ran_ns = time.monotonic_ns()

    @property
    def beats(self) -> int:
        return int(struct.unpack_from("<Q", self._map, 0)[0])

    @property
    def last_beat_ns(self) -> int:
        return int(struct.unpack_from("<Q", self._map, 8)[0])

    def wait_running(self) -> None:
        """It beats, and beats again: really running now, not a beat from before."""
        seen = self.beats
        self.node.wait_for(lambda: self.beats > seen + 2, "the offline heartbeat moves")
        self._ran_ns = self.last_beat_ns

    def wait_stopped(self) -> None:
        """Its channels are off at the card and no executor is active: no beat can follow. Or they were, since it was
        last seen running, and are on again: on a busy machine a cooldown may be over before anybody looks."""
        self.node.emulator.wait(
            lambda state: self._is_off(state) or self._was_off(state), "the offline channels are off and idle"
        )

    def wait_off(self) -> None:
        """The same, beside a service that is busy without a break: they stay off."""
        self.node.emulator.wait(self._is_off, "the offline channels are off and idle")

    def _is_off(self, state: NodeMoment) -> bool:
        compute = [channel for channel in state.of(self.process.pid) if channel.is_compute]
        return any(c.disabled for c in compute) and not any(c.active for c in compute)

    def _was_off(self, state: NodeMoment) -> bool:
        done = [gate for gate in state.gates if gate.status == 0 and gate.channels]
        stops = [gate.stopped_ns for gate in done if not gate.on and gate.stopped_ns > self._ran_ns]
        return bool(stops) and any(gate.on and gate.done_ns > stops[0] for gate in done)


class Online:
    """A service under `valve run --online` that launches on command."""

    def __init__(
        self,
        node: EmulatedNode,
        name: str,
        role: str = "online",
        env: Mapping[str, str] | None = None,
        prefix: Sequence[str] = (),
    ) -> None:
        command = [*prefix, sys.executable, str(WORKLOAD), "online"]
        if role:
            command = [str(Path(sys.executable).parent / "valve"), "run", f"--{role}", "--name", name, "--", *command]
        with (node.folder / f"{name}.log").open("ab") as log:
            self.process = subprocess.Popen(
                command,
                env=node.environment(env),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd="/",
            )
        node.adopt(self.process)
        self.node = node

    def wait_ready(self) -> None:
        assert self._line() == "ready\n"

    def launch(self, us: int = 100) -> tuple[int, int, int]:
        """One kernel and its end: (before the call, after the call, after it finished), CLOCK_MONOTONIC."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"launch {us}\n")
        self.process.stdin.flush()
        before, launched, done = map(int, self._line().split())
        return before, launched, done

    def quit(self) -> None:
        """End in the ordinary way: contexts destroyed, channels unregistered and freed."""
        assert self.process.stdin is not None
        self.process.stdin.write("quit\n")
        self.process.stdin.flush()
        assert self.process.wait(200) == 0

    def hint(self, open_requests: int, by: str = "hint") -> None:
        """What an engine says whenever the number of its open requests changes. `by`: "tell" is by its hook."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{by} {open_requests}\n")
        self.process.stdin.flush()
        assert self._line() == "hinted\n"

    def _line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            log = "".join(path.read_text(errors="replace") for path in self.node.folder.glob("*.log"))
            raise AssertionError(f"the online process ended with {self.process.wait()}:\n{log[-3000:]}")
        return line


def service(node: EmulatedNode, name: str) -> Any:
    """The status of one service, or None while valved does not know it."""
    return next((each for each in node.status().services if each.name == name), None)


def set_mode(node: EmulatedNode, mode: int) -> None:
    connection = NodeClient(node.run_dir)
    connection.call(connection.stub.SetPolicy, node_pb2.Policy(mode=mode))
    connection.close()


def nothing_left_off(node: EmulatedNode) -> bool:
    return not node.emulator.state().disabled


def settled(node: EmulatedNode) -> tuple[Offline, Online]:
    """A node with a beating offline job and an online service that has let go."""
    offline = Offline(node, "batch")
    offline.wait_running()
    online = Online(node, "chat")
    online.wait_ready()
    node.wait_for(lambda: not service(node, "chat").busy, "the service lets go")
    offline.wait_running()
    return offline, online
