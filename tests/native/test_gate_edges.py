"""One edge at a time: ring, gate, wake, and the words that go with them."""

from __future__ import annotations

import os
import threading

import pytest
from gates import Rig, wait_until
from valve_tools.bench import region_pages

from valved.machine.ports import WakeOutcome
from valved.machine.stamps import StampKind
from valved.model.ids import ClientId, GpuIndex, Reach, Role, ServiceId

SERVICE = ServiceId(7)


def woken(rig: Rig, service: int = 7) -> None:
    assert rig.gate.wake(ServiceId(service)) is WakeOutcome.WOKEN


def test_a_service_holds_from_birth_so_that_no_launch_precedes_its_gate(rig: Rig) -> None:
    workload = rig.offline()
    workload.add(3)

    online = rig.online(7, {0})
    rig.wait_gated(0)

    assert workload.on() == 0
    assert online.control["gate_epoch"] % 2 == 0
    assert not online.launch()


def test_a_ring_stops_every_compute_channel_and_a_wake_lets_them_run(rig: Rig) -> None:
    workload, online = rig.offline(), rig.online(7, {0})
    workload.add(8)
    woken(rig)
    rig.wait_gated(0, False)
    assert workload.on() == 8

    assert online.launch()
    rig.wait_gated(0)
    assert workload.on() == 0

    online.finish()
    woken(rig)
    rig.wait_gated(0, False)
    assert workload.on() == 8


