"""A grant is a wake with an end: only with consent, only over proven idleness, never beyond its end."""

from __future__ import annotations

import os
import time
from dataclasses import replace

import pytest
from gates import SETTINGS, FakeDriver, Rig, gate_rig, wait_until
from grant_scene import FAR, MS, NEVER_IDLE, QUICK, SECOND, SERVICE, GrantWords, Hook, Scene, Sleeper, prove
from valve_abi import REGION, GrantAnswer, Watcher

from valved.machine.stamps import StampKind, StopCause
from valved.model.ids import ClientId, GpuIndex, ServiceId


@pytest.fixture
def scene(rig: Rig) -> Scene:
    return Scene(rig)


def test_a_grant_opens_and_ends_by_itself_and_the_service_goes_on_holding_in_the_books(scene: Scene) -> None:
    for turn in range(1, 11):
        scene.short()
        wait_until(lambda n=turn: scene.grants.grants(SERVICE).until_ns == 0, "its end")
        scene.wait_off()
        assert scene.grants.grants(SERVICE).grants == turn
        assert scene.online.control["gate_epoch"] % 2 == 0
        assert scene.rig.gate.look(SERVICE).holds

    given = scene.grants.grants(SERVICE)
    assert given.granted_ns >= 10 * 1 * MS
    assert given.broken == 0
    kinds = {stamp.kind for stamp in scene.rig.take_stamps()}
    assert StampKind.WAKE not in kinds
    assert set(scene.causes()) <= {StopCause.GRANT_END, StopCause.ASKED}
    assert StopCause.GRANT_END in scene.causes()


def test_offline_work_never_runs_in_a_grant_without_its_end_in_the_control_page(scene: Scene) -> None:
    assert scene.until() == [0]
    until_ns = time.monotonic_ns() + FAR
    assert scene.hook.ask(until_ns) is GrantAnswer.GIVEN
    scene.wait_running()
    assert scene.until() == [until_ns]

    scene.hook.say(0)
    scene.wait_off()
    wait_until(lambda: scene.until() == [0], "cleared after the stop")


def test_a_client_that_comes_into_a_grant_hears_its_end(scene: Scene) -> None:
    until_ns = time.monotonic_ns() + FAR
    assert scene.hook.ask(until_ns) is GrantAnswer.GIVEN
    scene.wait_running()

    late = scene.rig.offline(gpu=0)
    late.add(2)

    assert GrantWords(late.control).run_until(0) == until_ns


def test_no_client_that_leaves_in_a_grant_and_lives_on_loses_its_end(scene: Scene) -> None:
    """Its channels are on, and in no plan: nobody else stops them."""
    until_ns = time.monotonic_ns() + FAR
    assert scene.hook.ask(until_ns) is GrantAnswer.GIVEN
    scene.wait_running()

    scene.rig.gate.remove_client(scene.work[0].client, lives_on=True)
    scene.hook.ask(0)

    wait_until(lambda: scene.rig.gate.is_stopped(GpuIndex(0)), "the end of the grant")
    assert scene.until() == [until_ns]


def test_a_launch_in_a_grant_is_heard_and_named_and_never_counts_as_another_ring(scene: Scene) -> None:
    assert scene.ask() is GrantAnswer.GIVEN
    scene.wait_running()

    assert scene.online.launch()

    scene.wait_off()
    assert scene.grants.grants(SERVICE).broken == 1
    wait_until(lambda: StopCause.GRANT_BROKEN in scene.causes(), "its cause")
    assert not scene.online.launch()  # the word is closed, and held
    assert StopCause.RING not in scene.causes()


