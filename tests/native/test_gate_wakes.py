"""The gate wakes services by itself: only with a permission, never after it was taken back, never over a launch."""

from __future__ import annotations

import os
import random
import select
import struct
import time
from dataclasses import replace
from functools import partial

import pytest
from gates import Launcher, Rig, wait_until
from grant_scene import MS, QUICK, SERVICE, prove
from valve_tools.bench import region_pages

from valved.abi import region
from valved.gate.records import REASONS
from valved.machine.stamps import Stamp, StampKind
from valved.model.ids import GpuIndex, Role, ServiceId
from valved.policy.wake import WakeReason


def is_open(online: Launcher) -> bool:
    return bool(online.control["gate_epoch"] % 2)


def wakes(rig: Rig) -> list[Stamp]:
    return [stamp for stamp in rig.take_stamps() if stamp.kind is StampKind.WAKE]


def test_a_permitted_service_is_woken_again_and_again_without_python(rig: Rig) -> None:
    workload, online = rig.offline(), rig.online(7, {0})
    workload.add(4)
    prove(online)
    rig.gate.permit(SERVICE, QUICK)
    for _ in range(20):
        wait_until(lambda: is_open(online), "the wake")
        rig.wait_gated(0, False)
        assert workload.on() == 4

        assert online.launch()
        rig.wait_gated(0)
        assert workload.on() == 0
        prove(online)

    wait_until(lambda: len(wakes(rig)) == 21, "the last wake")
    rig.settle()
    assert len(wakes(rig)) == 21
    assert {REASONS[stamp.status] for stamp in wakes(rig)} == {WakeReason.COOLDOWN_OVER}


def test_without_a_permission_nothing_ever_opens_by_itself(rig: Rig) -> None:
    quiet, other = rig.online(7, {0}), rig.online(8, {1})
    first = quiet.control["gate_epoch"]
    prove(quiet)
    prove(other)
    rig.gate.permit(ServiceId(8), QUICK)

    for _ in range(20):  # the listener has looked at the other one so many times
        wait_until(lambda: is_open(other), "a wake of the other")
        other.launch()
        prove(other)

    assert not is_open(quiet)
    assert quiet.control["gate_epoch"] == first


@pytest.mark.parametrize("take_back", ["permit", "hold", "gpus"])
def test_once_a_permission_is_taken_back_no_wake_follows(rig: Rig, take_back: str) -> None:
    """Taken back at any moment of a busy service: what is closed then stays closed."""
    online, chance = rig.online(7, {0}), random.Random(5)
    for turn in range(30):
        prove(online)
        rig.gate.permit(SERVICE, QUICK)
        if turn % 2:
            wait_until(lambda: is_open(online), "a wake")
            online.launch()
            prove(online)
        until = time.monotonic() + chance.uniform(0, 0.004)
        while time.monotonic() < until:
            pass
        match take_back:
            case "permit":
                rig.gate.permit(SERVICE, None)
                rig.gate.hold(SERVICE, 0)
            case "hold":
                rig.gate.hold(SERVICE, 0)
            case "gpus":
                rig.gate.put_service(SERVICE, frozenset({GpuIndex(turn % 2)}))
                rig.gate.hold(SERVICE, 0)
        epoch = online.control["gate_epoch"]
        other = rig.online(100 + turn, {0})
        prove(other)
        rig.gate.permit(ServiceId(100 + turn), QUICK)
        wait_until(partial(is_open, other), "a wake of another")  # the listener has looked at all since

        assert epoch % 2 == 0
        assert online.control["gate_epoch"] == epoch


def test_work_that_is_not_proven_done_never_opens(rig: Rig) -> None:
    online, other = rig.online(7, {0}), rig.online(8, {0})
    online.launch()
    prove(other)
    rig.gate.permit(SERVICE, QUICK)
    rig.gate.permit(ServiceId(8), QUICK)
    for _ in range(10):
        wait_until(lambda: is_open(other), "a wake of the other")
        other.launch()
        prove(other)

    assert not is_open(online)
    assert REASONS[rig.gate.look(SERVICE).reason] is WakeReason.BUSY
    assert rig.gate.look(SERVICE).holds


def test_no_service_is_woken_over_a_request_that_opened_since_the_look(rig: Rig) -> None:
    """It found the word closed, so it rang nobody; and what it launches may be done before the listener goes on."""
    workload, online = rig.offline(), rig.online(7, {0})
    workload.add()
    rig.wait_gated(0)
    prove(online)

    @rig.driver.ffi.callback("void(int)")
    def slip_in(point: int) -> None:
        if point == 1:
            online.region["open_requests"], online.region["hint_ns"] = 1, time.monotonic_ns()

    rig.driver.lib.fake_set_between(slip_in)
    rig.gate.permit(SERVICE, replace(QUICK, hint_lease_ns=10**15))
    wait_until(lambda: REASONS[rig.gate.look(SERVICE).reason] is WakeReason.OPEN_REQUESTS, "the next look")
    rig.driver.lib.fake_set_between(rig.driver.ffi.NULL)

    assert not is_open(online)
    assert workload.on() == 0
    assert rig.driver.counts.enables == 0


def test_a_service_whose_watcher_is_away_is_never_woken_because_it_was_asked_to_watch_a_moment_ago(rig: Rig) -> None:
    """What its watcher has told of open requests is too old to be believed, and so is all else that it has told."""
    online, now_ns = rig.online(7, {0}), time.monotonic_ns()
    prove(online)
    online.region["watcher_ns"] = online.region["idle_ns"] = online.region["hint_ns"] = now_ns - 4000 * MS
    online.region["open_requests"] = 1
    rig.gate.permit(SERVICE, replace(QUICK, watcher_lease_ns=2000 * MS, watch_since_ns=now_ns))
    wait_until(lambda: rig.gate.look(SERVICE).reason, "a look")

    assert REASONS[rig.gate.look(SERVICE).reason] is WakeReason.WATCHER_DEAD
    assert not is_open(online)


