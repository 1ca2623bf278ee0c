"""The two neighbours of the gate in its benchmarks, each a process of its own.

`channels GPUS PER_GPU`: an offline workload; allocates channels by raw ioctl, prints them, ends with its stdin.
`launcher CONTROL REGION BELL PLAIN SEED`: an online process; counts a launch and rings, once for each byte on stdin.
"""

from __future__ import annotations

import ctypes
import fcntl
import itertools
import json
import os
import random
import struct
import sys
import time
from pathlib import Path
from typing import Any

from valve_tools.bench import region_pages

ROOT, DEVICE, SUBDEVICE, TSG, CHANNEL = 0x41, 0x80, 0x2080, 0xA06C, 0xC86F
SCHEDULE = 0xA06C0101
_ALLOC = 0xC020462B
WAKE = Path(__file__).resolve().parent / "bin" / "valve-bench-wake.so"
GATED, PLAIN = b".", b"p"  # whose bell rings: the gate's, or that of a listener without Valve
_CONTROL = 0xC020462A


def _call(fd: int, request: int, head: tuple[int, ...], params: bytes) -> tuple[int, bytes]:
    """NVOS21 and NVOS54 alike: four words, a pointer, a size, a status. Returns (third word, parameters)."""
    buffer = ctypes.create_string_buffer(params, max(len(params), 1))
    argument = bytearray(struct.pack("<4IQII", *head, ctypes.addressof(buffer) if params else 0, len(params), 0))
    fcntl.ioctl(fd, request, argument, True)
    words = struct.unpack("<4IQII", argument)
    if words[6]:
        raise OSError(f"RM status {words[6]:#x} for {head}")
    return words[2], buffer.raw[: len(params)]


def allocate(gpu: int, count: int) -> dict[str, object]:
    """One RM client with `count` scheduled channels in one compute group. Its files stay open on purpose."""
    ctl = os.open("/dev/nvidiactl", os.O_RDWR)
    os.open(f"/dev/nvidia{gpu}", os.O_RDWR)
    client, _ = _call(ctl, _ALLOC, (0, 0, 0, ROOT), b"")
    device, _ = _call(ctl, _ALLOC, (client, client, 0, DEVICE), struct.pack("<II", gpu, client) + bytes(48))
    _call(ctl, _ALLOC, (client, device, 0, SUBDEVICE), bytes(4))
    group, _ = _call(ctl, _ALLOC, (client, device, 0, TSG), struct.pack("<IIIIB3x", 0, 0, 0, 1, 0))
    channels = []
    for _ in range(count):
        handle, answer = _call(ctl, _ALLOC, (client, group, 0, CHANNEL), bytes(368))
        channels.append((handle, struct.unpack_from("<I", answer, 132)[0]))
    _call(ctl, _CONTROL, (client, group, SCHEDULE, 0), b"\1\0\0")
    return {"h_client": client, "h_tsg": group, "channels": channels}


def hold_channels(gpus: int, per_gpu: int) -> None:
    print(json.dumps([allocate(gpu, per_gpu) for gpu in range(gpus)]), flush=True)
    sys.stdin.read()


def launch_stamp(page: region_pages.Page) -> Any:
    """Where a launch writes when it rang."""
    word = ctypes.c_uint64.from_buffer(page.memory, region_pages.REGION["launch_ns"].offset)
    return ctypes.byref(word)


def launch(control_fd: int, region_fd: int, bell: int, plain: int, seed: int) -> None:
    """Each byte on stdin: stay quiet for a random while, launch, and be done at once. All but the bell is the same."""
    control, mine = region_pages.control_page(control_fd), region_pages.region_page(region_fd)
    region_pages.fill_region(mine)
    quiet = random.Random(seed)
    stamp = launch_stamp(mine)
    ring = ctypes.CDLL(str(WAKE)).valve_bench_ring
    bells = {GATED: bell, PLAIN: plain}
    for edge in itertools.count(1):
        if not (whose := os.read(0, 1)):
            return
        time.sleep(quiet.uniform(0.0002, 0.001))
        region_pages.set_submitted(mine, 0, edge)
        mine["rung_epoch"] = control["gate_epoch"]
        if ring(stamp, bells[whose]):
            raise OSError("the doorbell does not ring")
        mine["idle_submitted"] = edge


def main(arguments: list[str]) -> None:
    role, *words = arguments
    numbers = [int(word) for word in words]
    if role == "channels":
        hold_channels(*numbers)
    else:
        launch(*numbers)


if __name__ == "__main__":
    main(sys.argv[1:])
