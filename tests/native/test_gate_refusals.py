"""A disable that fails: it is tried again for as long as the GPU is held, and never taken for a stop meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from gates import SETTINGS, FakeDriver, Rig, Workload, gate_rig, wait_until
from native_world import NativeWorld

from valved.machine.ports import WakeOutcome
from valved.machine.stamps import StampKind
from valved.model.ids import ClientId, GpuIndex, Reach, ServiceId

SERVICE = ServiceId(7)
ZERO = GpuIndex(0)
REFUSED = 0x65


@pytest.fixture
def node(driver: FakeDriver, tmp_path: Path) -> Iterator[NativeWorld]:
    with gate_rig(driver) as rig:
        node = NativeWorld(tmp_path, rig)
        yield node
        node.close()


def held_after_failure(rig: Rig) -> None:
    """The service's launch found a driver that refuses."""
    online = rig.online(7, {0})
    wait_until(lambda: rig.gate.wake(SERVICE) is not WakeOutcome.REFUSED, "woken")
    rig.wait_gated(0, False)
    rig.driver.rules.fail_disable = REFUSED
    online.launch()
    rig.wait_stamp(lambda stamp: stamp.kind is StampKind.GATE_FAILED)


@pytest.mark.parametrize("times", [1, 6, 12])
def test_a_refused_disable_never_stays_refused_while_the_service_holds(rig: Rig, times: int) -> None:
    workload = rig.offline()
    workload.add()
    rig.driver.rules.fail_times = times
    held_after_failure(rig)

    rig.wait_gated(0)

    assert workload.on() == 0
    rig.wait_stamp(lambda stamp: stamp.kind is StampKind.GATE and stamp.launch_ns)
    failures = [stamp for stamp in rig.stamps if stamp.kind is StampKind.GATE_FAILED]
    assert [stamp.status for stamp in failures] == [REFUSED]  # told once, however often it is met


def test_a_gpu_that_could_not_be_stopped_is_never_called_stopped(rig: Rig) -> None:
    workload = rig.offline()
    workload.add()
    held_after_failure(rig)
    tried = rig.driver.counts.disables
    wait_until(lambda: rig.driver.counts.disables > tried + 2, "it is tried again")

    assert not rig.gate.is_stopped(ZERO)
    assert rig.gate.is_gated(ZERO)

    rig.driver.rules.fail_disable = 0
    rig.wait_gated(0)
    assert workload.on() == 0


def test_a_gpu_between_two_tries_never_keeps_others_waiting(rig: Rig) -> None:
    """Mapping work waits for stops under way; a driver that refuses for hours is not one."""
    rig.offline().add()
    held_after_failure(rig)

    wait_until(lambda: not rig.gate.is_turning(), "nothing is under way")


def test_a_new_hold_is_never_left_without_word_of_an_old_failure(rig: Rig) -> None:
    rig.offline().add()
    held_after_failure(rig)
    failed = rig.driver.counts.disables
    wait_until(lambda: rig.driver.counts.disables > failed + 5, "it is tried again")
    rig.gate.put_service(SERVICE, frozenset())
    rig.wait_gated(0, False)
    before = len(rig.take_stamps())

    rig.gate.put_service(SERVICE, frozenset({ZERO}))

    rig.wait_stamp(lambda stamp: stamp.kind is StampKind.GATE_FAILED and stamp in rig.stamps[before:])


def test_a_channel_that_comes_while_nothing_can_be_stopped_never_stays_out_of_the_gate(rig: Rig) -> None:
    rig.offline().add()
    held_after_failure(rig)
    late = rig.offline()

    (result,) = late.add()

    assert result.reach is Reach.CHANNEL_OWN
    rig.driver.rules.fail_disable = 0
    rig.wait_gated(0)
    assert late.on() == 0


@pytest.mark.parametrize("is_held", [True, False])
def test_a_channel_that_comes_while_the_driver_has_no_time_is_never_beyond_the_gate_for_good(
    rig: Rig, is_held: bool
) -> None:
    """No rung reached it then, and none was tried again: it ran beside every service from then on."""
    workload = rig.offline()
    if is_held:
        rig.online(7, {0})
        rig.wait_gated(0)
    rig.driver.rules.fail_disable = REFUSED

    (result,) = workload.add()

    assert result.reach is Reach.CHANNEL_OWN
    if is_held:
        rig.wait_stamp(lambda stamp: stamp.kind is StampKind.GATE_FAILED)  # what is frozen meanwhile goes by this
    rig.driver.rules.fail_disable = 0
    if not is_held:
        rig.online(7, {0})
    wait_until(lambda: workload.on() == 0, "it is off")


