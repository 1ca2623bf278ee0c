"""Channels that leave the gate while they are off and that the driver does not run at once."""

from __future__ import annotations

import os
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import ClassVar

import pytest
from gates import FakeDriver, Launcher, Rig, Workload, gate_rig, wait_until
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from native_world import NativeWorld
from valve_abi import Feature, Order

from valved.machine.ports import LeftOff, WakeOutcome
from valved.machine.stamps import StampKind
from valved.model.ids import ChannelRef, GpuIndex, Reach, ServiceId

SERVICE = ServiceId(7)
REFUSED = 0x65


def refuse_enables(rig: Rig, on: bool = True) -> None:
    rig.driver.rules.fail_enable = REFUSED if on else 0


def deny_foreign(rig: Rig, on: bool = True) -> None:
    """Rung channel-own stops nothing."""
    rig.driver.rules.deny_foreign = 0x1B if on else 0


def retried(rig: Rig, times: int = 3) -> None:
    """What is owed has been tried again so often: only where something is."""
    tried = rig.driver.counts.enables
    wait_until(lambda: rig.driver.counts.enables >= tried + times, "it is tried again")


def left_late(rig: Rig) -> Workload:
    """Its channels are off, in no plan, and owed an enable."""
    leaving = rig.offline()
    leaving.add(2)
    refuse_enables(rig)
    rig.gate.remove_client(leaving.client)
    assert leaving.on() == 0
    return leaving


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_nothing_of_a_client_that_has_left_is_ever_kept_for_a_file_that_left_with_it(rig: Rig) -> None:
    """Its channels were reached by that file alone: the driver can be asked nothing any more."""
    rig.online(7, {0})
    rig.wait_gated(0)
    deny_foreign(rig)
    before = open_files()
    leaving = rig.offline()
    leaving.pass_fd()
    assert [result.reach for result in leaving.add(2)] == [Reach.CHANNEL_FD] * 2
    refuse_enables(rig)

    rig.gate.remove_client(leaving.client)

    def is_all_given_back() -> bool:
        rig.gate.alive()
        return open_files() == before + 3  # the workload's own: its file, and two pages

    wait_until(is_all_given_back, "descriptors and pages")


def test_the_file_of_a_client_that_is_still_there_is_never_given_up(rig: Rig) -> None:
    rig.online(7, {0})
    rig.wait_gated(0)
    deny_foreign(rig)
    workload = rig.offline()
    workload.pass_fd()
    workload.add(2)
    refuse_enables(rig)
    rig.gate.channels.give_up(workload.client, "it is an MPS client")
    retried(rig)
    assert workload.on() == 0

    refuse_enables(rig, False)

    wait_until(lambda: workload.on() == 2, "both run")


def test_a_late_enable_never_takes_back_the_order_of_a_living_client_under_a_closed_gate(rig: Rig) -> None:
    """Its first rung could not even take back what it had tried; then it came by another one."""
    rig.online(7, {0})
    rig.wait_gated(0)
    left_late(rig)  # retries can be counted by these
    deny_foreign(rig)
    workload = rig.offline()
    with workload.obeying():
        assert workload.add()[0].reach is Reach.NONE
        workload.region["features"] = Feature.HOLD
        assert rig.gate.channels.add_channel(workload.client, workload.channels[0]).reach is Reach.LAUNCH_GATE

        retried(rig, 6)

        assert workload.control["order"] == Order.HOLD
        assert workload.control["gate_epoch"] % 2 == 1


def test_a_channel_that_no_rung_reaches_never_opens_the_gate_of_its_neighbour(rig: Rig) -> None:
    """Both of one process that stops its own channels, and the driver refuses it the second."""
    rig.online(7, {0})
    rig.wait_gated(0)
    deny_foreign(rig)
    workload = rig.offline(features=Feature.SELF_GATE)
    with workload.obeying():
        assert workload.add()[0].reach is Reach.CHANNEL_SELF
        workload.region["order_status"] = REFUSED
        assert workload.add()[0].reach is Reach.NONE

    assert workload.control["order"] == Order.STOP
    assert Order.RUN not in workload.obeyed


