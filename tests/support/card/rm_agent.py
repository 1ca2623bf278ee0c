"""A process on an emulated node that issues raw driver calls as told on its standard input (see rm_process.py).

One JSON object a line: {"id", "do", ...}; answered by {"id", "result" | "error"}. Each command runs on a thread of
its own, so that a call that waits inside the driver does not keep the others from being made.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import socket
import sys
import threading
from typing import Any

LIBC = ctypes.CDLL(None, use_errno=True)
ATOMIC = ctypes.CDLL("libatomic.so.1")  # comes with every gcc; the server writes the same words
FETCH_ADD, FETCH_OR, SEQ_CST = ATOMIC["__atomic_fetch_add_4"], ATOMIC["__atomic_fetch_or_4"], 5
SYS_FUTEX, FUTEX_WAIT, FUTEX_WAKE = 202, 0, 1

# emu.h: offsets of the board
CHANNELS = 32768
GPU_AT, GPU_SIZE, WORK_AT = 64, 320 + CHANNELS // 8, 320
GPUS = 16
CHANNEL_AT, CHANNEL_SIZE = GPU_AT + GPUS * GPU_SIZE, 128
GRANT, PENDING, ACTIVE, ACK = 0, 64, 68, 64


class Agent:
    def __init__(self, relay: socket.socket) -> None:
        self.relay = relay
        self.board: mmap.mmap | None = None
        self.beats: dict[int, int] = {}

    # ---- driver calls ----

    def open(self, path: str) -> int:
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)

    def open_error(self, path: str) -> int:
        try:
            os.close(os.open(path, os.O_RDWR))
        except OSError as error:
            return error.errno or 0
        return 0

    def close(self, fd: int) -> None:
        os.close(fd)

    def ioctl(self, fd: int, request: int, arg: str, params: str | None = None, at: int = 0) -> list[Any]:
        """`arg` and `params` are hex; the address of params is stored in arg at offset `at`."""
        room = ctypes.create_string_buffer(bytes.fromhex(arg), max(len(arg) // 2, 1))
        body = ctypes.create_string_buffer(bytes.fromhex(params), len(params) // 2) if params else None
        if body is not None:
            ctypes.c_uint64.from_buffer(room, at).value = ctypes.addressof(body)
        ctypes.set_errno(0)
        code = LIBC.ioctl(fd, ctypes.c_ulong(request), room)
        return [ctypes.get_errno() if code else 0, room.raw.hex(), body.raw.hex() if body else ""]

    def dup(self, fd: int) -> int:
        return os.dup(fd)

    def send_fd(self, fd: int) -> None:
        socket.send_fds(self.relay, [b"f"], [fd])

    def receive_fd(self) -> int:
        return int(socket.recv_fds(self.relay, 1, 1)[1][0])

    def fork_holding_everything(self) -> int:
        """A child that keeps every fd of the driver open until it is killed; our own pipes end with us."""
        pid = os.fork()
        if pid == 0:
            null = os.open(os.devnull, os.O_RDWR)
            for ours in (0, 1, self.relay.fileno()):
                os.dup2(null, ours)
            threading.Event().wait()
        return pid

    def ioctl_in_children(self, count: int, fd: int, request: int, arg: str, params: str) -> list[int]:
        """The same control at the same time from forked children; the status each of them got."""
        self.ioctl(fd, request, arg, params, at=16)  # this thread has a connection to inherit
        ends = []
        for _ in range(count):
            read, write = os.pipe()
            if os.fork() == 0:
                _, got, _ = self.ioctl(fd, request, arg, params, at=16)
                os.write(write, bytes.fromhex(got)[28:32])
                os._exit(0)
            os.close(write)
            ends.append(read)
        return [int.from_bytes(os.read(end, 4), "little") for end in ends]

    # ---- memory ----

    def peek(self, address: int) -> int:
        return int(ctypes.c_uint32.from_address(address).value)

    def poke(self, address: int, value: int) -> None:
        ctypes.c_uint32.from_address(address).value = value

    def reserve(self, length: int) -> int:
        """Addresses without memory behind them, as a CUDA library reserves them."""
        LIBC.mmap.restype = ctypes.c_void_p
        at = LIBC.mmap(None, ctypes.c_size_t(length), 0, 0x4022, -1, 0)
        return int(at)

    # ---- execution: what a stand-in CUDA does for one channel (emu.h, "Execution") ----

    def _word(self, offset: int) -> Any:
        if self.board is None:
            fd = os.open("/dev/nvidia-emu-board", os.O_RDWR)
            size = CHANNEL_AT + CHANNELS * CHANNEL_SIZE
            self.board = mmap.mmap(fd, size)
            os.close(fd)
        return ctypes.c_uint32.from_buffer(self.board, offset)

    def _futex(self, word: Any, operation: int, value: int) -> None:
        limit = (ctypes.c_long * 2)(0, 20_000_000)
        LIBC.syscall(SYS_FUTEX, ctypes.byref(word), operation, value, limit, None, 0)

    def _bump(self, word: Any) -> None:
        FETCH_ADD(ctypes.byref(word), 1, SEQ_CST)
        self._futex(word, FUTEX_WAKE, 1 << 30)

    def work(self, cid: int, gpu: int) -> None:
        """Start an endless kernel on a channel: its heartbeat moves only while the server grants it."""
        slot = CHANNEL_AT + (cid % CHANNELS) * CHANNEL_SIZE
        grant, pending, active = (self._word(slot + at) for at in (GRANT, PENDING, ACTIVE))
        kick, ack = (self._word(GPU_AT + gpu * GPU_SIZE + at) for at in (0, ACK))
        work = self._word(GPU_AT + gpu * GPU_SIZE + WORK_AT + cid % CHANNELS // 32 * 4)
        self.beats[cid] = 0

        def execute() -> None:
            pending.value = 1
            FETCH_OR(ctypes.byref(work), ctypes.c_uint32(1 << cid % 32), SEQ_CST)
            self._bump(kick)
            while True:
                FETCH_OR(ctypes.byref(active), 1, SEQ_CST)  # seen before the grant is read
                while grant.value:
                    self.beats[cid] += 1
                    self._futex(grant, FUTEX_WAIT, 1)
                active.value = 0
                self._bump(ack)
                self._futex(grant, FUTEX_WAIT, 0)

        threading.Thread(target=execute, daemon=True).start()

    def hang_on(self, cid: int) -> None:
        """Claim to execute for ever, as a kernel that cannot be preempted does."""
        slot = CHANNEL_AT + (cid % CHANNELS) * CHANNEL_SIZE
        self._word(slot + PENDING).value = 1
        self._word(slot + ACTIVE).value = 1

    def heartbeat(self, cid: int) -> int:
        return self.beats[cid]


def main() -> None:
    agent = Agent(socket.socket(fileno=int(sys.argv[1])))
    writing = threading.Lock()

    def carry_out(command: dict[str, Any]) -> None:
        answer: dict[str, Any] = {"id": command.pop("id")}
        try:
            answer["result"] = getattr(agent, command.pop("do"))(**command)
        except Exception as error:
            answer["error"] = f"{type(error).__name__}: {error}"
        with writing:
            print(json.dumps(answer), flush=True)

    for line in sys.stdin:
        threading.Thread(target=carry_out, args=(json.loads(line),), daemon=True).start()


if __name__ == "__main__":
    main()