def test_the_word_is_closed_before_the_driver_is_called(rig: Rig) -> None:
    workload, online = rig.offline(), rig.online(7, {0})
    workload.add()
    woken(rig)
    rig.wait_gated(0, False)
    page = rig.driver.ffi.from_buffer("uint32_t[]", online.control.memory)
    rig.driver.lib.fake_watch_word(page + region_pages.CONTROL["gate_epoch"].offset // 4)

    online.launch()
    rig.wait_gated(0)
    rig.driver.lib.fake_watch_word(rig.driver.ffi.NULL)
    rig.driver.ffi.release(page)

    assert rig.driver.counts.gate_words == 0


def test_the_word_rises_by_one_at_each_edge_and_a_client_rings_once_per_epoch(rig: Rig) -> None:
    online = rig.online(7, {0})
    start = online.control["gate_epoch"]
    woken(rig)
    assert online.control["gate_epoch"] == start + 1

    assert online.launch()
    assert not online.launch()

    wait_until(lambda: online.control["gate_epoch"] == start + 2, "the ring is heard")


def test_stamps_of_a_gate_are_in_the_order_of_its_journey(rig: Rig) -> None:
    workload, online = rig.offline(), rig.online(7, {0})
    workload.add(5)
    woken(rig)
    rig.wait_gated(0, False)
    online.launch()

    stamp = rig.wait_stamp(lambda stamp: stamp.kind is StampKind.GATE and stamp.client == online.client)

    assert 0 < stamp.launch_ns <= stamp.seen_ns <= stamp.ioctl_ns <= stamp.done_ns
    assert (stamp.service, stamp.gpu, stamp.channels, stamp.status) == (7, 0, 5, 0)
    assert stamp.epoch == online.control["gate_epoch"]


def test_a_gpu_runs_again_only_when_the_last_of_its_services_lets_go(rig: Rig) -> None:
    workload = rig.offline()
    workload.add()
    first, second = rig.online(1, {0}), rig.online(2, {0, 1})
    woken(rig, 1)
    woken(rig, 2)
    rig.wait_gated(0, False)
    rig.wait_gated(1, False)

    first.launch()
    rig.wait_gated(0)
    second.launch()
    held = rig.wait_stamp(lambda stamp: stamp.client == second.client and stamp.gpu == 1)
    first.finish()
    woken(rig, 1)

    assert held.kind is StampKind.GATE  # GPU 1 closed; GPU 0 was closed already
    assert rig.gate.is_gated(GpuIndex(0))
    assert workload.on() == 0

    second.finish()
    woken(rig, 2)
    rig.wait_gated(0, False)

    assert workload.on() == 1


def test_a_ring_on_gpus_that_others_hold_is_a_hold_and_no_gate(rig: Rig) -> None:
    first, second = rig.online(1, {0}), rig.online(2, {0})
    woken(rig, 1)
    woken(rig, 2)
    rig.wait_gated(0, False)
    first.launch()
    rig.wait_gated(0)

    second.launch()
    stamp = rig.wait_stamp(lambda stamp: stamp.client == second.client)

    assert stamp.kind is StampKind.HOLD


def test_wake_is_refused_while_a_launch_is_not_proven_done(rig: Rig) -> None:
    online = rig.online(7, {0})
    woken(rig)
    online.launch()
    rig.wait_stamp(lambda stamp: stamp.client == online.client)

    assert rig.gate.wake(SERVICE) is WakeOutcome.REFUSED
    assert online.control["gate_epoch"] % 2 == 0
    assert rig.gate.is_gated(GpuIndex(0))

    online.finish()
    woken(rig)


def test_wake_is_refused_while_a_client_has_not_taken_its_region(rig: Rig) -> None:
    """It may have run for hours before valved came, and launches all the while without a word that we could read."""
    workload, online = rig.offline(), rig.online(7, {0})
    workload.add()
    rig.gate.create_client(ClientId(99), Role.ONLINE, SERVICE)

    assert not rig.gate.view(ClientId(99)).is_filled
    assert rig.gate.wake(SERVICE) is WakeOutcome.REFUSED
    assert online.control["gate_epoch"] % 2 == 0
    assert workload.on() == 0

    rig.gate.remove_client(ClientId(99))
    woken(rig)


def test_a_hook_that_has_not_taken_its_region_keeps_nobody_waiting(rig: Rig) -> None:
    rig.online(7, {0})
    rig.gate.create_client(ClientId(99), Role.HOOK, SERVICE)

    woken(rig)


def test_wake_of_a_service_that_does_not_hold_changes_nothing(rig: Rig) -> None:
    online = rig.online(7, {0})
    woken(rig)
    before = online.control["gate_epoch"]

    assert rig.gate.wake(SERVICE) is WakeOutcome.NOT_HOLDING
    assert online.control["gate_epoch"] == before


def test_a_launch_between_open_word_and_re_read_refuses_the_wake(rig: Rig) -> None:
    """The client saw the closed word or the wake sees its count: never neither."""
    workload, online = rig.offline(), rig.online(7, {0})
    workload.add()
    rig.wait_gated(0)

    @rig.driver.ffi.callback("void(int)")
    def slip_in(point: int) -> None:
        if point == 1:
            online.launch()

    rig.driver.lib.fake_set_between(slip_in)
    outcome = rig.gate.wake(SERVICE)

    assert outcome is WakeOutcome.REFUSED
    assert workload.on() == 0
    assert rig.gate.is_gated(GpuIndex(0))
    assert rig.driver.counts.enables == 0


def test_a_ring_after_the_proof_keeps_the_gpu_closed_without_an_enable(rig: Rig) -> None:
    workload, online = rig.offline(), rig.online(7, {0})
    workload.add()
    rig.wait_gated(0)
    enables = rig.driver.counts.enables

    @rig.driver.ffi.callback("void(int)")
    def slip_in(point: int) -> None:
        if point == 2:
            online.launch()
            rig.wait_stamp(lambda stamp: stamp.client == online.client)

    rig.driver.lib.fake_set_between(slip_in)
    outcome = rig.gate.wake(SERVICE)
    rig.driver.lib.fake_set_between(rig.driver.ffi.NULL)

    assert outcome is WakeOutcome.REFUSED
    assert rig.driver.counts.enables == enables
    online.finish()
    woken(rig)
    rig.wait_gated(0, False)
    assert workload.on() == 1


def test_a_gpu_that_is_being_enabled_is_stopped_no_longer(rig: Rig) -> None:
    """Whoever holds it meanwhile must wait for a stop of its own: until then kernels run."""
    workload, online = rig.offline(), rig.online(7, {0})
    workload.add()
    rig.wait_gated(0)
    online.finish()
    rig.driver.rules.hang_enable = 1
    woken(rig)
    wait_until(lambda: rig.driver.counts.hanging == 1, "the enable hangs")

    rig.gate.hold(SERVICE, 0)

    assert not rig.gate.is_stopped(GpuIndex(0))
    assert rig.gate.is_gated(GpuIndex(0))
    assert rig.gate.is_turning()
    disables = rig.driver.counts.disables
    rig.driver.rules.hang_enable = 0
    rig.wait_gated(0)
    assert rig.driver.counts.disables == disables + 1
    assert workload.on() == 0


def test_a_hold_that_comes_just_before_the_enable_prevents_it(rig: Rig) -> None:
    workload, online = rig.offline(), rig.online(7, {0})
    workload.add()
    rig.wait_gated(0)
    online.finish()
    seen: list[bool] = []

    @rig.driver.ffi.callback("void(int)")
    def hold_again(point: int) -> None:
        if point == 3 and not seen:
            seen.append(rig.gate.is_stopped(GpuIndex(0)))
            online.launch()
            wait_until(lambda: online.control["gate_epoch"] % 2 == 0, "the ring is heard")

    rig.driver.lib.fake_set_between(hold_again)
    rig.gate.wake(SERVICE)
    rig.settle()
    rig.driver.lib.fake_set_between(rig.driver.ffi.NULL)

    assert seen == [False]
    assert rig.gate.is_stopped(GpuIndex(0))
    assert rig.driver.counts.enables == 0
    assert workload.on() == 0


def test_a_gpu_added_to_a_service_is_held_and_one_taken_away_is_let_go(rig: Rig) -> None:
    zero, one = rig.offline(gpu=0), rig.offline(gpu=1)
    zero.add()
    one.add()
    rig.online(7, {0})
    rig.wait_gated(0)

    rig.gate.put_service(SERVICE, frozenset({GpuIndex(1)}))
    rig.wait_gated(1)
    rig.wait_gated(0, False)

    assert (zero.on(), one.on()) == (1, 0)


def test_a_removed_service_lets_its_gpus_go(rig: Rig) -> None:
    workload, online = rig.offline(), rig.online(7, {0})
    workload.add()
    rig.wait_gated(0)

    rig.gate.remove_client(online.client)
    rig.gate.remove_service(SERVICE)
    rig.wait_gated(0, False)

    assert workload.on() == 1


def test_hold_takes_the_hold_as_a_ring_would(rig: Rig) -> None:
    workload, online = rig.offline(), rig.online(7, {0})
    workload.add()
    woken(rig)
    rig.wait_gated(0, False)

    rig.gate.hold(SERVICE, reason=1)
    rig.wait_gated(0)

    assert online.control["gate_epoch"] % 2 == 0
    assert rig.wait_stamp(lambda stamp: stamp.kind is StampKind.GATE and stamp.channels == 1).client == 0


def test_a_client_that_joins_an_open_service_gets_an_open_word(rig: Rig) -> None:
    first = rig.online(7, {0})
    woken(rig)

    second = rig.online(7, {0})

    assert second.control["gate_epoch"] == first.control["gate_epoch"]
    assert second.launch()
    wait_until(lambda: first.control["gate_epoch"] % 2 == 0, "the ring closes the words of both")


def test_a_ring_while_a_gpu_is_let_is_stamped_and_disables_nothing(rig: Rig) -> None:
    workload, online = rig.offline(), rig.online(7, {0})
    workload.add()
    rig.wait_gated(0)
    rig.gate.let(frozenset({GpuIndex(0)}))
    rig.wait_gated(0, False)
    woken(rig)
    rig.settle()  # else the launch meets a GPU that is still watched, and there is nothing to do but note the hold
    disables = rig.driver.counts.disables

    online.launch()
    stamp = rig.wait_stamp(lambda stamp: stamp.client == online.client)

    assert (stamp.kind, stamp.channels) == (StampKind.GATE, 0)
    assert rig.driver.counts.disables == disables
    assert workload.on() == 1

    rig.gate.let(frozenset())
    rig.wait_gated(0)

    assert workload.on() == 0


def test_a_gpu_that_is_let_runs_though_held_and_its_next_stop_is_nobodys_delay(rig: Rig) -> None:
    workload, online = rig.offline(), rig.online(7, {0})
    workload.add()
    rig.wait_gated(0)
    word = online.control["gate_epoch"]

    rig.gate.let(frozenset({0}))
    wait_until(lambda: workload.on() == 1, "its channels are on")
    assert online.control["gate_epoch"] == word  # closed: launches meanwhile do not ring
    rig.gate.drain_stamps()
    rig.gate.let(frozenset())
    wait_until(lambda: workload.on() == 0, "they are off again")
    stamp = rig.wait_stamp(lambda stamp: stamp.kind is StampKind.GATE)

    assert (stamp.client, stamp.launch_ns, stamp.channels) == (0, 0, 1)


def test_a_storm_on_one_doorbell_leaves_the_others_audible(rig: Rig) -> None:
    noisy, quiet = rig.online(1, {0}), rig.online(2, {1})
    woken(rig, 2)
    rig.wait_gated(1, False)

    for _ in range(5000):
        os.eventfd_write(noisy.fds.doorbell, 1)
    quiet.launch()
    rig.wait_gated(1)

    assert rig.gate.channels.reach(GpuIndex(1))[0] is Reach.CHANNEL_OWN


def test_no_hold_is_ever_told_with_the_cause_of_the_one_before(rig: Rig) -> None:
    """An issuer that has just stopped a GPU for another service tells of all holds that nobody told of."""
    workload, other, online = rig.offline(), rig.online(8, {0}), rig.online(7, {0})
    workload.add()
    woken(rig)
    online.launch()
    rig.wait_stamp(lambda stamp: stamp.service == SERVICE and stamp.launch_ns > 0)
    online.finish()
    woken(rig)
    woken(rig, 8)
    rig.wait_gated(0, False)
    rig.take_stamps()
    rig.stamps.clear()
    rig.driver.rules.hang = 1
    other.launch()
    wait_until(lambda: rig.driver.counts.hanging == 1, "the stop hangs")

    @rig.driver.ffi.callback("void(int)")
    def let_stop(point: int) -> None:
        if point == 5:
            rig.driver.rules.hang = 0
            rig.wait_gated(0)
            wait_until(lambda: not rig.gate.is_turning(), "the issuer is through")

    rig.driver.lib.fake_set_between(let_stop)
    rig.gate.hold(SERVICE, 0)
    rig.driver.lib.fake_set_between(rig.driver.ffi.NULL)
    rig.settle()

    (told,) = [stamp for stamp in rig.take_stamps() if stamp.service == SERVICE]
    assert (told.kind, told.client, told.launch_ns) == (StampKind.HOLD, 0, 0)


@pytest.mark.parametrize("heals", [False, True])
def test_no_hold_is_ever_untold_or_of_another_cause_because_a_stop_is_tried_again(rig: Rig, heals: bool) -> None:
    """That stop is of the hold before, whose service has been woken since; another service still holds the GPU."""
    workload, online = rig.offline(), rig.online(7, {0})
    rig.online(8, {0})
    workload.add()
    woken(rig)
    woken(rig, 8)
    rig.wait_gated(0, False)
    rig.driver.rules.fail_disable = 0x40
    online.launch()
    failed = rig.wait_stamp(lambda stamp: stamp.kind is StampKind.GATE_FAILED and stamp.launch_ns > 0)
    rig.gate.hold(ServiceId(8), 0)
    online.finish()
    woken(rig)
    rig.take_stamps()
    rig.stamps.clear()

    @rig.driver.ffi.callback("void(int)")
    def try_again(point: int) -> None:
        if point == 5 and heals:
            rig.driver.rules.fail_disable = 0
            rig.wait_gated(0)
        elif point == 5:
            tried = rig.driver.counts.disables
            wait_until(lambda: rig.driver.counts.disables >= tried + 4, "the stop is tried again")

    rig.driver.lib.fake_set_between(try_again)
    rig.gate.hold(SERVICE, 0)
    rig.driver.lib.fake_set_between(rig.driver.ffi.NULL)

    epoch = online.control["gate_epoch"]
    told = [stamp for stamp in rig.take_stamps() if stamp.service == SERVICE and stamp.epoch == epoch]
    assert [(stamp.kind, stamp.client, stamp.launch_ns) for stamp in told] == [(StampKind.HOLD, 0, 0)]
    before = {(stamp.client, stamp.launch_ns) for stamp in rig.stamps if stamp.epoch == failed.epoch}
    assert before <= {(failed.client, failed.launch_ns), (0, 0)}  # never half of one hold and half of the next


@pytest.mark.parametrize("goes_on", [True, False])
def test_no_hold_is_ever_untold_because_its_issuer_comes_after_the_wake(rig: Rig, goes_on: bool) -> None:
    """The issuer was to tell of it: the GPU was held again before it was enabled."""
    workload, online = rig.offline(), rig.online(7, {0})
    workload.add()
    rig.settle()
    is_there, may_go = threading.Event(), threading.Event()

    @rig.driver.ffi.callback("void(int)")
    def come_late(point: int) -> None:
        if point == 3:
            is_there.set()
            may_go.wait()

    rig.driver.lib.fake_set_between(come_late)
    try:
        woken(rig)
        is_there.wait()
        rig.take_stamps()
        rig.stamps.clear()
        online.launch()
        wait_until(lambda: online.control["gate_epoch"] % 2 == 0, "the ring is heard")
        if not goes_on:
            online.finish()
        assert rig.gate.wake(SERVICE) is (WakeOutcome.REFUSED if goes_on else WakeOutcome.WOKEN)
    finally:
        may_go.set()
    rig.settle()
    rig.driver.lib.fake_set_between(rig.driver.ffi.NULL)

    assert [(stamp.kind, stamp.client, stamp.launch_ns > 0) for stamp in rig.take_stamps()] == [
        (StampKind.HOLD, online.client, True),
        (StampKind.WAKE_REFUSED if goes_on else StampKind.WAKE, 0, False),
    ]


def test_a_launch_is_never_told_to_have_waited_for_a_gpu_that_its_service_got_afterwards(rig: Rig) -> None:
    online = rig.online(7, {0})
    rig.offline(gpu=1).add()
    woken(rig)
    online.launch()
    rig.wait_stamp(lambda stamp: stamp.launch_ns > 0)

    rig.gate.put_service(SERVICE, frozenset({GpuIndex(0), GpuIndex(1)}))

    stop = rig.wait_stamp(lambda stamp: stamp.kind is StampKind.GATE and stamp.gpu == 1)
    assert (stop.channels, stop.client, stop.launch_ns) == (1, 0, 0)
