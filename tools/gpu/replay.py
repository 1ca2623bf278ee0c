"""`valve gpu-lab replay TRACE`: issue the driver calls of a golden trace on the emulated GPU, and list where it answers
otherwise. What differs is a fault of the emulator: hardware is right.

Not replayed: calls that move memory (UVM map, unmap, sparse), and other processes than the first. Handles of clients,
file descriptors, the GPU's id and its UUID are translated; everything else is issued byte for byte.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

FREE, CONTROL, ALLOC, CARD_INFO, REGISTER_FD = 0x29, 0x2A, 0x2B, 200, 201
GID_INFO, ID_INFO, DISABLE = 0x2080014A, 0x205, 0x2080110B
ROOT_CLASSES = {0x0, 0x1, 0x41}
GPU_ID_AT, UUID_AT, UUID_BYTES = 16, 12, 16  # in the first card of CARD_INFO; in the parameters of GID_INFO
# Of RM calls: where the pointer to the parameter block stands, and where the status does, by (escape, size).
POINTER_AT = {(CONTROL, 32): 16, (ALLOC, 32): 16, (ALLOC, 48): 16}
STATUS_AT = {(CONTROL, 32): 28, (ALLOC, 32): 28, (ALLOC, 48): 40, (FREE, 16): 12}
# Of UVM calls: where a descriptor stands (-1: none), and where the status does. Others are not replayed.
UVM = {
    0x30000001: (-1, 8),
    75: (0, 4),
    37: (24, 36),
    25: (16, 28),
    27: (16, 48),
    28: (-1, 24),
    **dict.fromkeys((26, 34, 38, 73), (-1, 16)),
}
UVM_590 = {28: (-1, 8)}


def name_of(line: dict[str, Any]) -> str:
    """A driver call in short: uvm 33, alloc class 0x40, control 0x3d05."""
    if line["call"] == "uvm":
        return f"uvm {line['request']}"
    if line.get("op") == "control":
        return f"control {line['cmd']:#x}"
    if line.get("op") == "alloc":
        return f"alloc class {line['class']:#x}"
    return str(line.get("op") or f"{line['call']} {line.get('nr', '')}".strip())


class Replayer:
    """Lives in a process under the emulated driver."""

    def __init__(self, branch: int) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fds: dict[int, int] = {}
        self._clients: dict[int, int] = {}
        self._uuid: tuple[bytes, bytes] | None = None
        self._gpu_id: tuple[int, int] | None = None
        self._uvm = {**UVM, **(UVM_590 if branch >= 590 else {})}

    def step(self, line: dict[str, Any]) -> tuple[int, int] | None:
        """Issue one call: (errno, status) of the emulator; None where it is not replayed."""
        if line["call"] == "open":
            self._fds[line["fd"]] = os.open(line["path"], os.O_RDWR | os.O_CLOEXEC)
            return None
        if line["fd"] not in self._fds:
            return None
        if line["call"] == "close":
            os.close(self._fds.pop(line["fd"]))
            return None
        return self._uvm_call(line) if line["call"] == "uvm" else self._rm_call(line)

    def _translate(self, data: bytearray) -> bytearray:
        """Client handles are picked by the driver, and the UUID is the card's: put ours where theirs stand."""
        for at in range(0, len(data) - 3, 4):
            word = int.from_bytes(data[at : at + 4], "little")
            if word in self._clients:
                data[at : at + 4] = self._clients[word].to_bytes(4, "little")
        if self._uuid:
            data = bytearray(bytes(data).replace(*self._uuid))
        return data

    def _put_fd(self, data: bytearray, at: int) -> None:
        theirs = int.from_bytes(data[at : at + 4], "little", signed=True)
        data[at : at + 4] = self._fds.get(theirs, -1).to_bytes(4, "little", signed=True)

    def _ioctl(self, fd: int, request: int, data: bytearray) -> tuple[int, bytes]:
        room = ctypes.create_string_buffer(bytes(data), max(1, len(data)))
        ctypes.set_errno(0)
        code = self._libc.ioctl(self._fds[fd], ctypes.c_ulong(request), room)
        return (ctypes.get_errno() if code else 0), room.raw

    def _uvm_call(self, line: dict[str, Any]) -> tuple[int, int] | None:
        if line["request"] not in self._uvm or "arg" not in line:
            return None
        fd_at, status_at = self._uvm[line["request"]]
        data = self._translate(bytearray.fromhex(line["arg"]))
        if fd_at >= 0:
            self._put_fd(data, fd_at)
        error, after = self._ioctl(line["fd"], line["request"], data)
        return error, int.from_bytes(after[status_at : status_at + 4], "little")

    def _rm_call(self, line: dict[str, Any]) -> tuple[int, int] | None:
        nr, size = line["nr"], line["size"]
        if "arg" not in line:
            return None
        data = bytearray.fromhex(line["arg"]).ljust(size, b"\0")
        data = self._translate(data) if nr in (FREE, CONTROL, ALLOC) else data
        if nr == REGISTER_FD:
            self._put_fd(data, 0)
        params = self._translate(bytearray.fromhex(line.get("params", "")))
        if line.get("cmd") == ID_INFO and self._gpu_id and int.from_bytes(params[:4], "little") == self._gpu_id[0]:
            params[:4] = self._gpu_id[1].to_bytes(4, "little")
        block = ctypes.create_string_buffer(bytes(params), max(1, len(params)))
        if (nr, size) in POINTER_AT:
            at = POINTER_AT[nr, size]
            data[at : at + 8] = (ctypes.addressof(block) if params else 0).to_bytes(8, "little")
        error, after = self._ioctl(line["fd"], 0xC0000000 | size << 16 | 0x46 << 8 | nr, data)
        self._learn(line, after, block.raw)
        status_at = STATUS_AT.get((nr, size))
        return error, 0 if status_at is None else int.from_bytes(after[status_at : status_at + 4], "little")

    def _learn(self, line: dict[str, Any], after: bytes, params: bytes) -> None:
        """What the driver chose: client handles, the card's id and UUID."""
        if line.get("op") == "alloc" and line["class"] in ROOT_CLASSES:
            self._clients[line["object"]] = int.from_bytes(after[8:12], "little")
        if line["nr"] == CARD_INFO and "arg_out" in line:
            theirs = bytes.fromhex(line["arg_out"])[GPU_ID_AT : GPU_ID_AT + 4]
            self._gpu_id = (
                int.from_bytes(theirs, "little"),
                int.from_bytes(after[GPU_ID_AT : GPU_ID_AT + 4], "little"),
            )
        if line.get("cmd") == GID_INFO and "params_out" in line:
            theirs = bytes.fromhex(line["params_out"])[UUID_AT : UUID_AT + UUID_BYTES]
            self._uuid = (theirs, params[UUID_AT : UUID_AT + UUID_BYTES])


