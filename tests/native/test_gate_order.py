"""What an issuer does first: a stop before mail, and what was left over before what it has tried."""

from __future__ import annotations

import os
import select
from collections.abc import Iterator
from dataclasses import replace

import pytest
from gates import HASTY, SETTINGS, FakeDriver, Launcher, Rig, Workload, gate_rig, wait_until
from valve_abi import Order

from valved.abi.link import Feature
from valved.machine.ports import WakeOutcome
from valved.machine.stamps import StampKind
from valved.model.ids import ChannelRef, Role, ServiceId

SERVICE = ServiceId(7)
GIVES_UP = replace(SETTINGS, hang_ns=1_000_000_000)  # no loaded machine passes for a driver that hangs


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


def test_no_client_ever_keeps_an_order_of_a_plan_that_a_newer_one_overtook(driver: FakeDriver) -> None:
    """Both lay there while the driver hung: one with the client's only channel, and one without it."""
    with gate_rig(driver, GIVES_UP) as rig:
        rig.online(7, {0})
        rig.wait_gated(0)
        rig.driver.rules.deny_foreign = 0x1B
        client, other = (rig.offline(features=int(Feature.HOLD)) for _ in range(2))
        with client.obeying(), other.obeying():
            other.add(1)
            first = client.allocate()  # by it the gate learns that orders are its only way
            comes_and_goes(rig, client, first)
            rig.settle()
            stuck_in_a_question(rig, other)
            comes_and_goes(rig, client, client.allocate())
            rig.driver.rules.hang_query = 0
            rig.settle()
            rig.gate.wake(SERVICE)
            rig.wait_gated(0, False)
            rig.settle()

            wait_until(lambda: client.control["order"] == 0, "it may run")
            wait_until(lambda: client.control["gate_epoch"] % 2 == 0, "its launches do not wait")


def comes_and_goes(rig: Rig, client: Workload, channel: ChannelRef) -> None:
    rig.gate.channels.add_channel(client.client, channel)
    rig.gate.channels.remove_channel(client.client, channel.h_client, channel.h_channel)
    client.free(channel)


def test_no_enable_that_lay_in_the_mail_ever_runs_a_channel_that_was_stopped_meanwhile(
    running: tuple[Rig, Launcher, Workload],
) -> None:
    """Its process came back while the driver hung: by then it is of the plan, and the GPU is held."""
    rig, online, workload = running
    back = left_by_a_predecessor(rig, 1)
    stuck_in_a_question(rig, workload)
    assert rig.gate.channels.enable_foreign(back.channels) == 0
    rig.gate.channels.add_channel(back.client, back.channels[0])
    launch(online)
    enables = rig.driver.counts.enables
    rig.driver.rules.hang_query = 0
    rig.settle()

    assert rig.driver.counts.enables == enables
    online.finish()
    wait_until(lambda: rig.gate.wake(SERVICE) is not WakeOutcome.REFUSED, "woken")
    wait_until(lambda: (back.on(), workload.on()) == (1, 3), "all run")


def test_no_trial_of_an_order_ever_lets_a_process_run_that_was_stopped_meanwhile(rig: Rig) -> None:
    """Orders stop its channels. The way to one more of them is being tried when a launch comes."""
    online = rig.online(7, {0})
    rig.driver.rules.deny_foreign = 0x1B
    workload = rig.offline(features=int(Feature.SELF_GATE))
    with workload.obeying():
        workload.add()
        rig.gate.wake(SERVICE)
        rig.wait_gated(0, False)
        wait_until(lambda: workload.control["order"] == Order.RUN, "it runs")
    workload.obeyed.clear()
    with workload.obeying(lambda: launch_beside(online, workload)):
        rig.gate.channels.add_channel(workload.client, of_another_rm_client(rig, workload))
        rig.settle()

        assert set(workload.obeyed) == {Order.STOP}
    with workload.obeying():
        online.finish()
        wait_until(lambda: rig.gate.wake(SERVICE) is not WakeOutcome.REFUSED, "woken")
        wait_until(lambda: workload.control["order"] == Order.RUN, "it runs again")


def launch_beside(online: Launcher, workload: Workload) -> None:
    before = workload.control["order_seq"]
    if online.launch():
        wait_until(lambda: workload.control["order_seq"] != before, "the stop has given its order, too")


def of_another_rm_client(rig: Rig, workload: Workload) -> ChannelRef:
    fd, subdevice = rig.driver.ffi.new("int *"), rig.driver.ffi.new("uint32_t *")
    h_client = rig.driver.lib.fake_client(fd, subdevice, 0)
    os.close(fd[0])
    ref = workload.channels[0]
    return replace(ref, h_client=h_client, cid=rig.driver.lib.fake_channel(h_client, ref.h_channel, 0))


