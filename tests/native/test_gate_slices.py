"""Granted time by slices: offline work stays enabled beside a service that holds, until anything but a step comes."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from gates import SETTINGS, FakeDriver, Rig, gate_rig, wait_until
from grant_scene import FAR, MS, NEVER_IDLE, QUICK, SERVICE, GrantWords, Hook, Scene, prove
from valve_abi import GrantAnswer

from valved.machine.stamps import StampKind, StopCause
from valved.model.ids import GpuIndex, ServiceId

GPU = frozenset({GpuIndex(0)})


def sliced(rig: Rig) -> Scene:
    found = Scene(rig)
    found.grants.set_sliceable(True, GPU)
    return found


@pytest.fixture
def scene(rig: Rig) -> Scene:
    return sliced(rig)


def given(scene: Scene) -> None:
    assert scene.ask() is GrantAnswer.GIVEN
    scene.wait_running()


def calls(scene: Scene) -> tuple[int, int]:
    counts = scene.rig.driver.counts
    return counts.disables, counts.enables


def ended(scene: Scene, *, hook: bool = True) -> None:
    """For good: off, told, and nothing of it left open. `hook`: there is one to be told."""
    scene.wait_off()
    wait_until(lambda: set(scene.until()) == {0}, "the end is cleared")
    assert scene.grants.grants(SERVICE).until_ns == 0
    assert not hook or scene.hook.words["shared_until_ns"] == 0
    assert scene.online.control["gate_epoch"] % 2 == 0


def step(scene: Scene) -> None:
    """The hook tells of a step, and moves its word on. A machine that was too slow for a whole gap begins anew."""
    if not scene.grants.grants(SERVICE).until_ns:
        scene.ask()
    now_ns = time.monotonic_ns()
    scene.hook.region["step_end_ns"], scene.hook.region["grant_until_ns"] = now_ns, now_ns + FAR


def test_the_service_steps_beside_offline_work_without_a_ring_and_without_a_driver_call(scene: Scene) -> None:
    given(scene)
    before = calls(scene)

    for _ in range(50):
        assert not scene.online.launch()  # the word is closed: it rings nobody
        scene.online.finish()

    assert calls(scene) == before
    assert scene.runs()
    assert scene.rig.gate.look(SERVICE).holds


def test_it_begins_beside_a_step_that_is_not_proven_done(scene: Scene) -> None:
    scene.online.launch()

    given(scene)


def test_a_hook_that_steps_moves_the_end_on_without_a_ring_and_without_a_driver_call(scene: Scene) -> None:
    most_ns = 2_000 * MS  # a machine that stands still for less finds it going on
    scene.grants.consent(SERVICE, most_ns, 0)
    wait_until(lambda: scene.ask(most_ns) is GrantAnswer.GIVEN and scene.runs(), "it goes on")
    first = scene.grants.grants(SERVICE)

    def steps() -> bool:
        step(scene)
        return scene.grants.grants(SERVICE).until_ns > first.until_ns + most_ns // 2

    before = calls(scene)
    wait_until(steps, "the end has moved on")
    again = scene.grants.grants(SERVICE)
    assert again.until_ns <= time.monotonic_ns() + most_ns
    if again.grants == first.grants:  # a machine that was too late for a whole period began anew
        assert calls(scene) == before
        wait_until(lambda: scene.until() == [scene.grants.grants(SERVICE).until_ns], "offline work is told")


def test_it_ends_by_itself_when_the_hook_steps_no_more(scene: Scene) -> None:
    scene.grants.consent(SERVICE, 50 * MS, 0)
    wait_until(lambda: scene.ask(50 * MS) is GrantAnswer.GIVEN, "a beginning")

    ended(scene)
    assert StopCause.RING not in scene.causes()


@pytest.mark.parametrize("told", ["nothing", "a step to come"])
def test_a_hook_that_hangs_shares_no_longer_than_the_gap_after_its_last_step(scene: Scene, told: str) -> None:
    """Whatever it asked for. The service launches, which rings nobody: such a launch shares the card so long, too."""
    most_ns = 100 * MS
    scene.grants.consent(SERVICE, most_ns, 0)
    wait_until(lambda: scene.ask() is GrantAnswer.GIVEN and scene.runs(), "a beginning")
    step(scene)
    if told == "a step to come":
        scene.hook.region["step_end_ns"] = time.monotonic_ns() + 50 * MS
    last_ns = scene.hook.region["step_end_ns"]
    scene.online.launch()
    told_ns = set()

    def is_over() -> bool:
        told_ns.update(scene.until(), [scene.hook.words["shared_until_ns"]])
        return scene.grants.grants(SERVICE).until_ns == 0

    wait_until(is_over, "its end")
    ended(scene)
    assert max(told_ns) <= last_ns + most_ns


def test_the_hook_is_told_until_when_its_pauses_need_no_call(scene: Scene) -> None:
    assert scene.hook.words["shared_until_ns"] == 0
    given(scene)

    assert [scene.hook.words["shared_until_ns"]] == scene.until()


def test_the_hook_ends_it_at_once(scene: Scene) -> None:
    given(scene)

    assert scene.hook.ask(0) is GrantAnswer.NONE

    ended(scene)
    assert scene.grants.grants(SERVICE).broken == 0
    assert set(scene.causes()) <= {StopCause.GRANT_END, StopCause.ASKED}


def test_offline_work_never_runs_in_slices_without_an_end(scene: Scene) -> None:
    until_ns = time.monotonic_ns() + FAR
    assert scene.hook.ask(until_ns) is GrantAnswer.GIVEN
    scene.wait_running()
    assert scene.until() == [until_ns]

    late = scene.rig.offline(gpu=0)
    late.add(2)

    assert GrantWords(late.control).run_until(0) == until_ns


@pytest.mark.parametrize("by", ["brake", "breaker", "hold", "gpus", "gone", "consent", "slices", "grantable", "off"])
def test_whatever_ends_granting_ends_slices_at_once(scene: Scene, by: str) -> None:
    rig = scene.rig
    given(scene)

    match by:
        case "brake":
            rig.gate.put_service(ServiceId(1), GPU)
        case "breaker":
            rig.gate.permit(SERVICE, None)
        case "hold":
            rig.gate.hold(SERVICE, 0)
        case "gpus":
            rig.gate.put_service(SERVICE, frozenset({GpuIndex(0), GpuIndex(1)}))
        case "gone":
            rig.gate.permit(SERVICE, None)
            rig.gate.remove_client(scene.hook.client)
        case "consent":
            scene.grants.consent(SERVICE, 0, 0)
        case "slices":
            scene.grants.set_sliceable(True, frozenset())
        case "grantable":
            scene.grants.set_grantable(frozenset())
        case "off":
            scene.grants.set_sliceable(False, GPU)

    if by != "brake":
        assert scene.grants.grants(SERVICE).until_ns == 0  # before the call came back
    wait_until(lambda: scene.grants.grants(SERVICE).until_ns == 0, "its books are closed")
    ended(scene, hook=by != "gone")


def test_a_launch_of_another_service_stops_offline_work_and_is_counted_to_that_one(rig: Rig) -> None:
    scene = Scene(rig)
    scene.grants.set_sliceable(True, GPU)
    other = rig.online(8, {0})
    prove(other)
    rig.gate.permit(ServiceId(8), QUICK)
    wait_until(lambda: bool(other.control["gate_epoch"] % 2), "the other's wake")
    given(scene)
    rig.take_stamps().clear()

    assert other.launch()

    stamp = rig.wait_stamp(lambda one: one.kind is StampKind.GATE)
    assert (stamp.service, stamp.cause, stamp.launch_ns > 0) == (8, StopCause.RING, True)
    ended(scene)
    assert scene.grants.grants(SERVICE).broken == 1


def test_a_service_that_lets_go_and_launches_again_never_finds_slices_left(scene: Scene) -> None:
    given(scene)
    prove(scene.online)
    scene.rig.gate.permit(SERVICE, QUICK)
    wait_until(lambda: bool(scene.online.control["gate_epoch"] % 2), "it lets go")
    wait_until(lambda: scene.until() == [0] and scene.runs(), "offline work runs without an end")
    scene.rig.gate.permit(SERVICE, NEVER_IDLE)

    assert scene.online.launch()

    ended(scene)
    assert scene.grants.grants(SERVICE).broken == 0


def test_a_new_rule_for_the_wake_ends_nothing(scene: Scene) -> None:
    given(scene)
    before = calls(scene)

    scene.rig.gate.permit(SERVICE, NEVER_IDLE)

    assert scene.runs()
    assert calls(scene) == before


def test_where_offline_work_has_no_short_slice_it_is_refused_by_name(scene: Scene) -> None:
    scene.grants.set_sliceable(True, frozenset())

    assert scene.ask() is GrantAnswer.SLICE

    assert scene.is_off()
    assert scene.grants.grants(SERVICE).refused == {"slice": 1}


def test_nothing_is_sliced_beside_another_holder(rig: Rig) -> None:
    scene = Scene(rig)
    scene.grants.set_sliceable(True, GPU)
    rig.online(8, {0})

    assert scene.ask() is GrantAnswer.OTHERS
    assert scene.is_off()


@pytest.mark.parametrize("has_launched", [True, False], ids=["that launched", "that has told nothing"])
def test_slices_never_begin_beside_a_second_engine_of_the_service(scene: Scene, has_launched: bool) -> None:
    """Its prompt rings nobody, and the steps of the first would move the end on for ever."""
    second = scene.rig.online(SERVICE, {0})
    if has_launched:
        second.launch()
    else:
        second.region["magic"] = 0
    scene.online.launch()

    assert scene.ask() is GrantAnswer.OTHERS
    assert scene.is_off()


def test_slices_never_go_on_beside_a_second_engine_of_the_service(scene: Scene) -> None:
    scene.online.launch()
    scene.grants.consent(SERVICE, most_ns := 100 * MS, 0)
    wait_until(lambda: scene.ask(most_ns) is GrantAnswer.GIVEN and scene.runs(), "a beginning")

    second = scene.rig.online(SERVICE, {0})
    second.launch()

    def is_refused() -> bool:
        now_ns = time.monotonic_ns()  # the first one steps on
        scene.hook.region["step_end_ns"], scene.hook.region["grant_until_ns"] = now_ns, now_ns + FAR
        return scene.grants.grants(SERVICE).until_ns == 0

    wait_until(is_refused, "its end")
    ended(scene)
    assert scene.ask() is GrantAnswer.OTHERS


def test_a_process_of_the_service_that_never_launches_ends_nothing_for_good(scene: Scene) -> None:
    scene.rig.online(SERVICE, {0})
    scene.online.launch()

    given(scene)


def test_slices_end_at_once_when_the_hook_is_gone(scene: Scene) -> None:
    given(scene)  # for an hour

    scene.rig.gate.remove_client(scene.hook.client)

    ended(scene, hook=False)


def test_offline_work_that_stopped_itself_as_its_end_moved_on_runs_again(scene: Scene) -> None:
    """It claimed the end before it saw the new one: its stop may be the last call. It is waited for, and enabled."""
    most_ns = 200 * MS
    scene.grants.consent(SERVICE, most_ns, 0)
    wait_until(lambda: scene.ask(most_ns) is GrantAnswer.GIVEN and scene.runs(), "it goes on")
    (first,) = scene.until()
    work = scene.work[0]
    work.region["until_claim"] = first
    for ref in work.channels:
        scene.rig.driver.lib.fake_switch(ref.h_client, ref.h_channel, 0)
    work.region["until_done"] = first

    def goes_on() -> bool:
        step(scene)
        return scene.until()[0] > first

    wait_until(goes_on, "the end has moved on")
    wait_until(lambda: goes_on() and scene.runs(), "its channels are on again")


def test_a_claim_that_is_never_done_never_keeps_a_gpu_from_being_stopped(driver: FakeDriver) -> None:
    """The end moves on under it, and the issuer waits for its stop while channels run: longer than this test would."""
    most_ns, settings = 200 * MS, replace(SETTINGS, order_ns=FAR)
    with gate_rig(driver, settings) as rig:
        scene = sliced(rig)
        scene.grants.consent(SERVICE, most_ns, 0)
        wait_until(lambda: scene.ask(most_ns) is GrantAnswer.GIVEN and scene.runs(), "it goes on")
        (claim,) = scene.until()
        scene.work[0].region["until_claim"] = claim

        def moves_on() -> bool:
            step(scene)
            return scene.until()[0] > claim

        wait_until(moves_on, "the end has moved on")
        rig.gate.put_service(ServiceId(1), GPU)

        try:
            scene.wait_off()
        finally:
            scene.work[0].region["until_done"] = claim  # the gate enables it as it closes


def test_two_gpus_are_shared_together_or_not_at_all(rig: Rig) -> None:
    scene = Scene(rig, frozenset({0, 1}))
    scene.grants.set_sliceable(True, GPU)
    assert scene.ask() is GrantAnswer.SLICE

    scene.grants.set_sliceable(True, GPU | {GpuIndex(1)})
    given(scene)
    rig.gate.put_service(ServiceId(1), frozenset({GpuIndex(1)}))

    wait_until(scene.is_off, "both are stopped")
    wait_until(lambda: scene.until() == [0, 0], "both are told")


def test_a_second_hook_never_keeps_a_rival_from_asking(scene: Scene) -> None:
    given(scene)

    assert Hook(scene.rig).ask(time.monotonic_ns() + FAR) is GrantAnswer.GIVEN
    assert scene.grants.grants(SERVICE).grants == 1


def test_a_hold_is_never_untold_because_slices_begin_while_it_is_counted(scene: Scene) -> None:
    """And the launch that the other service holds for, which was over long before, never waited for their end."""
    rig, other = scene.rig, ServiceId(8)
    rig.online(other, {0})
    rig.gate.wake(other)
    rig.gate.wake(SERVICE)
    scene.online.launch()
    rig.wait_stamp(lambda stamp: stamp.client == scene.online.client)
    rig.wait_gated(0)
    rig.gate.permit(SERVICE, NEVER_IDLE)
    rig.stamps.clear()
    answers: list[GrantAnswer] = []

    @rig.driver.ffi.callback("void(int)")
    def share(point: int) -> None:
        if point == 6 and not answers:
            answers.append(scene.ask())
            scene.wait_running()

    rig.driver.lib.fake_set_between(share)
    rig.gate.hold(other, 0)
    rig.driver.lib.fake_set_between(rig.driver.ffi.NULL)
    ended(scene)
    rig.settle()

    told = [stamp for stamp in rig.take_stamps() if stamp.kind is not StampKind.WAKE]
    assert answers == [GrantAnswer.GIVEN]
    assert [stamp.kind for stamp in told if stamp.service == other] == [StampKind.HOLD]
    assert not [stamp for stamp in told if stamp.launch_ns]