def test_a_channel_that_comes_back_beside_a_running_gpu_is_never_left_off(rig: Rig) -> None:
    rig.online(7, {0})
    rig.wait_gated(0)
    leaving = left_late(rig)
    retried(rig, 8)  # the next try is far away
    rig.gate.wake(SERVICE)
    rig.wait_gated(0, False)
    refuse_enables(rig, False)
    back = rig.offline()

    for ref in leaving.channels:  # the first is tried off and on, the second is known to be reached
        rig.gate.channels.add_channel(back.client, ref)

    wait_until(lambda: leaving.on() == 2, "both run")


def is_stopped_behind(rig: Rig, online: Launcher, more: int) -> None:
    """An enable is under way, and the service launches: its GPU is stopped after so many more, for any other hangs."""
    wait_until(lambda: rig.driver.counts.hanging == 1, "an enable is under way")
    online.launch()
    wait_until(lambda: online.control["gate_epoch"] % 2 == 0, "the ring is heard")
    rig.driver.rules.passes = 1 + more
    rig.wait_stamp(lambda stamp: stamp.client == online.client)
    rig.driver.rules.hang_enable = 0


def test_no_stop_ever_waits_for_enables_that_are_late(rig: Rig) -> None:
    online = rig.online(7, {0})
    rig.wait_gated(0)
    for _ in range(12):
        left_late(rig)
    rig.gate.wake(SERVICE)
    rig.wait_gated(0, False)
    deny_foreign(rig)  # an order stops it: no call that could be held up with the others
    workload = rig.offline(features=Feature.HOLD)
    with workload.obeying():
        assert workload.add()[0].reach is Reach.LAUNCH_GATE
        rig.driver.rules.hang_enable = 1

        is_stopped_behind(rig, online, 2)  # of the list that was under way, and no other


def of_many_steps(rig: Rig) -> Workload:
    workload = rig.offline()
    workload.add(64 * 8)
    return workload


def test_no_stop_ever_waits_for_the_rest_of_a_late_list(rig: Rig) -> None:
    online = rig.online(7, {0})
    rig.wait_gated(0)
    leaving = of_many_steps(rig)
    refuse_enables(rig)
    rig.gate.remove_client(leaving.client)
    rig.gate.wake(SERVICE)
    rig.wait_gated(0, False)
    rig.offline().add()
    rig.driver.rules.hang_enable = 1
    refuse_enables(rig, False)

    is_stopped_behind(rig, online, 0)

    wait_until(lambda: leaving.on() == len(leaving.channels), "all run")


def test_no_stop_ever_waits_for_the_rest_of_an_enable_that_it_makes_vain(rig: Rig) -> None:
    online = rig.online(7, {0})
    workload = of_many_steps(rig)
    rig.wait_gated(0)
    rig.driver.rules.hang_enable = 1
    rig.gate.wake(SERVICE)

    is_stopped_behind(rig, online, 0)
    assert workload.on() == 0
    online.finish()
    wait_until(lambda: rig.gate.wake(SERVICE) is not WakeOutcome.REFUSED, "woken")
    wait_until(lambda: workload.on() == len(workload.channels), "all run")


def test_no_channel_of_a_predecessor_stays_off_because_the_driver_refused_once(rig: Rig) -> None:
    """Nobody else remembers it: its process has ended, or was never ours to stop."""
    workload = rig.offline()
    for _ in range(2):
        ref = workload.allocate()
        rig.driver.lib.fake_switch(ref.h_client, ref.h_channel, 0)
    refuse_enables(rig)

    assert rig.gate.channels.enable_foreign(workload.channels) == 0
    retried(rig)
    refuse_enables(rig, False)

    wait_until(lambda: workload.on() == 2, "both run")