def test_the_hook_ends_a_pause_at_once_and_shortens_it_but_never_lengthens_it(scene: Scene) -> None:
    first = time.monotonic_ns() + FAR
    assert scene.hook.ask(first) is GrantAnswer.GIVEN
    assert scene.hook.ask(first + FAR) is GrantAnswer.GIVEN
    assert scene.grants.grants(SERVICE).until_ns == first
    assert scene.hook.ask(first - SECOND) is GrantAnswer.GIVEN
    assert scene.grants.grants(SERVICE).until_ns == first - SECOND
    assert scene.grants.grants(SERVICE).broken == 0  # a word while a grant is open breaks nothing

    assert scene.hook.ask(0) is GrantAnswer.NONE
    scene.wait_off()
    assert scene.grants.grants(SERVICE).broken == 0


def refused(scene: Scene, why: GrantAnswer, for_ns: int = FAR) -> None:
    epoch = scene.online.control["gate_epoch"]
    assert scene.ask(for_ns) is why
    assert scene.online.control["gate_epoch"] == epoch
    assert scene.is_off()
    assert scene.until() == [0] * len(scene.work)


def test_nothing_is_granted_without_consent_or_permission(scene: Scene) -> None:
    scene.grants.consent(SERVICE, 0, 0)
    refused(scene, GrantAnswer.NO_CONSENT)
    scene.grants.consent(SERVICE, FAR, 0)
    scene.rig.gate.permit(SERVICE, None)
    refused(scene, GrantAnswer.NO_CONSENT)


def test_nothing_is_granted_while_work_is_not_proven_done(scene: Scene) -> None:
    scene.online.launch()

    refused(scene, GrantAnswer.BUSY)

    assert scene.grants.grants(SERVICE).refused == {"busy": 1}


def test_a_proof_that_comes_a_little_late_is_waited_for(scene: Scene) -> None:
    """Asked again and again, each time with the proof on its way: it is given in the end."""

    def is_given() -> bool:
        scene.online.launch()
        seq = scene.hook.say(time.monotonic_ns() + FAR)
        scene.online.finish()
        wait_until(lambda: scene.hook.words["answer_seq"] == seq, "an answer")
        return scene.hook.words["answer"] == GrantAnswer.GIVEN

    wait_until(is_given, "a grant")


@pytest.mark.parametrize("who", ["the hook asks for a pause", "valved looks whether the service may be woken"])
def test_no_watcher_sleeps_on_while_its_proof_is_wanted(scene: Scene, who: str) -> None:
    """A grant that ended, or a hint, closed the word: no launch rang, and it sleeps by what it proved before."""
    scene.online.region["watcher_state"] = Watcher.IDLE
    scene.online.launch()
    with Sleeper(scene.online.region, REGION.at("busy")) as watcher:
        if who.startswith("valved"):
            scene.rig.gate.permit(SERVICE, QUICK)
        else:
            scene.hook.say(time.monotonic_ns() + FAR)
        wait_until(lambda: watcher.is_woken, "the watcher looks again")


def test_nothing_is_granted_beside_another_holder_or_another_grant(rig: Rig) -> None:
    scene = Scene(rig)
    other = rig.online(8, {0})
    refused(scene, GrantAnswer.OTHERS)

    prove(other)
    rig.gate.permit(ServiceId(8), QUICK)
    wait_until(lambda: bool(other.control["gate_epoch"] % 2), "the other's wake")
    assert scene.ask() is GrantAnswer.GIVEN
    hook = Hook(rig, ServiceId(8))
    scene.grants.consent(ServiceId(8), FAR, 0)
    rig.gate.permit(ServiceId(8), NEVER_IDLE)
    rig.gate.hold(ServiceId(8), 0)
    rig.gate.permit(ServiceId(8), NEVER_IDLE)
    assert hook.ask(time.monotonic_ns() + FAR) is GrantAnswer.OTHERS


def test_nothing_is_granted_on_a_gpu_whose_stop_failed(rig: Rig) -> None:
    scene = Scene(rig)
    assert scene.ask() is GrantAnswer.GIVEN
    scene.wait_running()
    rig.driver.rules.fail_disable = 0x56
    scene.hook.say(0)
    rig.wait_stamp(lambda stamp: stamp.kind is StampKind.GATE_FAILED)

    assert scene.ask() is GrantAnswer.NOT_STOPPED
    assert scene.until() != [0]  # nobody has stopped it: its shim must


