"""The ladder of rungs, and a driver that refuses, fails, or does not come back."""

from __future__ import annotations

import contextlib
import fcntl
import os
from dataclasses import replace
from pathlib import Path

import pytest
from gates import SETTINGS, FakeDriver, Rig, gate_rig, wait_until
from scarce import left
from valve_abi import Feature, Order

from valved.machine.ports import LeftOff, WakeOutcome
from valved.machine.stamps import StampKind
from valved.model.ids import GpuIndex, Reach, ServiceId

SERVICE = ServiceId(7)
ALL_FEATURES = Feature.SELF_GATE | Feature.HOLD
DENIED = 0x1B


def running(rig: Rig) -> None:
    assert rig.gate.wake(SERVICE) is WakeOutcome.WOKEN
    rig.wait_gated(0, False)


def test_a_driver_that_refuses_foreign_lists_is_reached_on_the_passed_fd(rig: Rig) -> None:
    rig.driver.rules.deny_foreign = DENIED
    workload, online = rig.offline(), rig.online(7, {0})
    running(rig)

    (first,) = workload.add()
    assert (first.reach, first.want_fd, first.status) == (Reach.NONE, True, DENIED)

    workload.pass_fd()
    (second,) = workload.add()
    online.launch()
    rig.wait_gated(0)

    assert (second.reach, second.want_fd, second.status) == (Reach.CHANNEL_FD, False, 0)
    assert workload.on() == 0
    assert rig.gate.channels.reach(GpuIndex(0)) == (Reach.CHANNEL_FD, "channel-own: not permitted (RM status 0x1b)")

    online.finish()
    running(rig)
    assert workload.on() == 2


def test_an_fd_that_comes_while_gated_stops_the_channels_that_waited_for_it(rig: Rig) -> None:
    rig.driver.rules.deny_foreign = DENIED
    workload = rig.offline()
    rig.online(7, {0})
    rig.wait_gated(0)
    workload.add(2)
    assert workload.on() == 2

    workload.pass_fd()

    assert workload.on() == 0
    running(rig)
    assert workload.on() == 2


def test_a_passed_fd_is_closed_when_its_client_goes(rig: Rig) -> None:
    rig.driver.rules.deny_foreign = DENIED
    workload = rig.offline()
    workload.add()
    workload.pass_fd()
    inode = os.fstat(workload.fd).st_ino

    rig.gate.remove_client(workload.client)

    wait_until(lambda: _open_inodes().count(inode) == 1, "only the workload's own copy is left")


def _open_inodes() -> list[int]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            found.append(os.stat(f"/proc/self/fd/{name}").st_ino)
        except OSError:
            continue
    return found


def test_without_an_fd_the_process_is_ordered_to_stop_itself(rig: Rig) -> None:
    rig.driver.rules.deny_foreign = DENIED
    workload, online = rig.offline(features=ALL_FEATURES), rig.online(7, {0})
    running(rig)
    with workload.obeying():
        (result,) = workload.add()
        assert (result.reach, result.want_fd) == (Reach.CHANNEL_SELF, True)

        online.launch()
        stamp = rig.wait_stamp(lambda stamp: stamp.client == online.client)
        assert (stamp.kind, stamp.channels) == (StampKind.GATE, 1)
        assert workload.control["order"] == Order.STOP

        online.finish()
        running(rig)
        assert workload.control["order"] == Order.RUN


def test_a_process_that_can_only_hold_its_launches_is_told_to(rig: Rig) -> None:
    rig.driver.rules.deny_foreign = DENIED
    workload = rig.offline(features=Feature.HOLD)
    with workload.obeying():
        (result,) = workload.add()
        rig.online(7, {0})
        rig.wait_gated(0)

        assert result.reach is Reach.LAUNCH_GATE
        assert workload.control["order"] == Order.HOLD
        assert workload.control["gate_epoch"] % 2, "launches read this word alone"
        assert rig.gate.channels.reach(GpuIndex(0))[0] is Reach.LAUNCH_GATE

        running(rig)
        assert workload.control["order"] == Order.RUN
        assert workload.control["gate_epoch"] % 2 == 0