def test_no_channel_of_a_predecessor_stays_off_because_the_driver_hung_when_it_came_back(
    hasty: Rig, tmp_path: Path
) -> None:
    """Its plan is read beside a running GPU, which nobody walks."""
    node = NativeWorld(tmp_path, hasty)
    books, left = node.world.books, node.world.register.channels.leftovers
    other, back = node.world.offline(gpus=()), node.world.offline(gpus=())
    channel, owner = node.allocate()
    key = channel.h_client, channel.h_channel
    hasty.driver.lib.fake_switch(*key, 0)
    words = {name: getattr(channel, name) for name in ("h_client", "h_channel", "cid", "h_tsg", "engine", "compute")}
    ref = ChannelRef(gpu=GpuIndex(0), **words)
    left.put(ref, books.clients[back].process)
    hasty.driver.rules.hang_query = 1
    node.tell(other, *node.allocate())  # given up in the end

    node.tell(back, channel, owner)
    hasty.driver.rules.hang_query = 0
    hasty.settle()

    assert node.is_on(key)
    assert not len(left)
    node.close()


def test_an_enable_of_a_channel_in_the_plan_is_never_lost_to_a_hold_that_comes_and_goes(rig: Rig) -> None:
    rig.online(7, {0})
    rig.wait_gated(0)
    rig.gate.wake(SERVICE)
    rig.wait_gated(0, False)
    workload = rig.offline()
    workload.add()
    (ref,) = workload.channels
    rig.driver.lib.fake_switch(ref.h_client, ref.h_channel, 0)
    steps = [lambda: rig.gate.hold(SERVICE, 0), lambda: rig.gate.wake(SERVICE)]

    @rig.driver.ffi.callback("void(int)")
    def come_and_go(point: int) -> None:
        if point == 4 and steps:
            steps.pop(0)()

    rig.driver.lib.fake_set_between(come_and_go)
    rig.gate.channels.enable_foreign([ref])
    rig.settle()

    assert not steps
    assert workload.on() == 1


def test_a_leftover_whose_process_lives_is_never_forgotten_for_a_refusal(rig: Rig) -> None:
    workload = rig.offline()
    ref = workload.allocate()
    rig.driver.lib.fake_switch(ref.h_client, ref.h_channel, 0)
    rig.driver.rules.fail_enable, rig.driver.rules.fail_times = REFUSED, 1

    assert rig.gate.channels.enable_unless_held(ref) is LeftOff.HELD
    assert workload.on() == 0
    assert rig.gate.channels.enable_unless_held(ref) is LeftOff.ENABLED


@pytest.mark.parametrize("why", ["no RM client of our own", "foreign lists are denied", "not supported"])
def test_a_leftover_that_this_valved_cannot_enable_is_never_waited_for(fake_library: Path, why: str) -> None:
    driver = FakeDriver(fake_library)
    driver.rules.fail_clients = 0x1B if why == "no RM client of our own" else 0
    with gate_rig(driver) as rig:
        driver.rules.deny_foreign = {"foreign lists are denied": 0x1B, "not supported": 0x56}.get(why, 0)
        ref = rig.offline().allocate()

        assert rig.gate.channels.enable_unless_held(ref) is LeftOff.OUT_OF_REACH


GPU_IS_LOST = 0x0F


def test_a_leftover_on_a_gpu_that_is_lost_never_bars_grants_for_ever(rig: Rig) -> None:
    ref = rig.offline().allocate()
    rig.driver.lib.fake_switch(ref.h_client, ref.h_channel, 0)
    rig.driver.rules.fail_enable = GPU_IS_LOST

    assert rig.gate.channels.enable_unless_held(ref) is LeftOff.ENDED


def test_nothing_is_ever_owed_on_a_gpu_that_is_lost(rig: Rig) -> None:
    rig.online(7, {0})
    rig.wait_gated(0)
    before = open_files()
    left_late(rig)
    rig.driver.rules.fail_enable = GPU_IS_LOST

    def is_all_given_back() -> bool:
        rig.gate.alive()
        return open_files() == before + 3  # the workload's own: its file, and two pages

    wait_until(is_all_given_back, "descriptors and pages")


