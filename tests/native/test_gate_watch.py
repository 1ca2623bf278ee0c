"""The watchdog looks rarely while nothing is late: what it must see is seen in time all the same.

Each test begins just after a look, when the next one is furthest away. Load makes a machine later, never earlier: the
best of some tries counts.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from gates import HASTY, SETTINGS, FakeDriver, Launcher, Rig, Workload, compile_c, gate_rig, wait_until

from valved.machine.ports import StampKind, WakeOutcome
from valved.model.ids import ServiceId

SERVICE = ServiceId(7)
TRIES = 8


def just_after_a_look(workload: Workload) -> None:
    """Heartbeats are written at looks."""
    before = workload.control["heartbeat_ns"]
    while workload.control["heartbeat_ns"] == before:
        pass


def best(trial: Callable[[], int], enough_ns: int) -> int:
    found = trial()
    for _ in range(TRIES):
        if found <= enough_ns:
            break
        found = min(found, trial())
    return found


def hang_once(rig: Rig, workload: Workload, online: Launcher) -> int:
    """From the driver call to the report that it hangs."""
    online.finish()
    wait_until(lambda: rig.gate.wake(SERVICE) is not WakeOutcome.REFUSED, "woken")
    rig.wait_gated(0, False)
    rig.take_stamps()
    rig.stamps.clear()
    rig.driver.rules.hang = 1
    just_after_a_look(workload)
    online.launch()
    stamp = rig.wait_stamp(lambda stamp: stamp.kind is StampKind.GATE_FAILED)
    rig.driver.rules.hang = 0
    rig.wait_gated(0)
    assert stamp.done_ns - stamp.ioctl_ns >= HASTY.hang_ns
    return stamp.done_ns - stamp.ioctl_ns


def test_a_stop_that_hangs_just_after_a_look_is_never_reported_later_than_it_was(driver: FakeDriver) -> None:
    hasty = replace(HASTY, lease_ns=5_000_000_000)  # a heartbeat a second: not by its looks is it seen in time
    with gate_rig(driver, hasty) as rig:
        workload, online = rig.offline(), rig.online(7, {0})
        workload.add(2)
        online.launch()

        bound_ns = HASTY.hang_ns + HASTY.hang_ns // 4
        assert best(lambda: hang_once(rig, workload, online), bound_ns) <= bound_ns


def test_a_loop_that_falls_silent_just_after_a_look_never_lets_offline_work_run_longer(driver: FakeDriver) -> None:
    loop_ns = 200_000_000
    settings = replace(SETTINGS, loop_ns=loop_ns, hang_ns=4 * loop_ns, lease_ns=20 * loop_ns)
    with gate_rig(driver, settings) as rig:
        workload = rig.offline()
        workload.add(2)

        def fall_silent() -> int:
            wait_until(lambda: (rig.gate.alive(), workload.on() == 2)[1], "the loop turns")
            before = workload.control["heartbeat_ns"]
            while workload.control["heartbeat_ns"] == before:
                rig.gate.alive()
            began_ns = time.monotonic_ns()
            rig.gate.alive()
            wait_until(lambda: workload.on() == 0, "every GPU is held")
            return time.monotonic_ns() - began_ns

        assert best(fall_silent, loop_ns * 3 // 2) <= loop_ns * 3 // 2


def test_the_heartbeat_never_falls_behind_because_nothing_else_is_to_be_watched(driver: FakeDriver) -> None:
    with gate_rig(driver, replace(SETTINGS, lease_ns=500_000_000)) as rig:
        workload = rig.offline()

        def between_two() -> int:
            just_after_a_look(workload)
            first = workload.control["heartbeat_ns"]
            just_after_a_look(workload)
            return int(workload.control["heartbeat_ns"] - first)

        assert best(between_two, 110_000_000) <= 110_000_000


@pytest.mark.sanitizer
def test_a_doorbell_that_is_muted_while_the_watchdog_looks_is_never_deaf_for_ever(
    repository: Path, tmp_path: Path
) -> None:
    """tests/native/deaf.c keeps the listener half way through the muting until the watchdog has looked."""
    native = sorted((repository / "valved/native").rglob("*.c"))
    ours = [repository / "tests/native" / name for name in ("deaf.c", "fake_rm.c")]
    compile_c(tmp_path / "deaf", native + ours, "-fsanitize=address,undefined", "-O1", "-g", "-Wl,--wrap=epoll_ctl")
    environment = {**os.environ, "LD_PRELOAD": ""}

    done = subprocess.run([tmp_path / "deaf"], capture_output=True, text=True, env=environment, check=False)

    assert done.returncode == 0, done.stdout + done.stderr[-6000:]