def test_a_process_on_two_gpus_runs_only_when_both_let_go(rig: Rig) -> None:
    rig.driver.rules.deny_foreign = DENIED
    workload = rig.offline(features=Feature.HOLD)
    with workload.obeying():
        workload.add()
        workload.gpu = GpuIndex(1)
        workload.add()
        rig.online(1, {0})
        rig.online(2, {1})
        rig.wait_gated(0)
        rig.wait_gated(1)

        rig.gate.wake(ServiceId(1))
        rig.wait_gated(0, False)
        assert workload.control["order"] == Order.HOLD

        rig.gate.wake(ServiceId(2))
        rig.wait_gated(1, False)
        assert workload.control["order"] == Order.RUN


def test_a_disable_that_fails_is_stamped_and_holds_the_launches(rig: Rig) -> None:
    workload, online = rig.offline(), rig.online(7, {0})
    running(rig)
    workload.add(3)
    rig.driver.rules.fail_disable = 0x65

    online.launch()
    stamp = rig.wait_stamp(lambda stamp: stamp.client == online.client)

    assert (stamp.kind, stamp.status) == (StampKind.GATE_FAILED, 0x65)
    assert workload.control["order"] == Order.HOLD

    rig.driver.rules.fail_disable = 0
    online.finish()
    running(rig)
    assert workload.control["order"] == Order.RUN
    assert workload.on() == 3


def test_a_hold_of_launches_never_takes_the_place_of_a_stop(rig: Rig) -> None:
    """What lies on the card already would run on beside the online service."""
    rig.driver.rules.deny_foreign = DENIED
    workload, online = rig.offline(features=ALL_FEATURES), rig.online(7, {0})
    running(rig)
    with workload.obeying():
        workload.add()
        rig.gate.hold_launches(workload.client, True)
        assert (workload.control["order"], workload.control["gate_epoch"] % 2) == (Order.HOLD, 1)

        online.launch()
        rig.wait_stamp(lambda stamp: stamp.client == online.client)
        assert (workload.control["order"], workload.control["gate_epoch"] % 2) == (Order.STOP, 1)
        wait_until(lambda: workload.obeyed[-1] == Order.STOP, "it was told")

        online.finish()
        running(rig)
        assert (workload.control["order"], workload.control["gate_epoch"] % 2) == (Order.HOLD, 1)
        rig.gate.hold_launches(workload.client, False)
        assert (workload.control["order"], workload.control["gate_epoch"] % 2) == (Order.RUN, 0)


@pytest.mark.parametrize("rung", ["refused", "launch-gate", "channel-self"])
def test_a_process_that_freed_its_last_channel_is_never_held_for_a_gpu_that_it_left(rig: Rig, rung: str) -> None:
    rig.driver.rules.deny_foreign = 0 if rung == "refused" else DENIED
    workload = rig.offline(features=Feature.HOLD if rung == "launch-gate" else ALL_FEATURES)
    online = rig.online(7, {0})
    running(rig)
    with workload.obeying():
        workload.add()
        rig.driver.rules.fail_disable = 0x65 if rung == "refused" else 0
        online.launch()
        rig.wait_stamp(lambda stamp: stamp.client == online.client)
        assert workload.control["order"] == (Order.STOP if rung == "channel-self" else Order.HOLD)

        rig.driver.rules.fail_disable = 0
        rig.gate.channels.remove_channel(workload.client, workload.h_client, workload.channels[0].h_channel)
        online.finish()
        running(rig)

        assert workload.control["order"] == Order.RUN
        assert workload.control["gate_epoch"] % 2 == 0, "an odd word holds every launch"


def test_a_process_that_frees_its_last_channel_while_the_driver_hangs_is_never_held_for_ever(hasty: Rig) -> None:
    workload, online = hasty.offline(), hasty.online(7, {0})
    running(hasty)
    workload.add()
    hasty.driver.rules.hang = 1
    online.launch()
    hasty.wait_stamp(lambda stamp: stamp.kind is StampKind.GATE_FAILED)
    wait_until(lambda: workload.control["order"] == Order.HOLD, "the next rung")

    hasty.gate.channels.remove_channel(workload.client, workload.h_client, workload.channels[0].h_channel)
    hasty.driver.rules.hang = 0
    online.finish()
    running(hasty)
    hasty.settle()

    assert workload.control["order"] == Order.RUN
    assert workload.control["gate_epoch"] % 2 == 0


