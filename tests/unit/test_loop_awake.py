"""A loop that awaits something soon does not sleep, and never stays awake longer than it was asked to."""

from __future__ import annotations

import asyncio
import time

import pytest

from valved.machine import clock as clocks
from valved.machine.clock import LoopClock

LONG_NS = 600_000_000_000


@pytest.fixture
def naps(monkeypatch):
    """Of the loop: whether it asked for news without waiting for any."""
    monkeypatch.setattr(clocks, "CORES", 2)
    loop, found = asyncio.new_event_loop(), []
    select = loop._selector.select

    def noted(timeout=None):
        found.append(timeout != 0)
        return select(timeout)

    monkeypatch.setattr(loop._selector, "select", noted)
    yield loop, found
    loop.close()


def turns_until(loop, condition):
    async def wait():
        while not condition():
            await asyncio.sleep(0.001)

    loop.run_until_complete(wait())


def test_a_loop_that_awaits_something_never_sleeps(naps):
    loop, found = naps
    LoopClock(loop).stay_awake(LONG_NS)
    turns_until(loop, lambda: len(found) > 100)
    assert not any(found)


def test_a_loop_is_never_kept_awake_for_more_than_its_share_of_a_core(naps, monkeypatch):
    """A client chooses how often something is awaited."""
    loop, _ = naps
    clock, now_ns = LoopClock(loop), 1_000_000_000_000
    awake_ns = 0
    monkeypatch.setattr(clock, "now_ns", lambda: now_ns)
    clock.stay_awake(LONG_NS)
    for _ in range(60_000):
        clock.stay_awake(LONG_NS)
        awake_ns += 1_000_000 if loop._ready else 0
        now_ns += 1_000_000
        for handle in [loop._ready.popleft() for _ in range(len(loop._ready))]:
            handle._run()

    assert 0.03 * 60e9 < awake_ns < 0.07 * 60e9


@pytest.mark.parametrize("again", [1, 50])
def test_a_loop_never_turns_twice_for_one_wait(naps, again):
    """However often it is asked to stay awake: else each would cost a turn of every later one."""
    loop, _ = naps
    clock = LoopClock(loop)
    for _ in range(again):
        clock.stay_awake(LONG_NS)
    loop._run_once()
    assert len(loop._ready) == 1


@pytest.mark.parametrize("ended", ["told", "over", "one core"])
def test_a_loop_never_stays_awake_for_what_is_awaited_no_more(naps, monkeypatch, ended):
    loop, found = naps
    monkeypatch.setattr(clocks, "CORES", 1 if ended == "one core" else 2)
    clock = LoopClock(loop)
    clock.stay_awake(1 if ended == "over" else LONG_NS)
    if ended == "told":
        clock.stay_awake(0)
    began_ns = time.monotonic_ns()
    loop.call_later(0.05, loop.stop)
    loop.run_forever()

    assert time.monotonic_ns() - began_ns >= 50_000_000
    assert sum(found) >= 1
    assert found.count(False) <= 3