def left_off_before_our_client_was_lost(rig: Rig) -> ChannelRef:
    ref = rig.offline().allocate()
    rig.driver.lib.fake_switch(ref.h_client, ref.h_channel, 0)
    rig.driver.lib.fake_forget_openers()
    return ref


def test_our_own_client_that_cannot_be_had_is_never_taken_for_the_end_of_a_channel(rig: Rig) -> None:
    ref = left_off_before_our_client_was_lost(rig)
    gpus, rig.driver.rules.gpus = rig.driver.rules.gpus, 0  # its node does not open

    assert rig.gate.channels.enable_unless_held(ref) is LeftOff.HELD

    rig.driver.rules.gpus = gpus
    assert rig.gate.channels.enable_unless_held(ref) is LeftOff.ENABLED


def test_our_own_lost_client_is_never_taken_for_the_end_of_a_predecessors_channel(rig: Rig) -> None:
    ref = left_off_before_our_client_was_lost(rig)

    assert rig.gate.channels.enable_unless_held(ref) is LeftOff.ENABLED


def stop_refused(rig: Rig, leaving: Workload, online: Launcher) -> None:
    """The driver says no to each stop, and has stopped the channels all the same. Another process stays in the plan."""
    rig.gate.wake(SERVICE)
    rig.wait_gated(0, False)
    rig.driver.rules.fail_after = 64  # all of a list
    rig.driver.rules.fail_disable = REFUSED
    online.launch()
    rig.wait_stamp(lambda stamp: stamp.kind is StampKind.GATE_FAILED)
    wait_until(lambda: leaving.on() == 0, "all are off")


@pytest.mark.parametrize("reach", [Reach.CHANNEL_OWN, Reach.CHANNEL_FD])
def test_a_process_is_never_killed_with_channels_off_because_the_driver_refuses_the_stop(
    rig: Rig, reach: Reach
) -> None:
    online = rig.online(7, {0})
    rig.wait_gated(0)
    deny_foreign(rig, reach is Reach.CHANNEL_FD)
    staying, leaving = rig.offline(), rig.offline()
    for workload, count in ((staying, 1), (leaving, 2 * 64 + 2)):
        workload.pass_fd()
        assert {result.reach for result in workload.add(count)} == {reach}
    stop_refused(rig, leaving, online)

    rig.gate.remove_client(leaving.client)  # who kills it does so when this returns

    assert leaving.on() == len(leaving.channels)


def test_a_stale_channel_never_keeps_its_neighbours_off_because_the_driver_refuses_the_stop(rig: Rig) -> None:
    online = rig.online(7, {0})
    rig.wait_gated(0)
    staying, leaving = rig.offline(), rig.offline()
    staying.add()
    leaving.add(20)
    stop_refused(rig, leaving, online)
    leaving.free(leaving.channels.pop(0))

    rig.gate.remove_client(leaving.client)

    assert leaving.on() == len(leaving.channels)


def test_a_process_is_never_killed_with_channels_off_because_a_stop_came_while_they_were_enabled(rig: Rig) -> None:
    """Its file goes with its client. Nothing could enable them after that."""
    online = rig.online(7, {0})
    rig.wait_gated(0)
    deny_foreign(rig)
    staying, leaving = rig.offline(), rig.offline()
    for workload, count in ((staying, 1), (leaving, 64 + 1)):
        workload.pass_fd()
        workload.add(count)
    refuse_enables(rig)
    before = rig.driver.counts.enables
    calls = 1 + 7 + 1  # of a walk: a list of 64 that is refused is halved down to one
    rig.gate.wake(SERVICE)
    retried(rig)
    rig.driver.rules.hang_enable = 1
    wait_until(lambda: rig.driver.counts.hanging == 1, "an enable of the plan")
    going = threading.Thread(target=rig.gate.remove_client, args=(leaving.client,))
    going.start()
    rig.driver.rules.passes = calls - (rig.driver.counts.enables - before - 1) % calls
    wait_until(lambda: not rig.driver.rules.passes and rig.driver.counts.hanging == 1, "an enable of who leaves")

    online.launch()
    wait_until(lambda: online.control["gate_epoch"] % 2 == 0, "the ring is heard")
    refuse_enables(rig, False)
    rig.driver.rules.hang_enable = 0
    going.join()

    assert leaving.on() == len(leaving.channels)