def test_no_question_ever_lies_in_wait_for_an_issuer_that_hangs(hasty: Rig) -> None:
    """They would be as many as its processes think of, for as long as it hangs."""
    workload, online = hasty.offline(), hasty.online(7, {0})
    running(hasty)
    workload.add()
    ref = hasty.offline().allocate()
    hasty.driver.rules.hang = 1
    online.launch()
    hasty.wait_stamp(lambda stamp: stamp.kind is StampKind.GATE_FAILED)

    for _ in range(100):
        assert hasty.gate.channels.enable_unless_held(ref) is LeftOff.HELD
        hasty.gate.channels.add_channel(workload.client, workload.allocate())
    hasty.driver.rules.hang = 0
    hasty.wait_gated(0)
    wait_until(lambda: workload.on() == 0, "those that came meanwhile are off, too")

    assert hasty.driver.counts.queries == 1  # before it hung


@pytest.mark.parametrize("orders", ["watchdog", "caller"])
@pytest.mark.parametrize("call", ["hang_query", "hang_enable"])
def test_no_process_is_ever_held_once_its_service_is_quiet_again(hasty: Rig, call: str, orders: str) -> None:
    """A call hung while the GPU ran, a hold came and went, and nothing was stopped: so nothing is to be enabled."""
    workload, online = hasty.offline(), hasty.online(7, {0})
    running(hasty)
    workload.add()
    if call == "hang_enable":
        hasty.driver.rules.fail_enable = DENIED
        hasty.gate.channels.enable_foreign([hasty.offline().allocate()])  # late: it is tried again and again
        hasty.driver.rules.hang_enable = 1
        hasty.driver.rules.fail_enable = 0
        wait_until(lambda: hasty.driver.counts.hanging == 1, "it hangs")
    else:
        hasty.driver.rules.hang_query = 1
        hasty.offline().add()  # given up: the question hangs
    online.launch()
    wait_until(lambda: online.control["gate_epoch"] % 2 == 0, "the ring is heard")
    if orders == "watchdog":
        hasty.wait_stamp(lambda stamp: stamp.kind is StampKind.GATE_FAILED)
        wait_until(lambda: workload.control["order"] == Order.HOLD, "the next rung")
    else:
        workload.add()
        assert workload.control["order"] == Order.HOLD

    online.finish()
    assert hasty.gate.wake(SERVICE) is WakeOutcome.WOKEN
    setattr(hasty.driver.rules, call, 0)

    wait_until(lambda: workload.control["order"] == Order.RUN, "its launches go on")
    assert workload.control["gate_epoch"] % 2 == 0
    assert workload.on() == len(workload.channels)


def test_a_disable_that_hangs_is_reported_and_held_while_it_hangs(hasty: Rig) -> None:
    workload, online = hasty.offline(), hasty.online(7, {0})
    running(hasty)
    workload.add(2)
    hasty.driver.rules.hang = 1

    online.launch()
    stamp = hasty.wait_stamp(lambda stamp: stamp.kind is StampKind.GATE_FAILED)

    assert (stamp.status, stamp.client) == (-110, online.client)
    wait_until(lambda: workload.control["order"] == Order.HOLD, "the next rung")
    assert hasty.driver.counts.hanging == 1
    assert not online.launch()  # the word is closed: online goes on without a call

    hasty.driver.rules.hang = 0
    hasty.wait_stamp(lambda stamp: stamp.kind is StampKind.GATE and stamp.client == online.client)
    assert workload.on() == 0

    online.finish()
    running(hasty)
    assert workload.control["order"] == Order.RUN
    assert workload.on() == 2


def test_a_channel_that_comes_while_the_driver_hangs_holds_its_launches_and_stops_later(hasty: Rig) -> None:
    workload, late, online = hasty.offline(), hasty.offline(), hasty.online(7, {0})
    running(hasty)
    workload.add()
    hasty.driver.rules.hang = 1
    online.launch()
    hasty.wait_stamp(lambda stamp: stamp.kind is StampKind.GATE_FAILED)

    ref = late.allocate()
    hasty.gate.channels.add_channel(late.client, ref)
    assert late.control["order"] == Order.HOLD

    hasty.driver.rules.hang = 0
    wait_until(lambda: late.on() == 0, "the mail is read when the ioctl comes back")
    online.finish()
    running(hasty)

    assert (workload.on(), late.on()) == (1, 1)
    assert late.control["order"] == Order.RUN


