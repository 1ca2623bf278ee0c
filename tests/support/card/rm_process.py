"""Processes on an emulated node, driven from a test: raw ioctls, and the object tree that a CUDA process builds."""

from __future__ import annotations

import json
import os
import socket
import struct
import subprocess
import sys
import threading
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from valve_tools.emulator.node import environment

OK = 0
GPU_IS_LOST, NO_PERMISSION, BAD_ARGUMENT = 0x0F, 0x1B, 0x1F
BAD_CHANNEL, BAD_CLIENT, BAD_HANDLE, BAD_PARENT = 0x21, 0x23, 0x33, 0x36
NOT_SUPPORTED, NOT_FOUND, TIMEOUT = 0x56, 0x57, 0x65

ROOT, DEVICE, SUBDEVICE, VASPACE, TSG, SHARE = 0x41, 0x80, 0x2080, 0x90F1, 0xA06C, 0x9067
CHANNEL, COMPUTE, COPY, LOCAL_MEMORY = 0xC86F, 0xCBC0, 0xC8B5, 0x40
ALLOC, FREE, CONTROL, DUP, REGISTER_FD = 0x2B, 0x29, 0x2A, 0x34, 201

DISABLE_CHANNELS, CHANNEL_IDS, SCHEDULE = 0x2080110B, 0x20801124, 0xA06C0101
ID_INFO, GID_INFO = 0x205, 0x2080014A
DEADLINE_S = 200


def request(number: int, size: int) -> int:
    return 0xC0000000 | size << 16 | 0x46 << 8 | number


