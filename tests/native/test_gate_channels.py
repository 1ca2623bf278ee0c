"""Which channels are stopped: lists, chunks, staleness, what the application did itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from gates import FakeDriver, Rig, gate_rig, wait_until

from valved.machine.ports import LeftOff, WakeOutcome
from valved.machine.stamps import StampKind
from valved.model.ids import ChannelRef, ClientId, GpuIndex, Reach, Role, ServiceId

SERVICE = ServiceId(7)


def running(rig: Rig) -> None:
    assert rig.gate.wake(SERVICE) is WakeOutcome.WOKEN
    rig.wait_gated(0, False)


def test_two_hundred_channels_are_stopped_in_calls_of_at_most_sixty_four(rig: Rig) -> None:
    workload, online = rig.offline(), rig.online(7, {0})
    running(rig)
    workload.add(200)
    before = rig.driver.counts.disables

    online.launch()
    stamp = rig.wait_stamp(lambda stamp: stamp.client == online.client)

    assert stamp.channels == 200
    assert workload.on() == 0
    assert rig.driver.counts.disables - before == 4
    assert rig.driver.counts.largest == 64

    online.finish()
    running(rig)

    assert workload.on() == 200


def test_channels_of_two_processes_share_one_call(rig: Rig) -> None:
    one, two, online = rig.offline(), rig.offline(), rig.online(7, {0})
    running(rig)
    one.add(8)
    two.add(8)
    before = rig.driver.counts.disables

    online.launch()
    rig.wait_gated(0)

    assert (one.on(), two.on()) == (0, 0)
    assert rig.driver.counts.disables - before == 1


def test_a_channel_that_comes_while_gated_is_off_before_the_answer(rig: Rig) -> None:
    workload = rig.offline()
    rig.online(7, {0})
    rig.wait_gated(0)

    (result,) = workload.add()

    assert result.gated
    assert (result.status, result.reach) == (0, Reach.CHANNEL_OWN)
    assert workload.on() == 0
    assert rig.gate.channels.disabled() == tuple(workload.channels)

    running(rig)
    assert workload.on() == 1


def test_copy_channels_run_on(rig: Rig) -> None:
    workload = rig.offline()
    rig.online(7, {0})
    rig.wait_gated(0)

    (result,) = workload.add(compute=False)

    assert not result.gated
    assert workload.on() == 1


@pytest.mark.parametrize("position", [0, 31, 63])
def test_a_channel_freed_between_arm_and_gate_does_not_save_its_neighbours(rig: Rig, position: int) -> None:
    workload, online = rig.offline(), rig.online(7, {0})
    running(rig)
    workload.add(64)
    workload.free(workload.channels.pop(position))

    online.launch()
    stamp = rig.wait_stamp(lambda stamp: stamp.client == online.client)

    assert (stamp.kind, stamp.status) == (StampKind.GATE, 0)
    assert workload.on() == 0

    online.finish()
    running(rig)

    assert workload.on() == 63


def test_a_list_of_nothing_but_stale_channels_gates_without_an_error(rig: Rig) -> None:
    workload, online = rig.offline(), rig.online(7, {0})
    running(rig)
    workload.add(5)
    for ref in workload.channels:
        workload.free(ref)

    online.launch()
    stamp = rig.wait_stamp(lambda stamp: stamp.client == online.client)

    assert (stamp.kind, stamp.status) == (StampKind.GATE, 0)


def test_channels_that_a_client_freed_unsaid_never_delay_the_stop_of_another_ones(rig: Rig) -> None:
    """Its lists are searched for them, call by call. The search comes after everybody else's channels are off."""
    liar, workload, online = rig.offline(), rig.offline(), rig.online(7, {0})
    running(rig)
    liar.add(70)
    workload.add(8)
    for ref in liar.channels:
        liar.free(ref)
    rig.driver.rules.work_us = 5_000
    before = rig.driver.counts.disables

    online.launch()
    wait_until(lambda: workload.on() == 0, "its channels are off")

    assert rig.driver.counts.disables - before < 64
    rig.driver.rules.work_us = 0
    stamp = rig.wait_stamp(lambda stamp: stamp.client == online.client)
    assert (stamp.kind, stamp.status) == (StampKind.GATE, 0)


