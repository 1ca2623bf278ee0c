"""What an issuer does first: a stop before mail, and what was left over before what it has tried."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from gates import HASTY, FakeDriver, Launcher, Rig, Workload, gate_rig, wait_until

from valved.abi.link import Feature
from valved.machine.ports import StampKind, WakeOutcome
from valved.model.ids import ServiceId

SERVICE = ServiceId(7)


@pytest.fixture
def running(driver: FakeDriver) -> Iterator[tuple[Rig, Launcher, Workload]]:
    """A GPU that nobody holds, with offline work."""
    with gate_rig(driver, HASTY) as rig:
        online = rig.online(7, {0})
        workload = rig.offline()
        workload.add(2)
        rig.wait_gated(0)
        rig.gate.wake(SERVICE)
        rig.wait_gated(0, False)
        yield rig, online, workload


def launch(online: Launcher) -> None:
    online.launch()
    wait_until(lambda: online.control["gate_epoch"] % 2 == 0, "the ring is heard")


def is_stopped_by(rig: Rig, online: Launcher) -> None:
    rig.wait_stamp(lambda stamp: stamp.client == online.client and stamp.kind is StampKind.GATE)


def left_by_a_predecessor(rig: Rig, count: int) -> Workload:
    gone = rig.offline()
    for ref in [gone.allocate() for _ in range(count)]:
        rig.driver.lib.fake_switch(ref.h_client, ref.h_channel, 0)
    return gone


def stuck_in_a_question(rig: Rig, workload: Workload) -> None:
    """The issuer hangs, and whoever asks it gives up: the mail lies there."""
    rig.driver.rules.hang_query = 1
    rig.gate.channels.add_channel(workload.client, workload.allocate())


def test_no_stop_ever_waits_for_mail_that_came_before_it(running: tuple[Rig, Launcher, Workload]) -> None:
    rig, online, workload = running
    gone = left_by_a_predecessor(rig, 8)
    stuck_in_a_question(rig, workload)
    assert rig.gate.channels.enable_foreign(gone.channels) == 0
    launch(online)
    rig.driver.rules.hang_enable = 1  # whatever is enabled from here on
    rig.driver.rules.hang_query = 0

    is_stopped_by(rig, online)

    assert workload.on() == 0, "the channel whose mail lay there is of the plan that was stopped"
    rig.driver.rules.hang_enable = 0
    wait_until(lambda: gone.on() == 8, "all run")


def test_no_stop_ever_waits_for_the_mail_behind_the_one_that_is_carried_out(
    running: tuple[Rig, Launcher, Workload],
) -> None:
    rig, online, workload = running
    gone = left_by_a_predecessor(rig, 8)
    stuck_in_a_question(rig, workload)
    assert rig.gate.channels.enable_foreign(gone.channels) == 0
    rig.driver.rules.hang_enable = 1
    before = rig.driver.counts.enables
    rig.driver.rules.hang_query = 0
    counts = rig.driver.counts
    wait_until(lambda: counts.enables > before and counts.hanging == 1 and gone.on() == 0, "an enable is under way")
    launch(online)
    rig.driver.rules.passes = 1  # that one, and no other

    is_stopped_by(rig, online)

    rig.driver.rules.hang_enable = 0
    wait_until(lambda: gone.on() == 8, "all run")


def test_no_client_ever_keeps_an_order_of_a_plan_that_a_newer_one_overtook(rig: Rig) -> None:
    """Both lay there while the driver hung: one with the client's only channel, and one without it."""
    rig.online(7, {0})
    rig.wait_gated(0)
    rig.driver.rules.deny_foreign = 0x1B
    client, other = (rig.offline(features=int(Feature.HOLD)) for _ in range(2))
    with client.obeying(), other.obeying():
        other.add(1)
        first = client.allocate()  # by it the gate learns that orders are its only way
        rig.gate.channels.add_channel(client.client, first)
        rig.gate.channels.remove_channel(client.client, first.h_client, first.h_channel)
        client.free(first)
        rig.settle()
        stuck_in_a_question(rig, other)
        channel = client.allocate()
        rig.gate.channels.add_channel(client.client, channel)
        rig.gate.channels.remove_channel(client.client, channel.h_client, channel.h_channel)
        client.free(channel)
        rig.driver.rules.hang_query = 0
        rig.settle()
        rig.gate.wake(SERVICE)
        rig.wait_gated(0, False)
        rig.settle()

        wait_until(lambda: client.control["order"] == 0, "it may run")
        wait_until(lambda: client.control["gate_epoch"] % 2 == 0, "its launches do not wait")


def of_steps(rig: Rig, steps: int) -> list[Workload]:
    """A step is of one file."""
    made = [rig.offline() for _ in range(steps)]
    for workload in made:
        workload.pass_fd()
        workload.add()
    return made


def test_no_step_of_a_plan_is_left_off_for_ever_by_stops_that_cut_each_enable(rig: Rig) -> None:
    rules, counts = rig.driver.rules, rig.driver.counts
    online = rig.online(7, {0})
    rules.deny_foreign = 0x1B
    rig.wait_gated(0)
    made, ran = of_steps(rig, 4), set[int]()
    for _ in made:
        rules.hang_enable = 1
        wait_until(lambda: rig.gate.wake(SERVICE) is not WakeOutcome.REFUSED, "woken")
        wait_until(lambda: counts.hanging == 1, "an enable is under way")
        launch(online)
        tried = counts.disables
        rules.hang = rules.passes = 1
        wait_until(lambda n=tried: counts.disables > n and counts.hanging == 1, "its stop is under way")  # type: ignore[misc]
        ran |= {i for i, workload in enumerate(made) if workload.on()}
        rules.hang = 0
        rig.wait_gated(0)
        online.finish()
    rules.hang_enable = 0

    assert ran == set(range(4))