def test_a_gap_that_teaches_is_never_slept_over(rig: Rig) -> None:
    """A wake waits for the answer: the cooldown may be longer than anybody knew."""
    online = rig.online(7, {0})
    prove(online)
    rig.gate.permit(SERVICE, QUICK)
    wait_until(lambda: is_open(online), "a wake")
    online.launch()
    wait_until(lambda: not is_open(online), "the hold")
    rig.gate.permit(SERVICE, replace(QUICK, learn_ns=1000))
    began = time.monotonic_ns()
    wait_until(lambda: time.monotonic_ns() > began + 2 * MS, "a gap")
    entry = struct.pack("<QQ", time.monotonic_ns(), 1 * MS)
    online.region.memory[region.GAP_OFFSET : region.GAP_OFFSET + 16] = entry
    online.region["gaps"] = 1
    prove(online)

    rig.wait_stamp(lambda stamp: stamp.kind is StampKind.LEARN)
    assert not is_open(online)

    rig.gate.permit(SERVICE, QUICK)
    wait_until(lambda: is_open(online), "the wake after the answer")


def test_stamps_say_what_the_engine_had_counted_at_that_edge(rig: Rig) -> None:
    online = rig.online(7, {0})
    client = rig.name()
    fds = rig.gate.create_client(client, Role.HOOK, SERVICE)
    rig.gate.set_hints(client)
    page = region_pages.region_page(fds.region)
    region_pages.fill_region(page)

    def tell(started: int, ended: int) -> None:
        page["requests_started"], page["requests_ended"] = started, ended
        page["open_requests"], page["hint_ns"] = started - ended, time.monotonic_ns()

    tell(3, 3)
    prove(online)
    rig.gate.permit(SERVICE, replace(QUICK, hint_lease_ns=10**15))
    wait_until(lambda: len(wakes(rig)) == 1, "a wake without open requests")  # all of it: it looks once more
    tell(5, 3)
    online.launch()
    ring = rig.wait_stamp(lambda stamp: stamp.kind in (StampKind.GATE, StampKind.HOLD) and stamp.client)
    tell(5, 5)
    prove(online)
    wait_until(lambda: len(wakes(rig)) == 2, "the next wake")

    assert (ring.teller, ring.requests_started, ring.requests_ended) == (client, 5, 3)
    assert [(w.teller, w.requests_started, w.requests_ended) for w in wakes(rig)] == [(client, 3, 3), (client, 5, 5)]
    assert {REASONS[wake.status] for wake in wakes(rig)} == {WakeReason.NO_OPEN_REQUESTS}
    page.close()


def test_ordinary_edges_never_wake_python_and_what_it_must_act_upon_always_does(rig: Rig) -> None:
    online = rig.online(7, {0})
    prove(online)
    rig.wait_stamp(lambda stamp: stamp.kind is StampKind.GATE)  # of its coming
    rig.settle()
    rig.take_stamps()
    rig.gate.permit(SERVICE, QUICK)
    wait_until(lambda: is_open(online), "a wake")
    online.launch()
    wait_until(lambda: not is_open(online), "the hold")
    rig.settle()

    with pytest.raises(BlockingIOError):
        os.eventfd_read(rig.gate.stamps_fd())

    rig.gate.set_prompt(True)
    prove(online)
    wait_until(lambda: is_open(online), "a wake")
    woken = online.control["gate_epoch"]
    wait_until(lambda: any(s.kind is StampKind.WAKE and s.epoch == woken for s in rig.take_stamps()), "its stamp")
    rig.gate.permit(SERVICE, None)
    rig.gate.set_prompt(False)
    rig.take_stamps()
    online.launch()
    ready = select.poll()
    ready.register(rig.gate.stamps_fd(), select.POLLIN)
    wait_until(lambda: bool(ready.poll(0)), "nobody wakes it by itself: Python must look")
    assert not is_open(online)


def test_a_client_that_claims_times_to_come_only_harms_itself(rig: Rig) -> None:
    liar, honest = rig.online(7, {0}), rig.online(8, {1})
    liar.finish()
    liar.region["idle_ns"] = liar.region["watcher_ns"] = (1 << 64) - 1
    prove(honest)
    rig.gate.permit(SERVICE, QUICK)
    rig.gate.permit(ServiceId(8), QUICK)

    for _ in range(10):
        wait_until(lambda: is_open(honest), "a wake of the other")
        honest.launch()
        prove(honest)

    assert not is_open(liar)


def test_a_stop_that_hangs_never_keeps_its_service_from_being_woken(hasty: Rig) -> None:
    """Whoever hangs there has set no timer for the next look."""
    online = hasty.online(7, {0})
    hasty.offline().add()
    prove(online)
    hasty.gate.permit(SERVICE, QUICK)
    wait_until(lambda: online.control["gate_epoch"] % 2 == 1, "the first wake")
    hasty.wait_gated(0, gated=False)
    hasty.driver.rules.hang = 1

    assert online.launch()
    wait_until(lambda: hasty.driver.counts.hanging == 1, "the stop hangs")
    prove(online)

    wait_until(lambda: online.control["gate_epoch"] % 2 == 1, "the next wake")
    assert hasty.driver.counts.hanging == 1