class LeavingAndComing(RuleBasedStateMachine):
    """Clients on every rung come, leave, are given up and come back, while the driver enables and refuses to. The
    model: which channels are in the plan, and which of the others nobody can enable any more.
    """

    library: ClassVar[Path]
    rungs = (Reach.CHANNEL_OWN, Reach.CHANNEL_FD, Reach.CHANNEL_SELF, Reach.LAUNCH_GATE, Reach.NONE)
    features: ClassVar[dict[Reach, int]] = {Reach.CHANNEL_SELF: Feature.SELF_GATE, Reach.LAUNCH_GATE: Feature.HOLD}

    def __init__(self) -> None:
        super().__init__()
        self.stack = ExitStack()
        self.rig = self.stack.enter_context(gate_rig(FakeDriver(self.library)))
        self.online = self.rig.online(7, {0})
        self.rig.wait_gated(0)
        self.is_held, self.refuses = True, False
        self.here: list[tuple[Workload, Reach]] = []
        self.orphans: list[ChannelRef] = []  # in no plan, and to run
        self.lost: set[ChannelRef] = set()

    def teardown(self) -> None:
        self.stack.close()

    @precondition(lambda self: len(self.here) < 6 and (self.is_held or not self.refuses))
    @rule(rung=st.sampled_from(rungs))
    def come(self, rung: Reach) -> None:
        """Each rung is tried: not where the driver is being asked to run the others, and refuses."""
        self.rig.wait_gated(0, self.is_held)
        workload = self.rig.offline(features=self.features.get(rung, 0))
        self.stack.enter_context(workload.obeying())
        deny_foreign(self.rig, rung is not Reach.CHANNEL_OWN)
        if rung is Reach.CHANNEL_FD:
            workload.pass_fd()
        (result,) = workload.add()
        deny_foreign(self.rig, False)

        assert result.reach is rung
        self.here.append((workload, rung))
        if rung is Reach.NONE:
            self.orphans += workload.channels

    def someone(self, which: int) -> int | None:
        return which % len(self.here) if self.here else None

    @rule(which=st.integers(0, 5))
    def add(self, which: int) -> None:
        at = self.someone(which)
        if at is not None and self.here[at][1] is not Reach.NONE:
            (result,) = self.here[at][0].add()
            assert result.reach is self.here[at][1]

    @rule(which=st.integers(0, 5))
    def offer_to_hold_launches(self, which: int) -> None:
        """Whom no rung reached is reached after all, and told of again."""
        at = self.someone(which)
        if at is None or self.here[at][1] is not Reach.NONE:
            return
        if self.refuses and not self.is_held:
            return
        self.rig.wait_gated(0, self.is_held)
        workload = self.here[at][0]
        workload.region["features"] = Feature.HOLD
        deny_foreign(self.rig)
        (ref,) = workload.channels
        assert self.rig.gate.channels.add_channel(workload.client, ref).reach is Reach.LAUNCH_GATE
        deny_foreign(self.rig, False)
        self.here[at] = (workload, Reach.LAUNCH_GATE)
        self.orphans.remove(ref)

    def gone(self, workload: Workload, rung: Reach, *, with_file: bool) -> None:
        if rung is Reach.NONE:
            return
        self.orphans += workload.channels
        if rung is Reach.CHANNEL_FD and with_file and self.refuses:
            self.lost |= set(workload.channels)

    @rule(which=st.integers(0, 5))
    def leave(self, which: int) -> None:
        at = self.someone(which)
        if at is None:
            return
        workload, rung = self.here.pop(at)
        self.rig.gate.remove_client(workload.client)
        self.gone(workload, rung, with_file=True)

    @rule(which=st.integers(0, 5))
    def give_up(self, which: int) -> None:
        at = self.someone(which)
        if at is None or self.here[at][1] is Reach.NONE:
            return
        workload, rung = self.here.pop(at)
        self.rig.gate.channels.give_up(workload.client, "it is an MPS client")
        self.gone(workload, rung, with_file=False)

    @precondition(lambda self: self.orphans and len(self.here) < 6)
    @rule(which=st.integers(0, 50))
    def come_back(self, which: int) -> None:
        """By another client, and all that the RM client has: some of it owed, some of it running."""
        h_client = self.orphans[which % len(self.orphans)].h_client
        if any(workload.h_client == h_client for workload, _ in self.here):
            return
        back = self.rig.offline()
        back.channels = [ref for ref in self.orphans if ref.h_client == h_client]
        self.orphans = [ref for ref in self.orphans if ref.h_client != h_client]
        self.lost -= set(back.channels)
        for ref in back.channels:
            assert self.rig.gate.channels.add_channel(back.client, ref).reach is Reach.CHANNEL_OWN
        back.h_client = h_client
        self.here.append((back, Reach.CHANNEL_OWN))

    @rule(on=st.booleans())
    def refuse(self, on: bool) -> None:
        refuse_enables(self.rig, on)
        self.refuses = on

    @rule()
    def hold(self) -> None:
        self.rig.gate.hold(SERVICE, reason=0)
        self.is_held = True

    @rule()
    def wake(self) -> None:
        assert self.rig.gate.wake(SERVICE) is not WakeOutcome.REFUSED
        self.is_held = False

    @precondition(lambda self: self.refuses)
    @rule()
    def what_is_late_is_tried_again(self) -> None:
        calls = [r for w, r in self.here if r in (Reach.CHANNEL_OWN, Reach.CHANNEL_FD)]
        late = [ref for ref in self.orphans if ref not in self.lost and self.is_on(ref) == 0]
        if late or (calls and not self.is_held and not all(w.on() for w, _ in self.here)):
            retried(self.rig)

    def is_on(self, ref: ChannelRef) -> int:
        return int(self.rig.driver.lib.fake_is_on(ref.h_client, ref.h_channel))

    @invariant()
    def who_is_in_the_plan_stands_under_a_closed_gate(self) -> None:
        if not self.is_held:
            return
        self.rig.wait_gated(0)
        for workload, rung in self.here:
            if rung in (Reach.CHANNEL_OWN, Reach.CHANNEL_FD):
                assert workload.on() == 0
            elif rung is not Reach.NONE:
                order = Order.STOP if rung is Reach.CHANNEL_SELF else Order.HOLD
                assert workload.control["order"] == order

    @invariant()
    def whatever_may_run_does_unless_the_driver_refuses(self) -> None:
        if self.refuses:
            return
        due = [ref for ref in self.orphans if ref not in self.lost]
        if not self.is_held:
            due += [ref for workload, _ in self.here for ref in workload.channels]
        wait_until(lambda: all(map(self.is_on, due)), "all run")
        if not self.is_held:
            for workload, rung in self.here:
                wait_until(lambda w=workload: w.control["order"] == Order.RUN, f"{rung}: its order ends")


def test_no_leaving_and_coming_ever_leaves_a_channel_off_or_runs_one_under_a_closed_gate(
    fake_library: Path,
) -> None:
    LeavingAndComing.library = fake_library

    run_state_machine_as_test(
        LeavingAndComing, settings=settings(max_examples=40, stateful_step_count=25, deadline=None, derandomize=True)
    )
