"""Virtual memory management through the driver API, as tests make it: handles, reservations, access; and another
process that was passed this one's uvm fd."""

from __future__ import annotations

import ctypes
import os
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import byref, c_int, c_uint64

from cuda_driver import Cuda
from gate_process import gate_of

MIB = 1 << 20
PAGE = 2 * MIB
READ_WRITE = 3


class Prop(ctypes.Structure):
    _fields_ = [("type", c_int), ("handles", c_int), ("place", c_int), ("id", c_int), ("rest", c_uint64 * 2)]


class Access(ctypes.Structure):
    _fields_ = [("place", c_int), ("id", c_int), ("flags", c_int)]


def create(cuda: Cuda, size: int = PAGE, handles: int = 1, place: int = 1, device: int = 0) -> int:
    return cuda.value("cuMemCreate", size, byref(Prop(1, handles, place, device)), 0)


def reserve(cuda: Cuda, size: int) -> int:
    return cuda.value("cuMemAddressReserve", size, 0, 0, 0)


def allow(cuda: Cuda, address: int, size: int, flags: int = READ_WRITE) -> int:
    return cuda.call("cuMemSetAccess", address, size, byref(Access(1, 0, flags)), 1)


def backed(cuda: Cuda, pages: int = 1) -> int:
    address = reserve(cuda, pages * PAGE)
    for page in range(pages):
        cuda.cuMemMap(address + page * PAGE, PAGE, 0, create(cuda), 0)
    assert allow(cuda, address, pages * PAGE) == 0
    return address


@contextmanager
def daemon_with_uvm(cuda: Cuda) -> Iterator[Callable[[int, int], tuple[int, int]]]:
    """Another process that was passed this one's uvm fd; the value makes a range sparse through it."""
    uvm = next(fd for fd in range(3, 200) if os.path.exists(f"/proc/self/fd/{fd}") and _is_uvm(fd))
    with gate_of(cuda) as gate:
        process = gate.tree.process
        socket.send_fds(process.relay, [b"f"], [uvm])
        theirs = int(process.call("receive_fd"))
        uuid = bytes.fromhex(cuda.emulator.state().raw["gpus"][0]["uuid"].removeprefix("GPU-").replace("-", ""))

        def sparse(address: int, length: int) -> tuple[int, int]:
            answer = process.ioctl(theirs, 74, struct.pack("<QQ", address, length) + uuid + bytes(8))
            return answer.errno, answer.word(32)

        yield sparse


def wrong_tags(cuda: Cuda, address: int, length: int, tag: int) -> int:
    wrong = cuda.alloc(8)
    cuda.cuMemsetD8_v2(wrong, 0, 8)
    cuda.launch(cuda.kernel("emu_check"), address, length, tag, wrong)
    return int.from_bytes(cuda.read(wrong, 8), "little")


def _is_uvm(fd: int) -> bool:
    libc = ctypes.CDLL(None)
    name, size = ctypes.create_string_buffer(110), c_int(110)
    return libc.getsockname(fd, name, byref(size)) == 0 and b"/3/0/" in name.raw
