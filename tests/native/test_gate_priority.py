"""Real time (`fifo_priority`) is for threads whose run is short, for as long as it is short.

A real-time thread that computes keeps an online service from its core.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace

import pytest
from gates import HASTY, FakeDriver, Rig, gate_rig, wait_until

from valved.machine.ports import WakeOutcome
from valved.machine.stamps import StampKind
from valved.model.ids import ServiceId

SERVICE = ServiceId(7)
LISTENERS = 2  # valved/native/internal.h
INHERITED = os.getpriority(os.PRIO_PROCESS, 0)  # not 0 under `nice`


def threads() -> set[int]:
    return {int(name) for name in os.listdir("/proc/self/task")}


def is_real_time(thread: int) -> bool:
    with suppress(ProcessLookupError):  # it has ended
        return os.sched_getscheduler(thread) == os.SCHED_FIFO
    return False


def niceness(thread: int) -> int | None:
    with suppress(ProcessLookupError):
        return os.getpriority(os.PRIO_PROCESS, thread)
    return None


def real_time(among: set[int]) -> set[int]:
    return {thread for thread in among if is_real_time(thread)}


def may_be_real_time() -> bool:
    child = os.fork()
    if child == 0:
        try:
            os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
        except OSError:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.fixture
def urgent(driver: FakeDriver) -> Iterator[tuple[Rig, set[int]]]:
    """A hasty gate with real time, and its threads."""
    if not may_be_real_time():
        pytest.skip("this user may not have real time")
    before = threads()
    with gate_rig(driver, replace(HASTY, fifo_priority=1)) as rig:
        yield rig, threads() - before


def workers(rig: Rig) -> int:
    return len(rig.gate.gpus()) + LISTENERS


def test_a_thread_whose_run_a_client_decides_is_never_real_time(urgent: tuple[Rig, set[int]]) -> None:
    rig, ours = urgent

    def at_rest() -> set[int]:
        return {one for one in ours - real_time(ours) if niceness(one) == INHERITED}

    wait_until(lambda: len(at_rest()) == 1, "all but the watchdog have their priority")
    assert len(real_time(ours)) == workers(rig)
    assert len(ours) > workers(rig) + 1  # there are others


def hang_in_a_stop(rig: Rig) -> Callable[[], object]:
    online = rig.online(7, {0})
    assert rig.gate.wake(SERVICE) is WakeOutcome.WOKEN
    rig.wait_gated(0, gated=False)
    rig.driver.rules.hang = 1
    online.launch()
    return lambda: rig.wait_stamp(lambda stamp: stamp.kind is StampKind.GATE and stamp.client == online.client)


def hang_in_an_enable(rig: Rig) -> Callable[[], object]:
    rig.online(7, {0})
    rig.driver.rules.hang_enable = 1
    assert rig.gate.wake(SERVICE) is WakeOutcome.WOKEN
    return lambda: rig.wait_gated(0, gated=False)


@pytest.mark.parametrize("hang", [hang_in_a_stop, hang_in_an_enable])
def test_a_thread_that_the_driver_keeps_never_stays_real_time(
    urgent: tuple[Rig, set[int]], hang: Callable[[Rig], Callable[[], object]]
) -> None:
    rig, ours = urgent
    rig.offline().add(2)
    wait_until(lambda: len(real_time(ours)) == workers(rig), "all have their priority")

    back = hang(rig)
    wait_until(lambda: rig.driver.counts.hanging == 1, "it hangs")
    wait_until(lambda: len(real_time(ours)) == workers(rig) - 1, "the one that hangs is real-time no longer")

    rig.driver.rules.hang = rig.driver.rules.hang_enable = 0
    back()
    wait_until(lambda: len(real_time(ours)) == workers(rig), "it is again")


def test_a_call_that_took_long_never_moves_a_thread_that_was_not_real_time(driver: FakeDriver) -> None:
    """Nothing was taken from it, so there is nothing to give back: what an operator set stays."""
    if not may_be_real_time():
        pytest.skip("this user may not have the best niceness either")
    before = threads()
    with gate_rig(driver, HASTY) as rig:
        ours = threads() - before
        wait_until(lambda: [niceness(one) for one in ours].count(INHERITED) == 1, "all but the watchdog have theirs")
        rig.offline().add(2)
        back = hang_in_a_stop(rig)
        wait_until(lambda: rig.driver.counts.hanging == 1, "it hangs")
        rig.wait_stamp(lambda stamp: stamp.kind is StampKind.GATE_FAILED)
        for thread in ours:
            with suppress(ProcessLookupError):  # it has ended
                os.setpriority(os.PRIO_PROCESS, thread, 5)

        rig.driver.rules.hang = 0
        back()

        there = threads()  # those that began since have it from the one that began them
        assert {niceness(thread) for thread in ours & there} == {5}