def test_no_channel_that_its_process_left_while_the_driver_hung_is_ever_off_and_forgotten(
    running: tuple[Rig, Launcher, Workload],
) -> None:
    """The list that brought it lies before the one without it, and a launch comes before both are answered."""
    rig, online, workload = running
    leaver = rig.offline()
    stuck_in_a_question(rig, workload)
    leaver.add()
    known = rig.gate.remove_client(leaver.client, lives_on=True)
    launch(online)
    rig.driver.rules.hang_query = 0
    rig.settle()

    assert leaver.on() == 0
    assert known == tuple(leaver.channels)


def test_no_new_launch_ever_waits_for_mail_because_the_stop_before_it_was_refused(
    running: tuple[Rig, Launcher, Workload],
) -> None:
    rig, online, workload = running
    rules, counts, gone = rig.driver.rules, rig.driver.counts, left_by_a_predecessor(rig, 8)
    rules.fail_disable = 0x65
    launch(online)
    rig.wait_stamp(lambda stamp: stamp.kind is StampKind.GATE_FAILED)
    stuck_in_a_question(rig, workload)
    assert rig.gate.channels.enable_foreign(gone.channels) == 0
    before, rules.hang_enable, rules.hang_query = counts.enables, 1, 0
    wait_until(lambda: counts.enables > before and counts.hanging == 1, "an enable is under way")
    online.finish()
    assert rig.gate.wake(SERVICE) is WakeOutcome.WOKEN
    rules.fail_disable = 0
    launch(online)
    rules.passes = 1  # that one, and no other

    is_stopped_by(rig, online)

    rules.hang_enable = 0
    online.finish()
    wait_until(lambda: rig.gate.wake(SERVICE) is not WakeOutcome.REFUSED, "woken")
    wait_until(lambda: (gone.on(), workload.on()) == (8, 3), "all run")


def of_steps(rig: Rig, steps: int, channels: int = 1) -> list[Workload]:
    """A step is of one file."""
    made = [rig.offline() for _ in range(steps)]
    for workload in made:
        workload.pass_fd()
        workload.add(channels)
    return made


def cut_enable(rig: Rig, online: Launcher) -> None:
    """Stopped again during the first call of an enable."""
    rules, counts = rig.driver.rules, rig.driver.counts
    rules.hang_enable = 1
    wait_until(lambda: rig.gate.wake(SERVICE) is not WakeOutcome.REFUSED, "woken")
    wait_until(lambda: counts.hanging == 1, "an enable is under way")
    launch(online)
    tried = counts.disables
    rules.hang = rules.passes = 1
    wait_until(lambda: counts.disables > tried and counts.hanging == 1, "its stop is under way")


def stop_comes_back(rig: Rig, online: Launcher) -> None:
    rig.driver.rules.hang = 0
    rig.wait_gated(0)
    online.finish()


def test_no_step_of_a_plan_is_left_off_for_ever_by_stops_that_cut_each_enable(rig: Rig) -> None:
    online = rig.online(7, {0})
    rig.driver.rules.deny_foreign = 0x1B
    rig.wait_gated(0)
    made, ran = of_steps(rig, 4), set[int]()
    for _ in made:
        cut_enable(rig, online)
        ran |= {i for i, workload in enumerate(made) if workload.on()}
        stop_comes_back(rig, online)
    rig.driver.rules.hang_enable = 0

    assert ran == set(range(4))


def test_no_step_whose_own_search_is_cut_ever_holds_up_the_steps_behind_it(rig: Rig) -> None:
    """A channel of it has ended unseen each time, so its list is refused, and the stop comes before it is searched."""
    online = rig.online(7, {0})
    rig.driver.rules.deny_foreign = 0x1B
    rig.wait_gated(0)
    made, ran = of_steps(rig, 4, channels=6), set[int]()
    for _ in range(4):
        made[0].free(made[0].channels.pop())
        cut_enable(rig, online)
        ran |= {i for i, workload in enumerate(made) if workload.on()}
        stop_comes_back(rig, online)
    rig.driver.rules.hang_enable = 0

    assert ran >= {1, 2, 3}


def test_an_order_to_a_process_that_could_end_valved_anyway_never_waits_for_another_thread(driver: FakeDriver) -> None:
    with gate_rig(driver, SETTINGS) as rig:
        client = rig.name()
        fds = rig.gate.create_client(client, Role.OFFLINE, ServiceId(0), at_once=True)

        rig.gate.hold_launches(client, True)

        assert select.select([fds.order], [], [], 0)[0]