def test_a_client_that_leaves_while_the_driver_hangs_gives_its_file_back_at_once(hasty: Rig) -> None:
    hasty.driver.rules.deny_foreign = DENIED
    workload, online = hasty.offline(), hasty.online(7, {0})
    running(hasty)
    workload.add()
    workload.pass_fd()
    inode = os.fstat(workload.fd).st_ino
    hasty.driver.rules.hang = 1
    online.launch()
    hasty.wait_stamp(lambda stamp: stamp.kind is StampKind.GATE_FAILED)

    hasty.gate.remove_client(workload.client)

    wait_until(lambda: _open_inodes().count(inode) == 1, "only its own copy is left")
    assert hasty.driver.counts.hanging == 1
    assert hasty.gate.channels.behind() == {workload.client}, "nobody lets the process die as if its channels were on"
    hasty.driver.rules.hang = 0
    hasty.wait_stamp(lambda stamp: stamp.kind is StampKind.GATE and stamp.client == online.client)

    def has_answered() -> bool:
        hasty.gate.alive()
        return not hasty.gate.channels.behind()

    wait_until(has_answered, "and then it is known")
    assert not hasty.gate.channels._unsure, "nor is it looked at for ever"


def test_an_interrupted_call_is_made_again(rig: Rig) -> None:
    workload, online = rig.offline(), rig.online(7, {0})
    running(rig)
    workload.add()
    rig.driver.rules.interrupts = 5

    online.launch()
    stamp = rig.wait_stamp(lambda stamp: stamp.client == online.client)

    assert (stamp.status, workload.on()) == (0, 0)


def test_the_heartbeat_goes_on_while_an_issuer_hangs(rig: Rig) -> None:
    workload, online = rig.offline(), rig.online(7, {0})
    running(rig)
    workload.add()
    rig.driver.rules.hang = 1
    online.launch()
    wait_until(lambda: rig.driver.counts.hanging == 1, "the disable hangs")
    before = workload.control["heartbeat_ns"]

    wait_until(lambda: workload.control["heartbeat_ns"] > before, "a beat")

    assert rig.driver.counts.hanging == 1


@pytest.mark.parametrize("words", [("slot_offset", 1 << 31), ("slot_count", 1 << 30), ("magic", 5)])
def test_a_region_that_makes_no_sense_is_never_idle_and_never_read_beyond(rig: Rig, words: tuple[str, int]) -> None:
    online = rig.online(7, {0})
    online.region[words[0]] = words[1]

    assert rig.gate.wake(SERVICE) is WakeOutcome.REFUSED
    assert rig.gate.view(online.client).submitted == 0


def test_a_workload_that_dies_on_the_passed_fd_leaves_nothing_off(rig: Rig) -> None:
    rig.driver.rules.deny_foreign = DENIED
    dying, staying = rig.offline(), rig.offline()
    for workload in (dying, staying):
        workload.add()
        workload.pass_fd()
    rig.online(7, {0})
    rig.wait_gated(0)

    rig.gate.remove_client(dying.client)
    running(rig)

    assert rig.driver.lib.fake_off_count() == 0
    assert staying.on() == 1


def test_closing_the_gate_enables_everything(fake_library: Path) -> None:
    driver = FakeDriver(fake_library)
    with gate_rig(driver) as rig:
        workload = rig.offline()
        workload.add(70)
        rig.online(7, {0})
        rig.wait_gated(0)
        assert driver.lib.fake_off_count() == 70

        rig.gate.close = _closing(rig)  # type: ignore[method-assign]
        rig.gate.close()

        assert driver.lib.fake_off_count() == 0


def _closing(rig: Rig):
    """Close once, here; the rig's own close then finds it done."""
    close, done = rig.gate.close, []
    return lambda: None if done else (done.append(True), close())[0]


def _take_nonblocking_away(order: int) -> None:
    """What a client can do to the eventfd that it shares with valved: the next write to it would wait for ever."""
    fcntl.fcntl(order, fcntl.F_SETFL, fcntl.fcntl(order, fcntl.F_GETFL) & ~os.O_NONBLOCK)
    os.eventfd_write(order, (1 << 64) - 2)


def test_a_client_that_makes_its_order_eventfd_blocking_never_stops_a_thread_of_the_gate(hasty: Rig) -> None:
    hostile, honest, online = hasty.offline(), hasty.offline(), hasty.online(7, {0})
    running(hasty)
    hostile.add()
    honest.add()
    _take_nonblocking_away(hostile.fds.order)
    hasty.driver.rules.hang = 1
    online.launch()  # the watchdog puts holds on all clients of the plan

    hasty.wait_stamp(lambda stamp: stamp.kind is StampKind.GATE_FAILED)
    before = honest.control["heartbeat_ns"]
    wait_until(lambda: honest.control["heartbeat_ns"] > before, "a beat")
    wait_until(lambda: honest.control["order"] == Order.HOLD, "the order")

    hasty.driver.rules.hang = 0
    hasty.wait_gated(0)
    assert (hostile.on(), honest.on()) == (0, 0)


