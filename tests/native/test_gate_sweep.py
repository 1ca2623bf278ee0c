"""Every driver call of the running gate, with every fault that can be played: while it lasts nothing is called stopped
that runs, and when it is over everything is where it should be. What no sweep can find is a driver that says yes and
does nothing (see valved/native/README.md).
"""

from __future__ import annotations

import itertools

import pytest
from gates import HASTY, FakeDriver, Rig, Workload, gate_rig, wait_until

from valved.machine.ports import WakeOutcome
from valved.model.ids import GpuIndex, Reach, ServiceId

SERVICE = ServiceId(7)
ZERO = GpuIndex(0)
CHANNELS = 70  # two lists
CALLS = ("disable", "enable", "query")
FAULTS = ("refuse", "refuse once", "refuse thrice", "hang", "partial", "gone", "interrupted")


def play(driver: FakeDriver, call: str, fault: str) -> None:
    if fault == "hang":
        setattr(driver.rules, {"disable": "hang", "enable": "hang_enable", "query": "hang_query"}[call], 1)
        return
    if fault == "interrupted":
        driver.rules.interrupts = 7
        return
    driver.rules.fail_times = {"refuse once": 1, "refuse thrice": 3}.get(fault, 0)
    driver.rules.fail_after = 5 if fault == "partial" else 0
    if fault == "gone":
        driver.lib.fake_forget_openers()
    else:
        setattr(driver.rules, f"fail_{call}", 0x65)


def lift(driver: FakeDriver) -> None:
    rules = driver.rules
    rules.fail_disable = rules.fail_enable = rules.fail_query = rules.fail_times = rules.fail_after = 0
    rules.hang = rules.hang_enable = rules.hang_query = 0


def add(workload: Workload) -> None:
    """One more channel. One that no rung reaches is told so, and is not the gate's: the shim is answered EOPNOTSUPP."""
    (result,) = workload.add()
    if result.reach is Reach.NONE:
        workload.channels.pop()


def honest(rig: Rig, workloads: list[Workload]) -> bool:
    """Either the GPU is not called stopped, or nothing that the gate knows runs on it."""
    running = sum(workload.on() for workload in workloads)  # before: a stop in between is no lie
    return not rig.gate.is_stopped(ZERO) or running == 0 or sum(workload.on() for workload in workloads) == 0


@pytest.mark.parametrize(("call", "fault"), list(itertools.product(CALLS, FAULTS)))
@pytest.mark.parametrize("ends", ["leaves", "is given up"])
def test_no_fault_of_the_driver_is_ever_taken_for_a_stop_or_outlives_itself(
    driver: FakeDriver, call: str, fault: str, ends: str
) -> None:
    with gate_rig(driver, HASTY) as rig:
        workload, leaver, online = rig.offline(), rig.offline(), rig.online(7, {0})
        wait_until(lambda: rig.gate.wake(SERVICE) is not WakeOutcome.REFUSED, "woken")
        rig.wait_gated(0, False)
        workload.add(CHANNELS)
        leaver.add(3)

        play(driver, call, fault)
        for round_ in range(3):
            online.launch()
            assert honest(rig, [workload])
            if round_ == 1 and fault != "hang":  # a hang keeps the caller for its bounded time: once is enough
                add(workload)
            if round_ == 2:
                if ends == "leaves":
                    rig.gate.remove_client(leaver.client)
                else:
                    rig.gate.channels.give_up(leaver.client, "it is an MPS client")
            online.finish()
            rig.gate.wake(SERVICE)
            assert honest(rig, [workload])
        late = rig.offline()
        if fault in ("hang", "refuse"):
            add(late)
        lift(driver)

        online.launch()
        rig.wait_gated(0)
        wait_until(lambda: workload.on() == late.on() == 0, "all is off after the fault")
        assert honest(rig, [workload, late])
        wait_until(lambda: leaver.on() == 3, "whoever is gone runs, under a closed gate as well")
        online.finish()
        # Proposed again until it holds, as the policy does: the last launch may be heard of after a first wake.
        wait_until(lambda: rig.gate.wake(SERVICE) and not rig.gate.is_gated(ZERO), "woken")
        wait_until(lambda: workload.on() == len(workload.channels), "all is on again")
        assert driver.lib.fake_off_count() == 0


def test_our_own_lost_client_is_never_taken_for_the_end_of_all_channels(rig: Rig) -> None:
    workload, online = rig.offline(), rig.online(7, {0})
    wait_until(lambda: rig.gate.wake(SERVICE) is not WakeOutcome.REFUSED, "woken")
    rig.wait_gated(0, False)
    workload.add(3)

    rig.driver.lib.fake_forget_openers()
    online.launch()
    rig.wait_gated(0)

    assert workload.on() == 0
    online.finish()
    rig.gate.wake(SERVICE)
    rig.wait_gated(0, False)
    assert workload.on() == 3


def test_a_channel_is_never_refused_because_our_own_client_is_gone(rig: Rig) -> None:
    workload = rig.offline()
    rig.driver.lib.fake_forget_openers()

    (result,) = workload.add()

    assert result.status == 0


def test_channels_that_all_ended_are_still_a_stop(rig: Rig) -> None:
    workload, online = rig.offline(), rig.online(7, {0})
    wait_until(lambda: rig.gate.wake(SERVICE) is not WakeOutcome.REFUSED, "woken")
    rig.wait_gated(0, False)
    workload.add(3)
    for ref in workload.channels:
        workload.free(ref)

    online.launch()
    rig.wait_gated(0)

    assert not [stamp for stamp in rig.take_stamps() if stamp.status]
