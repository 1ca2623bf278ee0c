"""Whoever proves RM clients never waits for a stranger's descriptor to close."""

from __future__ import annotations

import asyncio
import os
import threading
from functools import partial
from types import SimpleNamespace

from valved.machine import possession
from valved.machine.helpers import SHORT, Closer, Helpers
from valved.machine.possession import THREADS, RmProver


class Gpu:
    gpu_id, uuid = 0x100, b"u" * 16


def test_no_descriptor_waits_for_ever_for_a_thread_that_could_not_be_started(monkeypatch):
    refusals, start = [RuntimeError("can't start new thread")], threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", lambda self: start(self) if not refusals else fail(refusals))
    done, helpers = threading.Barrier(3), Helpers("test", 2)

    helpers.do(lambda: done.wait(100))
    helpers.do(lambda: None)
    helpers.do(lambda: done.wait(100))

    done.wait(100)


def test_no_descriptor_waits_for_a_next_one_that_never_comes_where_no_thread_could_be_started(monkeypatch, caplog):
    refusals, start = [RuntimeError("can't start new thread")] * 3, threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", lambda self: start(self) if not refusals else fail(refusals))

    async def story() -> None:
        loop, helpers = asyncio.get_running_loop(), Helpers("test", 2)
        done = [loop.create_future() for _ in range(2)]
        for each in done:
            helpers.do(lambda each=each: loop.call_soon_threadsafe(each.set_result, None))
        await asyncio.wait_for(asyncio.gather(*done), 100)

    asyncio.run(story())
    assert caplog.text.count(SHORT) == 1, "new processes never wait without a word, nor with many"


def test_a_job_that_fails_never_takes_the_only_thread_with_it(caplog):
    """Regression: anything but an OSError ended the thread, and what came after waited for ever, without a word."""
    done, helpers = threading.Event(), Helpers("test", 1)

    for error in (OSError("gone"), KeyError("a defect")):
        helpers.do(partial(fail, [error]))
    helpers.do(done.set)

    assert done.wait(100)
    assert "a defect" in caplog.text
    assert "gone" not in caplog.text, "a descriptor that cannot be closed is nobody's fault"


def fail(refusals):
    raise refusals.pop()


def test_a_descriptor_whose_close_never_ends_never_keeps_others_from_their_proof(monkeypatch):
    stuck = threading.Event()
    monkeypatch.setattr(os, "close", lambda fd: stuck.wait(100) if fd >= 10_000 else None)
    monkeypatch.setattr(possession, "lib", SimpleNamespace(valve_rm_owns=lambda fd, *_: int(fd >= 10_000)))

    async def prove() -> bool:
        loop = asyncio.get_running_loop()
        prover = RmProver(loop, Closer())
        for number in range(2 * THREADS):
            prover.check(10_000 + number, Gpu(), 1, 2, False, lambda *_: None, "one")
        answer = loop.create_future()
        prover.check(5, Gpu(), 1, 2, True, lambda is_own, kept: answer.set_result((is_own, kept)), "one")
        return await answer

    try:
        assert asyncio.run(prove()) == (True, 5)
    finally:
        stuck.set()