def test_nothing_is_granted_where_offline_work_would_not_stop_itself(scene: Scene) -> None:
    assert scene.ask() is GrantAnswer.GIVEN
    scene.wait_running()

    scene.grants.set_grantable(frozenset())

    assert scene.grants.grants(SERVICE).until_ns == 0  # ended before the call came back
    scene.wait_off()
    refused(scene, GrantAnswer.SHIM)


def test_consent_that_is_taken_back_ends_a_grant_before_the_call_comes_back(scene: Scene) -> None:
    assert scene.ask() is GrantAnswer.GIVEN

    scene.grants.consent(SERVICE, 0, 0)

    assert scene.grants.grants(SERVICE).until_ns == 0
    assert scene.online.control["gate_epoch"] % 2 == 0
    scene.wait_off()


@pytest.mark.parametrize("by", ["brake", "breaker", "gpus", "gone"])
def test_whatever_holds_a_gpu_ends_a_grant_there_at_once(rig: Rig, by: str) -> None:
    scene = Scene(rig)
    assert scene.ask() is GrantAnswer.GIVEN
    scene.wait_running()

    match by:
        case "brake":
            rig.gate.put_service(ServiceId(1), frozenset({GpuIndex(0)}))
        case "breaker":
            rig.gate.permit(SERVICE, None)
            rig.gate.hold(SERVICE, 0)
        case "gpus":
            rig.gate.put_service(SERVICE, frozenset({GpuIndex(0), GpuIndex(1)}))
        case "gone":
            rig.gate.permit(SERVICE, None)
            rig.gate.hold(SERVICE, 0)
            rig.gate.remove_client(scene.hook.client)

    scene.wait_off()
    wait_until(lambda: scene.until() == [0], "cleared")


def test_grants_keep_their_distance_and_too_short_ones_are_none(scene: Scene) -> None:
    scene.grants.consent(SERVICE, FAR, FAR)
    refused(scene, GrantAnswer.LENGTH, for_ns=10_000)
    assert scene.ask() is GrantAnswer.GIVEN
    scene.hook.ask(0)
    scene.wait_off()

    refused(scene, GrantAnswer.RATE)


def test_a_grant_is_never_longer_than_its_owner_allows(scene: Scene) -> None:
    scene.grants.consent(SERVICE, SECOND, 0)
    before = time.monotonic_ns()

    assert scene.ask(FAR) is GrantAnswer.GIVEN

    until_ns = scene.grants.grants(SERVICE).until_ns
    assert until_ns == 0 or until_ns <= time.monotonic_ns() + SECOND
    assert until_ns == 0 or until_ns > before


def test_all_gpus_of_a_service_are_granted_together_or_none(rig: Rig) -> None:
    scene = Scene(rig, frozenset({0, 1}))
    assert scene.ask() is GrantAnswer.GIVEN
    scene.wait_running()
    scene.hook.ask(0)
    wait_until(scene.is_off, "both stopped")
    wait_until(lambda: all(rig.gate.is_stopped(GpuIndex(gpu)) for gpu in (0, 1)), "both proven")
    scene.grants.set_grantable(frozenset({GpuIndex(1)}))

    refused(scene, GrantAnswer.SHIM)


@pytest.mark.parametrize("dies", ["hook", "online", "offline"])
def test_the_death_of_any_party_in_a_grant_leaves_no_open_gate_and_no_channel_off(rig: Rig, dies: str) -> None:
    scene = Scene(rig)
    scene.short()

    victim: ClientId = {"hook": scene.hook, "online": scene.online, "offline": scene.work[0]}[dies].client
    rig.gate.remove_client(victim)

    wait_until(lambda: scene.grants.grants(SERVICE).until_ns == 0, "the grant ends all the same")
    rig.wait_gated(0)
    for ref in scene.work[0].channels:
        on = rig.driver.lib.fake_is_on(ref.h_client, ref.h_channel) == 1
        assert on is (dies == "offline")


