"""The watchdog watches the caller: a loop that is stuck lets no offline work run beside whoever starts meanwhile."""

from __future__ import annotations

import time
from dataclasses import replace

from gates import SETTINGS, FakeDriver, gate_rig, wait_until

from valved.machine.ports import WakeOutcome
from valved.machine.stamps import StampKind
from valved.model.ids import GpuIndex, ServiceId

QUICK = replace(SETTINGS, loop_ns=100_000_000, lease_ns=100_000_000)
SERVICE = ServiceId(7)


def test_a_stuck_loop_never_leaves_offline_work_running(driver: FakeDriver) -> None:
    with gate_rig(driver, QUICK) as rig:
        workload = rig.offline()
        workload.add(2)
        assert workload.on() == 2

        rig.gate.alive()  # the last time
        wait_until(lambda: workload.on() == 0, "every GPU is held")

        rig.gate.alive()
        wait_until(lambda: (rig.gate.alive(), workload.on() == 2)[1], "the loop turns again")


def test_a_stuck_loop_never_costs_a_hold_that_was_there(driver: FakeDriver) -> None:
    with gate_rig(driver, QUICK) as rig:
        workload, online = rig.offline(), rig.online(7, {0})
        workload.add()
        wait_until(lambda: rig.gate.wake(SERVICE) is not WakeOutcome.REFUSED, "woken")
        rig.wait_gated(0, False)
        rig.gate.alive()
        wait_until(lambda: workload.on() == 0, "every GPU is held")

        online.launch()
        wait_until(lambda: online.control["gate_epoch"] % 2 == 0, "the ring is heard")
        for _ in range(3):
            seen = rig.driver.counts.enables
            wait_until(lambda: (rig.gate.alive(), rig.gate.is_stopped(GpuIndex(0)))[1], "stopped")
        rig.settle()

        assert rig.driver.counts.enables == seen
        assert workload.on() == 0
        rig.wait_stamp(lambda stamp: stamp.kind is StampKind.HOLD and stamp.client == online.client)


def test_a_loop_that_stays_away_never_keeps_its_heartbeat(driver: FakeDriver) -> None:
    with gate_rig(driver, replace(QUICK, loop_ns=10_000_000)) as rig:
        workload = rig.offline()
        rig.gate.alive()

        def has_ended() -> bool:
            before = workload.control["heartbeat_ns"]
            time.sleep(0.2)  # ten beats
            return bool(workload.control["heartbeat_ns"] == before)

        wait_until(has_ended, "the heartbeat ends")
        gone = workload.control["heartbeat_ns"]
        wait_until(lambda: (rig.gate.alive(), workload.control["heartbeat_ns"] > gone)[1], "it comes back")


def test_a_gate_whose_caller_never_said_that_it_turns_is_not_watched(driver: FakeDriver) -> None:
    with gate_rig(driver, QUICK) as rig:
        workload = rig.offline()
        workload.add()
        first = workload.control["heartbeat_ns"]
        wait_until(lambda: workload.control["heartbeat_ns"] > first + 300_000_000, "three times the patience")

        assert workload.on() == 1