def test_a_client_that_makes_its_order_eventfd_blocking_never_stops_the_caller(rig: Rig) -> None:
    hostile = rig.offline(features=Feature.HOLD)
    _take_nonblocking_away(hostile.fds.order)

    rig.gate.hold_launches(hostile.client, True)

    assert hostile.control["order"] == Order.HOLD


def test_an_order_rings_the_eventfd_that_old_shims_know(rig: Rig) -> None:
    workload = rig.offline(features=Feature.HOLD)

    def has_rung() -> bool:
        with contextlib.suppress(BlockingIOError):
            return os.eventfd_read(workload.fds.order) > 0
        return False

    for number in range(300):  # more than are in flight at a time
        rig.gate.hold_launches(workload.client, number % 2 == 0)
        wait_until(has_rung, "its ring")


def test_a_mail_that_was_given_up_never_reaches_a_file_that_came_after_its_client(hasty: Rig) -> None:
    """The number of the file that it names stays taken, and harmless, until the driver came back to read it."""
    workload, online = hasty.offline(), hasty.online(7, {0})
    running(hasty)
    workload.add()

    def lay_there() -> bool:
        """No mail is left for a driver that was given up already, so one that is late finds nothing to wait for."""
        gone = hasty.offline()
        ref, mine = gone.allocate(), os.dup(gone.fd)
        file = _file_of(mine)
        hasty.gate.channels.give_rm_client(gone.client, gone.gpu, gone.h_client, 0, gone.h_subdevice, mine)
        hasty.driver.rules.hang = 1
        online.launch()
        wait_until(lambda: hasty.driver.counts.hanging == 1, "the disable hangs")

        assert hasty.gate.granting.shorten(gone.client, ref, 1000)  # returns once the watchdog gave the disable up
        with left(0):  # not even then is it let go
            hasty.gate.remove_client(gone.client)
            wait_until(lambda: _file_of(mine) != file, "a thread has given its file up")
            is_taken = "valve-nothing" in _file_of(mine)
        hasty.driver.rules.hang = 0
        hasty.settle()
        hasty.gate.channels.add_channel(workload.client, workload.allocate())  # the next mail frees what came back
        wait_until(lambda: not _file_of(mine), "its number is free")
        online.finish()
        running(hasty)
        return is_taken

    wait_until(lay_there, "its number stays taken")


def _file_of(fd: int) -> str:
    with contextlib.suppress(FileNotFoundError):
        return os.readlink(f"/proc/self/fd/{fd}")
    return ""


def test_two_stops_that_hang_never_leave_a_ring_unheard(rig: Rig) -> None:
    """Each listener hangs with the stop that it makes itself; the next one has listened since."""
    first, second, third = rig.online(7, {0}), rig.online(8, {1}), rig.online(9, {0})
    for gpu in (0, 1):
        rig.offline(gpu=gpu).add()
    for service in (7, 8, 9):
        assert rig.gate.wake(ServiceId(service)) is WakeOutcome.WOKEN
    rig.wait_gated(0, False)
    rig.wait_gated(1, False)
    rig.driver.rules.hang = 1

    assert first.launch()
    wait_until(lambda: rig.driver.counts.hanging == 1, "the first stop hangs")
    assert second.launch()
    wait_until(lambda: rig.driver.counts.hanging == 2, "the second stop hangs")
    assert third.launch()

    wait_until(lambda: third.control["gate_epoch"] % 2 == 0, "the third ring is heard")
    assert rig.driver.counts.hanging == 2


def test_many_silent_processes_never_keep_a_stop_for_longer_than_one(driver: FakeDriver) -> None:
    """They hear their orders before any of them is waited for. In a row they would take eight times as long."""
    with gate_rig(driver, replace(SETTINGS, order_ns=1_000_000_000)) as rig:
        driver.rules.deny_foreign = 0x1B
        for _ in range(8):
            rig.offline(features=Feature.HOLD).add()
        rig.online(7, {0})

        stamp = rig.wait_stamp(lambda stamp: stamp.kind is StampKind.GATE_FAILED)

        assert stamp.done_ns - stamp.ioctl_ns < 8_000_000_000