def recorded(line: dict[str, Any], branch: int) -> tuple[int, int]:
    """(errno, status) on the machine that the trace comes from."""
    if line["call"] == "rm":
        return line["errno"], line.get("status", 0)
    status_at = {**UVM, **(UVM_590 if branch >= 590 else {})}[line["request"]][1]
    return line["errno"], int.from_bytes(bytes.fromhex(line["arg_out"])[status_at : status_at + 4], "little")


def differences(lines: Iterable[dict[str, Any]], branch: int) -> tuple[int, Counter[tuple[str, str, str]]]:
    """(calls issued, (call, recorded answer, our answer) -> how often). In a process under the emulated driver."""
    replayer, found, issued, first = Replayer(branch), Counter[tuple[str, str, str]](), 0, 0
    for line in lines:
        first = first or line["pid"]
        if line["pid"] != first:
            continue
        ours = replayer.step(line)
        if ours is None:
            continue
        issued += 1
        theirs = recorded(line, branch)
        if ours != theirs:
            found[name_of(line), words(theirs), words(ours)] += 1
    return issued, found


def words(answer: tuple[int, int]) -> str:
    return f"errno {answer[0]}" if answer[0] else f"status {answer[1]:#x}"


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def main(argv: list[str]) -> int:
    """0: no difference; 1: some. The calls are made by a child of ours, under the emulated driver."""
    parser = argparse.ArgumentParser(prog="valve gpu-lab replay", description=__doc__)
    parser.add_argument("trace", type=Path, help="The golden trace to issue.")
    parser.add_argument(
        "--driver",
        default="580.159.04",
        help="The driver version to emulate, that of the trace's machine. Default: %(default)s.",
    )
    options = parser.parse_args(argv)
    from valve_tools.emulator.node import NO_LATENCY, Options, environment, node

    with (
        tempfile.TemporaryDirectory(prefix="valve-replay-") as folder,
        node(Options(knobs={**NO_LATENCY, "driver": options.driver}), Path(folder)) as emulator,
    ):
        branch = options.driver.split(".", maxsplit=1)[0]
        child = [sys.executable, "-m", "valve_tools.gpu.replay", str(options.trace.resolve()), branch]
        return subprocess.run(child, env=environment(emulator.directory, os.environ), check=False).returncode


def child_main(argv: list[str]) -> int:
    issued, found = differences(read(Path(argv[0])), int(argv[1]))
    for (call, theirs, ours), count in found.most_common():
        print(f"{count:5} x {call}: recorded {theirs}, emulated {ours}")
    print(f"{issued} calls issued, {sum(found.values())} answered otherwise")
    return bool(found)


if __name__ == "__main__":
    raise SystemExit(child_main(sys.argv[1:]))
