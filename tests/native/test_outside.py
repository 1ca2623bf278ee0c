"""The way into another process's memory: a call on a thread, a descriptor that goes with it."""

from __future__ import annotations

import asyncio
import errno
import os

from gates import wait_until
from scarce import left

from valved.machine.ports import SparseResult
from valved.machine.uvm import UVM, UvmDoor, is_file


def is_closed(fd: int) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{fd}") != os.devnull
    except FileNotFoundError:
        return True


def test_a_file_that_is_no_drivers_is_not_taken_for_one() -> None:
    fd = os.open(os.devnull, os.O_RDWR)

    assert not is_file(fd, UVM)
    os.close(fd)


def test_an_honest_descriptor_is_never_taken_for_a_lie_for_want_of_another() -> None:
    fd = os.open(os.devnull, os.O_RDWR)

    with left(0):
        assert is_file(fd, os.devnull)
        assert not is_file(fd, "/dev/zero")
    os.close(fd)


def test_a_refusal_comes_back_through_the_loop_and_the_descriptor_goes_last() -> None:
    async def ask() -> tuple[SparseResult, int]:
        loop = asyncio.get_running_loop()
        fd, answer = os.open(os.devnull, os.O_RDWR), loop.create_future()
        door = UvmDoor(loop, fd, bytes(16))
        door.make_sparse([(1 << 30, 1 << 21), (1 << 31, 1 << 21)], answer.set_result)
        door.close()
        return await answer, fd

    result, fd = asyncio.run(ask())

    assert (result.status, result.runs) == (-errno.ENOTTY, 0)
    wait_until(lambda: is_closed(fd), "the descriptor is closed")


def test_answers_that_wait_together_are_never_lost_for_one_that_fails() -> None:
    async def ask() -> tuple[list[int], int]:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda *_: None)
        fd, heard, through = os.open(os.devnull, os.O_RDWR), [], loop.create_future()
        door = UvmDoor(loop, fd, bytes(16))

        def hear(number: int) -> None:
            heard.append(number)
            if number == 0:
                raise RuntimeError("who asked first fails")
            if number == 99:
                through.set_result(None)

        for number in range(100):
            door.make_sparse([(1 << 30, 1 << 21)], lambda _, number=number: hear(number))
        door.close()
        await through
        return heard, fd

    heard, fd = asyncio.run(ask())

    assert sorted(heard) == list(range(100))
    wait_until(lambda: is_closed(fd), "the descriptor is closed")


def test_a_door_that_nobody_asked_never_keeps_its_descriptor() -> None:
    async def leave() -> list[int]:
        fds = [os.open(os.devnull, os.O_RDWR) for _ in range(50)]
        for fd in fds:
            UvmDoor(asyncio.get_running_loop(), fd, bytes(16)).close()
        return fds

    fds = asyncio.run(leave())

    wait_until(lambda: all(map(is_closed, fds)), "the descriptors are closed")