def test_what_the_driver_refuses_of_a_client_never_keeps_channels_of_another_one_on(rig: Rig) -> None:
    """They share a list, and the refusal is no word about staleness."""
    before, refused, after = (rig.offline() for _ in range(3))
    online = rig.online(7, {0})
    running(rig)
    for workload in (before, refused, after):
        workload.add(8)
    rig.driver.rules.deny_client = refused.h_client

    online.launch()
    stamp = rig.wait_stamp(lambda stamp: stamp.client == online.client)

    assert stamp.kind is StampKind.GATE_FAILED
    assert (before.on(), refused.on(), after.on()) == (0, 8, 0)
    rig.driver.rules.deny_client = 0


def test_a_channel_freed_while_gated_is_forgotten_and_the_rest_wakes(rig: Rig) -> None:
    workload = rig.offline()
    workload.add(3)
    rig.online(7, {0})
    rig.wait_gated(0)
    gone = workload.channels.pop(1)
    workload.free(gone)
    rig.gate.channels.remove_channel(workload.client, gone.h_client, gone.h_channel)

    running(rig)

    assert workload.on() == 2


def test_a_reused_handle_is_told_by_its_number(rig: Rig) -> None:
    workload = rig.offline()
    stale = workload.allocate()
    wrong = ChannelRef(
        gpu=stale.gpu,
        h_client=stale.h_client,
        h_channel=stale.h_channel,
        cid=stale.cid + 1,
        h_tsg=1,
        engine=1,
        compute=True,
    )

    result = rig.gate.channels.add_channel(workload.client, wrong)

    assert (result.status, result.reach) == (0x21, Reach.NONE)
    assert not result.gated


def test_a_channel_that_the_driver_does_not_know_is_refused(rig: Rig) -> None:
    workload = rig.offline()
    ghost = workload.allocate()
    workload.free(ghost)

    assert rig.gate.channels.add_channel(workload.client, ghost).status == 0x57


def test_what_the_application_switched_off_is_never_switched_on(rig: Rig) -> None:
    workload, online = rig.offline(), rig.online(7, {0})
    running(rig)
    workload.add(2)
    own = workload.channels[0]
    rig.gate.channels.note_app_disabled(workload.client, own.h_client, own.h_channel, True)
    enables = rig.driver.counts.enables

    online.launch()
    rig.wait_gated(0)
    on_while_gated = rig.driver.lib.fake_is_on(own.h_client, own.h_channel)
    online.finish()
    running(rig)

    assert on_while_gated == 0  # whatever it says: a stop includes it
    assert rig.driver.counts.enables == enables + 1
    assert rig.driver.lib.fake_is_on(own.h_client, own.h_channel) == 0
    assert own not in rig.gate.channels.disabled()


def test_a_word_about_a_channel_never_takes_it_out_of_the_gate(rig: Rig) -> None:
    workload, online = rig.offline(), rig.online(7, {0})
    running(rig)
    workload.add(70)
    for ref in workload.channels:
        rig.gate.channels.note_app_disabled(workload.client, ref.h_client, ref.h_channel, True)
    assert workload.on() == 70

    online.launch()
    rig.wait_gated(0)

    assert workload.on() == 0


def test_the_mark_of_the_application_is_never_lost_when_a_channel_is_told_again(rig: Rig) -> None:
    workload, online = rig.offline(), rig.online(7, {0})
    workload.add(2)
    own = workload.channels[0]
    rig.gate.channels.note_app_disabled(workload.client, own.h_client, own.h_channel, True)
    rig.wait_gated(0)

    rig.gate.channels.add_channel(workload.client, own)
    online.finish()
    running(rig)

    assert rig.driver.lib.fake_is_on(own.h_client, own.h_channel) == 0
    assert workload.on() == 1


