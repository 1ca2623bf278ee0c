"""Channels that ended without a word: what a stop pays for them, and what is never taken for one."""

from __future__ import annotations

import pytest
from gates import Rig, Workload

from valved.machine.ports import WakeOutcome
from valved.model.ids import ServiceId

SERVICE = ServiceId(7)
CROWD = 64


@pytest.fixture
def crowd(rig: Rig) -> list[Workload]:
    """So many processes with a channel each: one list."""
    rig.online(7, {0})
    wake(rig)
    crowd = [rig.offline() for _ in range(CROWD)]
    for workload in crowd:
        workload.add()
    return crowd


def wake(rig: Rig) -> None:
    assert rig.gate.wake(SERVICE) is WakeOutcome.WOKEN
    rig.wait_gated(0, False)


def stop(rig: Rig) -> int:
    """How many calls it takes."""
    before = rig.driver.counts.disables
    rig.gate.hold(SERVICE, 0)
    rig.wait_gated(0)
    rig.settle()
    return int(rig.driver.counts.disables - before)


def end_unsaid(workload: Workload) -> None:
    workload.free(workload.channels[-1])


def is_off(workload: Workload) -> bool:
    return workload.on() == 0


def test_one_ended_channel_never_costs_a_call_for_each_process(rig: Rig, crowd: list[Workload]) -> None:
    end_unsaid(crowd[20])

    assert stop(rig) <= 14  # halves, as far as its process, and that one's search
    assert all(map(is_off, crowd))


def test_no_plan_names_a_channel_again_that_the_driver_said_has_ended(rig: Rig, crowd: list[Workload]) -> None:
    end_unsaid(crowd[20])
    stop(rig)
    wake(rig)

    crowd[3].add()  # a new plan
    calls = stop(rig)

    assert calls == 1
    assert all(map(is_off, crowd))


def test_a_channel_that_is_told_anew_is_never_taken_for_the_one_that_ended(rig: Rig, crowd: list[Workload]) -> None:
    """It has its numbers, and no plan was made between."""
    old = crowd[20].channels.pop()
    crowd[20].free(old)
    stop(rig)
    wake(rig)
    crowd[20].add()
    assert crowd[20].channels[0].h_channel == old.h_channel

    crowd[3].add()
    stop(rig)

    assert all(map(is_off, crowd))


def test_an_ended_channel_that_is_told_again_is_never_taken_in(rig: Rig, crowd: list[Workload]) -> None:
    end_unsaid(crowd[20])
    stop(rig)
    crowd[3].add()  # the books hear of it

    result = rig.gate.channels.add_channel(crowd[20].client, crowd[20].channels[0])

    assert not result.is_known


def test_who_ends_channels_unsaid_again_and_again_never_makes_others_wait(rig: Rig, crowd: list[Workload]) -> None:
    """After some times its channels are in lists of their own: all others are off with the first call."""
    rude = crowd[20]
    for _ in range(3):
        end_unsaid(rude)
        stop(rig)
        wake(rig)
        rude.channels.pop()
        rude.add()
    rude.add(2)
    end_unsaid(rude)

    assert stop(rig) <= 6  # one for all others, and what its own list takes
    assert all(map(is_off, crowd))
    wake(rig)
    crowd[3].add()

    assert stop(rig) == 2  # theirs, and its own


@pytest.mark.parametrize("call", range(2, 7))
def test_channels_are_never_called_ended_because_the_caller_ended_between_two_calls(rig: Rig, call: int) -> None:
    """One ended channel makes the list refused. Then our own RM client goes, and all looks as if it had ended."""
    rig.online(7, {0})
    wake(rig)
    crowd = [rig.offline() for _ in range(3)]
    for workload in crowd:
        workload.add()
    end_unsaid(crowd[2])

    rig.driver.rules.forget_at = call
    rig.gate.hold(SERVICE, 0)
    rig.wait_gated(0)

    assert all(map(is_off, crowd))
    wake(rig)
    assert [workload.on() for workload in crowd] == [1, 1, 0]