class RmProcess:
    """One process with the emulated driver under it."""

    def __init__(self, directory: Path) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.relay = ours
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("rm_agent.py")), str(theirs.fileno())],
            env=environment(directory, os.environ),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=[theirs.fileno()],
        )
        theirs.close()
        self.pid = self._process.pid
        self._waiting: dict[int, Future[Any]] = {}
        self._next = 0
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            answer = json.loads(line)
            future = self._waiting.pop(answer["id"])
            if "error" in answer:
                future.set_exception(RuntimeError(answer["error"]))
            else:
                future.set_result(answer.get("result"))
        for future in self._waiting.values():
            future.set_exception(ProcessLookupError(f"process {self.pid} is gone"))

    def start(self, do: str, **arguments: Any) -> Future[Any]:
        self._next += 1
        future: Future[Any] = Future()
        self._waiting[self._next] = future
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"id": self._next, "do": do, **arguments}) + "\n")
        self._process.stdin.flush()
        return future

    def call(self, do: str, **arguments: Any) -> Any:
        return self.start(do, **arguments).result(DEADLINE_S)

    def kill(self) -> None:
        """SIGKILL, and wait until the kernel has closed its files."""
        self._process.kill()
        self._process.wait()
        self._reader.join(DEADLINE_S)
        self.relay.close()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def __enter__(self) -> RmProcess:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.returncode is None:
            self.kill()

    def pass_fd(self, fd: int, to: RmProcess) -> int:
        """Send a fd to another process; neither the test nor the sender is needed afterwards."""
        self.call("send_fd", fd=fd)
        _, fds, _, _ = socket.recv_fds(self.relay, 1, 1)
        socket.send_fds(to.relay, [b"f"], fds)
        os.close(fds[0])
        return int(to.call("receive_fd"))

    # ---- the driver's calls ----

    def open(self, path: str) -> int:
        return int(self.call("open", path=path))

    def ioctl(self, fd: int, number: int, arg: bytes, params: bytes = b"", at: int = 16) -> Ioctl:
        return Ioctl.of(self.call("ioctl", fd=fd, request=number, arg=arg.hex(), params=params.hex(), at=at))

    def alloc(
        self, fd: int, root: int, parent: int, handle: int, cls: int, params: bytes = b"", form: int = 32
    ) -> Answer:
        head = struct.pack("<IIII", root, parent, handle, cls)
        got = self.ioctl(fd, request(ALLOC, form), head + bytes(form - len(head)), params)
        status_at = 28 if form == 32 else 40
        return Answer(
            errno=got.errno,
            status=got.word(status_at),
            handle=got.word(8),
            params=got.params,
        )

    def control_arg(self, client: int, target: int, command: int, size: int) -> bytes:
        return struct.pack("<IIIIQII", client, target, command, 0, 0, size, 0)

    def control(self, fd: int, client: int, target: int, command: int, params: bytes) -> Answer:
        arg = self.control_arg(client, target, command, len(params))
        got = self.ioctl(fd, request(CONTROL, 32), arg, params)
        return Answer(errno=got.errno, status=got.word(28), handle=0, params=got.params)

    def free(self, fd: int, root: int, handle: int) -> int:
        return self.ioctl(fd, request(FREE, 16), struct.pack("<IIII", root, 0, handle, 0)).word(12)

    def start_gate(self, fd: int, client: int, subdevice: int, pairs: list[tuple[int, int]], on: bool) -> Future[Any]:
        params = gate_params(pairs, on)
        arg = self.control_arg(client, subdevice, DISABLE_CHANNELS, len(params))
        return self.start("ioctl", fd=fd, request=request(CONTROL, 32), arg=arg.hex(), params=params.hex(), at=16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ioctl:
    errno: int
    arg: bytes
    params: bytes

    @staticmethod
    def of(result: list[Any]) -> Ioctl:
        return Ioctl(errno=result[0], arg=bytes.fromhex(result[1]), params=bytes.fromhex(result[2]))

    def word(self, at: int) -> int:
        return int(struct.unpack_from("<I", self.arg, at)[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    errno: int
    status: int
    handle: int
    params: bytes

    def word(self, at: int) -> int:
        return int(struct.unpack_from("<I", self.params, at)[0])


def gate_params(pairs: list[tuple[int, int]], on: bool, only_scheduling: bool = False, event: int = 0) -> bytes:
    lists = [pair[0] for pair in pairs] + [0] * (64 - len(pairs))
    lists += [pair[1] for pair in pairs] + [0] * (64 - len(pairs))
    return struct.pack("<B3xIBB6xQ", not on, len(pairs), only_scheduling, 0, event) + struct.pack("<128I", *lists)


def memory_params(size: int) -> bytes:
    return bytes(64) + struct.pack("<Q", size) + bytes(56)


@dataclass(slots=True, kw_only=True)
class Tree:
    """What a CUDA process has allocated on one card: client, device, subdevice, VA space, one compute TSG."""

    process: RmProcess
    gpu: int
    ctl: int
    node: int
    client: int
    uuid: bytes
    device: int = 0x5C000001
    subdevice: int = 0x5C000002
    vaspace: int = 0x5C000003
    tsg: int = 0x5C000004
    channels: list[int] = field(default_factory=list)
    cids: list[int] = field(default_factory=list)
    uvm: int = -1

    @property
    def pairs(self) -> list[tuple[int, int]]:
        return [(self.client, channel) for channel in self.channels]

    def control(self, target: int, command: int, params: bytes) -> Answer:
        return self.process.control(self.ctl, self.client, target, command, params)

    def alloc(self, parent: int, handle: int, cls: int, params: bytes = b"") -> Answer:
        return self.process.alloc(self.ctl, self.client, parent, handle, cls, params)

    def gate(self, pairs: list[tuple[int, int]], on: bool) -> int:
        return self.control(self.subdevice, DISABLE_CHANNELS, gate_params(pairs, on)).status

    def start_gate(self, pairs: list[tuple[int, int]], on: bool) -> Future[Any]:
        return self.process.start_gate(self.ctl, self.client, self.subdevice, pairs, on)

    def schedule(self, on: bool = True) -> int:
        return self.control(self.tsg, SCHEDULE, bytes([on, 0, 0])).status

    def free(self, handle: int) -> int:
        return self.process.free(self.ctl, self.client, handle)

    def allocate_memory(self, size: int, handle: int = 0) -> Answer:
        return self.alloc(self.device, handle, LOCAL_MEMORY, memory_params(size))


def channel_params(vaspace: int, size: int = 368) -> bytes:
    params = bytearray(size)
    params[28:32] = struct.pack("<I", vaspace)
    return bytes(params)


def tsg_params(vaspace: int, engine: int = 1) -> bytes:
    return struct.pack("<IIIIB3x", 0, 0, vaspace, engine, 0)


def device_params(gpu: int, client: int) -> bytes:
    return struct.pack("<II", gpu, client) + bytes(48)


def grow_tree(process: RmProcess, gpu: int = 0, channels: int = 2, scheduled: bool = True) -> Tree:
    """The allocations of a CUDA context, in the driver library's order; each must succeed."""
    ctl = process.open("/dev/nvidiactl")
    node = process.open(f"/dev/nvidia{gpu}")
    client = process.alloc(ctl, 0, 0, 0, ROOT).handle
    tree = Tree(process=process, gpu=gpu, ctl=ctl, node=node, client=client, uuid=b"")
    steps = [
        tree.alloc(client, tree.device, DEVICE, device_params(gpu, client)),
        tree.alloc(tree.device, tree.subdevice, SUBDEVICE, bytes(4)),
        tree.alloc(tree.device, tree.vaspace, VASPACE),
        tree.alloc(tree.device, tree.tsg, TSG, tsg_params(tree.vaspace)),
    ]
    for index in range(channels):
        handle = 0x5C000010 + index
        steps.append(tree.alloc(tree.tsg, handle, CHANNEL, channel_params(tree.vaspace)))
        tree.channels.append(handle)
        tree.cids.append(steps[-1].word(132))
    assert [OK] * len(steps) == [step.status for step in steps]
    gid = tree.control(tree.subdevice, GID_INFO, struct.pack("<III", 0, 2, 0) + bytes(256))
    tree.uuid = gid.params[12:28]
    if scheduled:
        assert tree.schedule() == OK
    return tree


def use_uvm(tree: Tree) -> int:
    """Initialise UVM and register the card, the VA space and every channel; returns the uvm fd."""
    tree.uvm = tree.process.open("/dev/nvidia-uvm")

    def uvm(number: int, arg: bytes, status_at: int) -> None:
        got = tree.process.ioctl(tree.uvm, number, arg)
        assert (got.errno, got.word(status_at)) == (0, OK)

    uvm(0x30000001, bytes(16), 8)
    uvm(37, tree.uuid + struct.pack("<IiiIII", 0, 0, tree.ctl, tree.client, 0, 0), 36)
    uvm(25, tree.uuid + struct.pack("<iIII", tree.ctl, tree.client, tree.vaspace, 0), 28)
    for channel in tree.channels:
        arg = tree.uuid + struct.pack("<iIIIQQII", tree.ctl, tree.client, channel, 0, 0, 0, 0, 0)
        uvm(27, arg, 48)
    return tree.uvm