def test_a_channel_is_never_kept_on_a_rung_that_this_valved_does_not_have(driver: FakeDriver) -> None:
    """The driver had no time for our own RM client as valved began: that is for good, and the next rung is well."""
    driver.rules.fail_clients = REFUSED
    with gate_rig(driver) as rig:
        driver.rules.fail_clients = 0
        workload = rig.offline()
        workload.pass_fd()

        (result,) = workload.add()
        rig.online(7, {0})

        assert result.reach is Reach.CHANNEL_FD
        wait_until(lambda: workload.on() == 0, "it is off")


def test_an_enable_that_was_refused_is_never_left_at_that(rig: Rig) -> None:
    workload, online = rig.offline(), rig.online(7, {0})
    workload.add()
    rig.wait_gated(0)
    online.finish()
    rig.driver.rules.fail_enable, rig.driver.rules.fail_times = REFUSED, 6

    assert rig.gate.wake(SERVICE) is WakeOutcome.WOKEN

    rig.wait_gated(0, False)
    assert workload.on() == 1


@pytest.fixture
def came_late(driver: FakeDriver) -> Iterator[tuple[Rig, Workload]]:
    """A channel came to a stopped GPU while the driver hung: its mail lies there, and its sender has gone on."""
    with gate_rig(driver, replace(SETTINGS, hang_ns=1_000_000_000)) as rig:
        other, workload = rig.offline(), rig.offline()
        rig.online(7, {0})
        rig.wait_gated(0)
        rig.driver.rules.hang_query = 1
        other.add()
        workload.add()
        yield rig, workload


def test_a_gpu_is_never_called_stopped_before_a_channel_is_off_that_came_while_the_driver_hung(
    came_late: tuple[Rig, Workload],
) -> None:
    rig, workload = came_late
    tried = rig.driver.counts.disables
    rig.driver.rules.hang = 1
    rig.driver.rules.hang_query = 0
    wait_until(lambda: rig.driver.counts.disables > tried and rig.driver.counts.hanging, "its stop is under way")

    assert workload.on() == 1
    assert not rig.gate.is_stopped(ZERO)

    rig.driver.rules.hang = 0
    rig.wait_gated(0)
    assert workload.on() == 0


def test_a_channel_that_came_while_the_driver_hung_never_runs_on_because_its_stop_was_refused(
    came_late: tuple[Rig, Workload],
) -> None:
    rig, workload = came_late
    rig.driver.rules.fail_disable, rig.driver.rules.fail_times = REFUSED, 6

    rig.driver.rules.hang_query = 0

    wait_until(lambda: workload.on() == 0, "it is stopped after all")
    rig.wait_gated(0)


# Under the services


def quiet(node: NativeWorld, gpu: int = 0) -> tuple[ClientId, tuple[int, int], object]:
    client, channel = node.offline(gpu)
    online = node.online(gpu)
    node.until(lambda: not node.world.gating.is_held([GpuIndex(gpu)]) and node.is_on(channel), "offline work runs")
    return client, channel, online


def test_a_hold_whose_stop_failed_is_never_missing_from_the_books(node: NativeWorld) -> None:
    client, channel, online = quiet(node)
    pid = node.world.books.clients[client].process.pid
    node.rig.driver.rules.fail_disable = REFUSED

    online.launch()
    node.until(lambda: node.world.gating.counters.gate_failures, "the failure")

    assert node.world.gating.is_held([ZERO])
    for _ in range(50):
        node.pump()
    assert node.world.signals == [(pid, "SIGSTOP")], "frozen, and not let go while online holds"
    assert node.is_on(channel)