def test_a_client_that_is_still_stopping_itself_is_waited_for_once_before_it_is_enabled(driver: FakeDriver) -> None:
    """Its calls would come out after ours, and nobody would enable its channels again."""
    with gate_rig(driver, replace(SETTINGS, order_ns=20 * MS)) as rig:
        scene = Scene(rig)
        until_ns = time.monotonic_ns() + FAR
        assert scene.hook.ask(until_ns) is GrantAnswer.GIVEN
        scene.wait_running()
        scene.work[0].region["until_claim"] = until_ns
        scene.hook.ask(0)
        scene.wait_off()

        assert scene.ask() is GrantAnswer.GIVEN
        scene.wait_running()  # it never says that it has: given up after order_ns


def test_no_grant_enables_a_client_that_is_still_stopping_itself_for_the_one_before(scene: Scene) -> None:
    """The new end is told before the enable: a claim of the old one is waited for all the same."""
    first_ns = time.monotonic_ns() + FAR
    assert scene.hook.ask(first_ns) is GrantAnswer.GIVEN
    scene.wait_running()
    scene.work[0].region["until_claim"] = first_ns
    scene.hook.ask(0)
    scene.wait_off()

    assert scene.ask(2 * FAR) is GrantAnswer.GIVEN
    wait_until(lambda: scene.until() not in ([0], [first_ns]), "the new end is told")
    time.sleep(0.1)
    assert scene.is_off()

    scene.work[0].region["until_done"] = first_ns
    scene.wait_running()


def test_a_claim_of_an_end_that_nobody_told_never_delays_a_wake(rig: Rig) -> None:
    """An order may take 100 s here. Each value that a client makes up would cost its neighbours as much."""
    scene = Scene(rig)
    scene.work[0].region["until_claim"] = 12345
    rig.gate.permit(SERVICE, QUICK)
    prove(scene.online)

    scene.wait_running()


def test_a_hook_that_rings_for_nothing_is_a_launch_as_before(rig: Rig) -> None:
    """An older hook that rings has its service held: nothing about that has changed."""
    scene = Scene(rig)
    rig.gate.permit(SERVICE, QUICK)
    prove(scene.online)
    wait_until(lambda: bool(scene.online.control["gate_epoch"] % 2), "a wake")
    rig.gate.permit(SERVICE, NEVER_IDLE)

    os.eventfd_write(scene.hook.fds.doorbell, 1)

    wait_until(lambda: scene.online.control["gate_epoch"] % 2 == 0, "held")


def test_no_hook_that_asks_without_end_keeps_the_listener_busy(scene: Scene) -> None:
    """Each question is a new one: its doorbell is not heard for a while all the same."""

    def goes_unheard() -> bool:
        for _ in range(2000):
            scene.hook.say(0)
        time.sleep(0.02)
        return scene.hook.words["answer_seq"] != scene.hook.seq

    wait_until(goes_unheard, "so many were heard in so short a time that no more are")
    wait_until(lambda: scene.hook.words["answer_seq"] == scene.hook.seq, "the last is answered in the end")


def test_an_idle_service_has_nothing_to_grant(rig: Rig) -> None:
    scene = Scene(rig)
    rig.gate.permit(SERVICE, QUICK)
    prove(scene.online)
    wait_until(lambda: bool(scene.online.control["gate_epoch"] % 2), "a wake")

    assert scene.ask() is GrantAnswer.NOT_HELD


def test_a_slot_that_changes_its_owner_inherits_no_consent(rig: Rig) -> None:
    scene = Scene(rig)
    rig.gate.remove_client(scene.hook.client)
    rig.gate.remove_client(scene.online.client)
    rig.gate.remove_service(SERVICE)

    heir = rig.online(9, {0})
    prove(heir)
    rig.gate.permit(ServiceId(9), NEVER_IDLE)

    assert Hook(rig, ServiceId(9)).ask(time.monotonic_ns() + FAR) is GrantAnswer.NO_CONSENT
