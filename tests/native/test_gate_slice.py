"""How the hot threads of the gate are scheduled."""

from __future__ import annotations

import asyncio
import ctypes
import os
import platform
import re
import struct

import pytest
from gates import Rig, wait_until

from valved.machine.uvm import UvmDoor

SYS_SCHED_GETATTR, SIZE, RUNTIME_AT = 315, 48, 24
SHORTEST_NS = 100_000
LINUX = tuple(map(int, re.findall(r"\d+", platform.release())[:2]))


own_slices = pytest.mark.skipif(LINUX < (6, 12), reason="threads have no slice of their own before Linux 6.12")


def slice_ns(thread: str) -> int:
    attributes = ctypes.create_string_buffer(SIZE)
    if ctypes.CDLL(None, use_errno=True).syscall(SYS_SCHED_GETATTR, int(thread), attributes, SIZE, 0):
        return 0  # it has ended
    return int(struct.unpack_from("<Q", attributes, RUNTIME_AT)[0])


def short() -> list[str]:
    return [thread for thread in os.listdir("/proc/self/task") if slice_ns(thread) == SHORTEST_NS]


@own_slices
def test_a_listener_never_waits_for_the_end_of_the_slice_of_a_busy_neighbour(rig: Rig) -> None:
    """Two listeners, three threads that ring, and an issuer for each GPU. The watchdog and Python are in no hurry."""
    hot = 2 + 3 + len(rig.gate.gpus())
    wait_until(lambda: len(short()) == hot, "each hot thread has started")
    assert str(os.getpid()) not in short()


@own_slices
def test_a_call_that_takes_memory_for_a_service_never_waits_for_the_end_of_the_slice_of_a_busy_neighbour() -> None:
    async def ask() -> list[str]:
        loop, before = asyncio.get_running_loop(), set(short())
        door, answer = UvmDoor(loop, os.open(os.devnull, os.O_RDWR), bytes(16)), loop.create_future()
        door.make_sparse([(1 << 30, 1 << 21)], answer.set_result)
        await answer  # so its thread has started
        found = [thread for thread in short() if thread not in before]
        door.close()
        return found

    assert len(asyncio.run(ask())) == 1
