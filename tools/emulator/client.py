"""Talks to a running valve-emu-server: settings, faults, and snapshots that tests assert on."""

from __future__ import annotations

import json
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from valve_tools.emulator.process import ProcessPage

# wire.h: struct emu_hello, struct emu_welcome
_MAGIC = 0x33554D45
_ADMIN = 6
_HELLO = struct.Struct("<IIIIQ")
_WELCOME = struct.Struct("<iIQ")


class EmulatorError(Exception):
    """The server refused a command; the text says what it would have accepted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunlistChannel:
    """One channel of the card, as the runlist sees it."""

    gpu: int
    h_client: int
    h_channel: int
    cid: int
    tsg: int
    engine: int
    scheduled: bool
    disabled: bool
    reset: bool
    granted: bool
    pending: int
    active: int
    launches: int
    busy_ns: int
    pid: int
    uvm: bool
    slice_us: int  # of its group; 0: none was set

    @property
    def is_compute(self) -> bool:
        return 1 <= self.engine <= 8


@dataclass(frozen=True, slots=True, kw_only=True)
class GateCall:
    """One disable (`on` false) or enable call: when it came, when it had all its locks, when execution had
    stopped (0: it did not wait for that), when it returned."""

    gpu: int
    on: bool
    channels: int
    status: int
    client: int
    pid: int
    entry_ns: int
    locked_ns: int
    stopped_ns: int
    done_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeMoment:
    """One consistent moment of the node. `raw` is the server's JSON."""

    channels: tuple[RunlistChannel, ...]
    gates: tuple[GateCall, ...]
    raw: dict[str, Any]

    @property
    def disabled(self) -> tuple[RunlistChannel, ...]:
        return tuple(channel for channel in self.channels if channel.disabled)

    def of(self, pid: int) -> tuple[RunlistChannel, ...]:
        return tuple(channel for channel in self.channels if channel.pid == pid)

    def used_bytes(self, gpu: int = 0) -> int:
        return int(self.raw["gpus"][gpu]["used_bytes"])

    def unknown(self, kind: str) -> dict[int, int]:
        """Calls that the emulator does not implement: number -> count. kind: controls, classes, escapes, uvm."""
        return {int(number, 16): count for number, count in self.raw["unknown"][kind].items()}


def _channel(row: dict[str, Any]) -> RunlistChannel:
    return RunlistChannel(**{field.name: row[field.name] for field in fields(RunlistChannel)})


class Emulator:
    """A connection to the server of one emulated node, named by its directory."""

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.connect(os.fspath(self.directory / "emu.sock"))
        self._socket.send(_HELLO.pack(_MAGIC, _ADMIN, 0, 0, 0))
        _WELCOME.unpack(self._socket.recv(_WELCOME.size))

    def close(self) -> None:
        self._socket.close()

    def __enter__(self) -> Emulator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, command: str) -> dict[str, Any]:
        self._socket.send(command.encode())
        text = bytearray()
        while True:
            packet = self._socket.recv(1 << 17)
            if not packet:
                raise EmulatorError(f"the server in {self.directory} is gone")
            text += packet[1:]
            if packet[:1] == b".":
                break
        answer: dict[str, Any] = json.loads(text)
        if set(answer) == {"error"}:
            raise EmulatorError(f"{command!r}: {answer['error']}")
        return answer

    def set(self, **knobs: float | str) -> None:
        """Change knobs while the node runs: `set(rpc_us=50, lock="device-only", driver="999.10")`."""
        for name, value in knobs.items():
            self._ask(f"set {name} {value}")

    def knobs(self) -> dict[str, Any]:
        return self._ask("get")

    @contextmanager
    def setting(self, **knobs: float | str) -> Iterator[None]:
        """`set` for the length of a block."""
        before = {name: value for name, value in self.knobs().items() if name in knobs}
        self.set(**knobs)
        try:
            yield
        finally:
            self.set(**before)

    def fault(self, *lines: str) -> None:
        """Add fault rules, e.g. `fault("on disable 3: hang 500ms")`; README.md has the language."""
        for line in lines:
            self._ask(f"fault {line}")

    def clear_faults(self) -> None:
        self._ask("faults-clear")

    def release(self) -> None:
        """Every call that waits at a `hold` fault goes on."""
        self._ask("release")

    def wait_held(self, count: int = 1) -> NodeMoment:
        """Wait until so many calls stand at a `hold` fault."""
        return self.wait(lambda state: state.raw["held"] >= count, f"{count} held calls")

    def lose(self, gpu: int = 0) -> None:
        """The card falls off the bus."""
        self._ask(f"lose {gpu}")

    def process(self, pid: int) -> ProcessPage:
        """What a process publishes: its time in the driver, its settings."""
        return ProcessPage(self.directory, pid)

    def quit(self) -> None:
        self._ask("quit")

    def state(self) -> NodeMoment:
        raw = self._ask("state")
        return NodeMoment(
            channels=tuple(_channel(row) for row in raw["channels"]),
            gates=tuple(GateCall(**row) for row in raw["gates"]),
            raw=raw,
        )

    def wait(self, condition: Callable[[NodeMoment], bool], what: str, deadline_s: float = 200.0) -> NodeMoment:
        """The first snapshot for which `condition` holds. The deadline only ends a hung test."""
        end = time.monotonic() + deadline_s
        while True:
            state = self.state()
            if condition(state):
                return state
            if time.monotonic() > end:
                raise TimeoutError(f"the emulated node never showed: {what}")
            time.sleep(0.002)

    def kernel_log(self) -> str:
        path = self.directory / "dmesg"
        return path.read_text() if path.exists() else ""