def test_a_channel_that_the_application_switches_on_again_while_gated_is_stopped(rig: Rig) -> None:
    workload = rig.offline()
    workload.add()
    own = workload.channels[0]
    rig.gate.channels.note_app_disabled(workload.client, own.h_client, own.h_channel, True)
    rig.online(7, {0})
    rig.wait_gated(0)
    rig.driver.lib.fake_switch(own.h_client, own.h_channel, 1)

    rig.gate.channels.note_app_disabled(workload.client, own.h_client, own.h_channel, False)

    assert workload.on() == 0


def test_a_client_that_leaves_while_gated_is_enabled_first(rig: Rig) -> None:
    staying, leaving = rig.offline(), rig.offline()
    staying.add(2)
    leaving.add(2)
    rig.online(7, {0})
    rig.wait_gated(0)

    off = rig.gate.remove_client(leaving.client)

    assert off == tuple(leaving.channels)
    assert leaving.on() == 2
    assert staying.on() == 0


@pytest.mark.parametrize("gives_up", [False, True], ids=["it leaves", "it is given up"])
def test_no_channel_that_leaves_the_gate_stays_off_because_the_driver_refused_once(rig: Rig, gives_up: bool) -> None:
    leaving = rig.offline()
    leaving.add(2)
    rig.online(7, {0})
    rig.wait_gated(0)

    rig.driver.rules.fail_enable = 0x65
    if gives_up:
        rig.gate.channels.give_up(leaving.client, "it is an MPS client")
    else:
        rig.gate.remove_client(leaving.client)
    assert leaving.on() == 0
    rig.driver.rules.fail_enable = 0

    wait_until(lambda: leaving.on() == 2, "both run")
    assert rig.gate.is_stopped(GpuIndex(0))


def test_no_late_enable_reaches_a_channel_that_is_back_under_a_closed_gate(rig: Rig) -> None:
    leaving = rig.offline()
    leaving.add(2)
    rig.online(7, {0})
    rig.wait_gated(0)
    rig.driver.rules.fail_enable = 0x65
    rig.gate.remove_client(leaving.client)
    back = rig.offline()
    first, second = leaving.channels
    rig.gate.channels.add_channel(back.client, first)

    rig.driver.rules.fail_enable = 0

    wait_until(lambda: leaving.on() == 1, "the other one runs")
    assert rig.driver.lib.fake_is_on(second.h_client, second.h_channel) == 1


def test_a_client_that_leaves_and_lives_on_is_never_enabled_beside_a_holder(rig: Rig) -> None:
    staying, leaving = rig.offline(), rig.offline()
    staying.add(2)
    leaving.add(2)
    rig.online(7, {0})
    rig.wait_gated(0)

    off = rig.gate.remove_client(leaving.client, lives_on=True)

    assert off == tuple(leaving.channels)
    assert [rig.gate.channels.enable_unless_held(channel) for channel in off] == [LeftOff.HELD] * 2
    assert leaving.on() == staying.on() == 0


def around_the_new_list(rig: Rig, before: list[Callable[[], object]], after: list[Callable[[], object]]) -> None:
    """What happens while a client leaves, but for the looks at its GPU."""
    arm = rig.gate.channels._arm

    def armed(*what: Any, **more: Any) -> int:
        for step in before:
            step()
        status = arm(*what, **more)
        for step in after:
            step()
        return status

    rig.gate.channels._arm = armed  # type: ignore[method-assign]


def test_no_client_that_lives_on_is_off_and_forgotten_after_a_hold_that_came_and_went_as_it_left(rig: Rig) -> None:
    leaving = rig.offline()
    leaving.add(2)
    rig.online(7, {0})
    running(rig)
    held = [lambda: rig.gate.hold(SERVICE, 0), lambda: rig.wait_gated(0)]
    around_the_new_list(rig, before=held, after=[lambda: running(rig)])

    off = rig.gate.remove_client(leaving.client, lives_on=True)

    assert leaving.on() == 0
    assert off == tuple(leaving.channels)