def test_a_process_frozen_for_a_refusal_is_let_go_once_its_channels_are_off(node: NativeWorld) -> None:
    client, channel, online = quiet(node)
    pid = node.world.books.clients[client].process.pid
    node.rig.driver.rules.fail_disable = REFUSED
    online.launch()
    node.until(lambda: node.world.signals, "frozen")

    node.rig.driver.rules.fail_disable = 0
    node.until(lambda: not node.is_on(channel), "stopped after all")
    node.until(lambda: len(node.world.signals) == 2, "let go")

    assert node.world.signals == [(pid, "SIGSTOP"), (pid, "SIGCONT")]
    assert node.world.gating.is_held([ZERO])
    assert node.world.gating.is_proven_stopped(ZERO)


def test_the_failure_of_one_hold_never_outlives_it(node: NativeWorld) -> None:
    client, channel, online = quiet(node)
    pid = node.world.books.clients[client].process.pid
    node.rig.driver.rules.fail_disable = REFUSED
    online.launch()
    node.until(lambda: node.world.signals, "frozen")

    online.finish()
    node.until(lambda: not node.world.gating.is_held([ZERO]), "the service lets go")
    node.until(lambda: len(node.world.signals) == 2, "let go")

    assert node.world.signals == [(pid, "SIGSTOP"), (pid, "SIGCONT")]
    node.until(lambda: node.is_on(channel), "it runs")


def test_a_stop_that_the_watchdog_gave_up_never_keeps_others_waiting(hasty: Rig) -> None:
    hasty.offline().add()
    online = hasty.online(7, {0})
    wait_until(lambda: hasty.gate.wake(SERVICE) is not WakeOutcome.REFUSED, "woken")
    hasty.wait_gated(0, False)
    hasty.driver.rules.hang = 1
    online.launch()
    hasty.wait_stamp(lambda stamp: stamp.kind is StampKind.GATE_FAILED)

    assert not hasty.gate.is_turning()
    assert not hasty.gate.is_stopped(ZERO)
    hasty.driver.rules.hang = 0
    hasty.wait_gated(0)


def test_a_test_that_could_not_switch_a_channel_on_again_never_leaves_it_off(rig: Rig) -> None:
    workload = rig.offline()
    rig.driver.rules.fail_enable, rig.driver.rules.fail_times = REFUSED, 5

    (result,) = workload.add()

    assert (result.status, result.reach) == (0, Reach.CHANNEL_OWN)
    wait_until(lambda: workload.on() == 1, "it is switched on after all")


def test_no_launch_ever_waited_for_a_stop_that_was_refused_after_the_gpu_was_let(rig: Rig) -> None:
    """It was over long before, and would be told as a delay of all that time."""
    rig.offline().add()
    online = rig.online(7, {0})
    assert rig.gate.wake(SERVICE) is WakeOutcome.WOKEN
    rig.wait_gated(0, False)
    online.launch()
    rig.wait_gated(0)
    rig.gate.let(frozenset({ZERO}))
    rig.settle()
    before = len(rig.take_stamps())
    rig.driver.rules.fail_disable, rig.driver.rules.fail_times = REFUSED, 3

    rig.gate.let(frozenset())
    rig.wait_gated(0)

    told = [(stamp.kind, stamp.client, stamp.launch_ns) for stamp in rig.take_stamps()[before:]]
    assert told == [(StampKind.GATE_FAILED, 0, 0), (StampKind.GATE, 0, 0)]


def test_no_launch_ever_waited_for_a_gpu_that_its_service_has_left(rig: Rig) -> None:
    """That GPU's stop, which another service still waits for, is refused for as long as that takes."""
    rig.offline().add()
    online = rig.online(7, {0})
    assert rig.gate.wake(SERVICE) is WakeOutcome.WOKEN
    rig.wait_gated(0, False)
    rig.driver.rules.fail_disable = REFUSED
    online.launch()
    rig.wait_stamp(lambda stamp: stamp.kind is StampKind.GATE_FAILED)
    rig.online(8, {0})
    rig.gate.put_service(SERVICE, frozenset({GpuIndex(1)}))
    online.finish()
    assert rig.gate.wake(SERVICE) is WakeOutcome.WOKEN
    rig.take_stamps()
    rig.stamps.clear()
    online.launch()
    rig.wait_stamp(lambda stamp: stamp.client == online.client)

    rig.driver.rules.fail_disable = 0

    stop = rig.wait_stamp(lambda stamp: stamp.kind is StampKind.GATE and stamp.gpu == 0)
    assert (stop.channels, stop.client, stop.launch_ns) == (1, 0, 0)