def test_no_client_that_left_before_a_hold_is_ever_waited_for_as_if_it_were_off(rig: Rig) -> None:
    """It would bar grants for as long as its process lives."""
    leaving = rig.offline()
    leaving.add(2)
    rig.online(7, {0})
    running(rig)
    around_the_new_list(rig, before=[], after=[lambda: rig.gate.hold(SERVICE, 0), lambda: rig.wait_gated(0)])

    off = rig.gate.remove_client(leaving.client, lives_on=True)

    assert leaving.on() == 2
    assert off == ()


def test_a_channel_in_no_plan_is_enabled_when_nobody_holds_its_gpu(rig: Rig) -> None:
    leaving = rig.offline()
    leaving.add(2)
    rig.online(7, {0})
    rig.wait_gated(0)
    off = rig.gate.remove_client(leaving.client, lives_on=True)
    leaving.free(leaving.channels.pop())
    running(rig)

    assert leaving.on() == 0
    assert [rig.gate.channels.enable_unless_held(channel) for channel in off] == [LeftOff.ENABLED, LeftOff.ENDED]
    assert leaving.on() == 1


def test_channels_left_off_by_a_predecessor_are_enabled_and_the_gone_are_not_counted(rig: Rig) -> None:
    workload = rig.offline()
    left = [workload.allocate() for _ in range(3)]
    for ref in left:
        rig.driver.lib.fake_switch(ref.h_client, ref.h_channel, 0)
    rig.online(7, {0})
    rig.wait_gated(0)
    workload.free(workload.channels.pop())

    assert rig.gate.channels.enable_foreign(left) == 2
    assert workload.on() == 2


def test_each_gpu_has_its_own_list(rig: Rig) -> None:
    zero, one = rig.offline(gpu=0), rig.offline(gpu=1)
    zero.add(2)
    one.add(3)
    online = rig.online(7, {0, 1})
    running(rig)
    rig.wait_gated(1, False)

    online.launch()
    for gpu, channels in ((0, 2), (1, 3)):
        stamp = rig.wait_stamp(lambda stamp, gpu=gpu: stamp.client == online.client and stamp.gpu == gpu)
        assert stamp.channels == channels

    assert (zero.on(), one.on()) == (0, 0)


def test_cards_are_numbered_by_their_place_on_the_bus(rig: Rig) -> None:
    infos = rig.gate.gpus()

    assert [(info.index, info.minor, info.device_instance) for info in infos] == [(0, 0, 0), (1, 1, 1)]
    assert infos[1].uuid == bytes([0x41]) * 16


@pytest.mark.parametrize("version", ["515.43.04", "610.10.01", "nonsense"])
def test_an_unknown_driver_is_never_asked_to_switch_anything(driver: FakeDriver, version: str) -> None:
    driver.rules.version = version.encode()
    with gate_rig(driver) as rig:
        rig.gate.create_client(rig.name(), Role.OFFLINE, ServiceId(0))
        ref = ChannelRef(gpu=GpuIndex(0), h_client=1, h_channel=2, cid=3, h_tsg=4, engine=1, compute=True)
        result = rig.gate.channels.add_channel(ClientId(1), ref)
        online = rig.online(7, {0})
        assert rig.gate.wake(SERVICE) is WakeOutcome.WOKEN
        online.launch()
        stamp = rig.wait_stamp(lambda stamp: stamp.client == online.client)

        assert (result.reach, result.gated) == (Reach.NONE, False)
        assert stamp.channels == 0
        assert rig.gate.channels.reach(GpuIndex(0))[0] is Reach.NONE
        assert version in rig.gate.channels.reach(GpuIndex(0))[1]
        assert driver.counts.disables + driver.counts.enables + driver.counts.clients == 0
