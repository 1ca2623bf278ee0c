"""Processes that stand by a signal of valved: who lets them go, or ends them, whatever becomes of link and valved."""

from __future__ import annotations

import asyncio

import pytest
from fake_gate import FakeGate
from node_world import World

from valved.config import Config, LadderTable
from valved.daemon import take_over
from valved.model.events import EventKind
from valved.model.ids import GpuIndex, ProcessId
from valved.node.upkeep import leave_nobody_standing
from valved.state import saved as state
from valved.state.unsaved import FILE as UNSAVED

GPU = GpuIndex(0)


@pytest.fixture
def world(tmp_path):
    return World(tmp_path, config=Config(ladder=LadderTable(kill_after_s=30)))


def frozen(world, **more):
    """An offline process that stands beside a busy service. Returns both clients."""
    client, online = world.offline(pid=300, **more), world.online(pid=200)
    world.run(100)
    world.gate.launch(online)
    world.gate.fail(gpu=0, service=world.service_of(online))
    world.run(1)
    assert world.signals == [(300, "SIGSTOP")]
    return client, online


def after_a_crash(world):
    """A successor of a valved that was killed: it has the files as they are."""
    second = World(world.folder, gate=FakeGate(world.clock, 2), clock=world.clock, processes=world.processes)
    saved, problem = state.load(world.folder / "state.json")
    assert not problem
    second.come_back.begin(2.0, is_first=False)
    second.handover.restore(saved, come_back_s=2.0)
    return second


def test_nobody_is_let_go_by_a_successor_before_it_holds_and_hears_its_links(world, monkeypatch):
    """The link opens after what a predecessor left was restored, in the same turn of the loop."""
    frozen(world)
    seen = []

    def signal(self, process, number):
        self.signals.append((process.pid, number.name))
        seen.append((number.name, self is not world and self.gate.is_gated(GPU), "restored" in seen))
        return True

    monkeypatch.setattr(World, "_signal", signal)
    second = after_a_crash(world)
    assert not second.signals
    assert second.ladder.to_release() == {ProcessId(pid=300, start_time=3000)}
    assert second.ladder.standing(), "a node with a process that stands is not empty"
    seen.append("restored")
    second.run(1)

    assert seen == ["restored", ("SIGCONT", True, True)]
    assert not second.ladder.to_release()


def test_no_process_stands_for_ever_because_a_successor_was_killed_before_it_let_it_go(world):
    frozen(world)
    second = after_a_crash(world)
    second.handover.save()

    assert not second.signals

    third = after_a_crash(second)
    third.run(1)

    assert third.signals == [(300, "SIGCONT")]


@pytest.mark.parametrize("reason", ["link closed", "protocol error", "quota", "out of descriptors"])
def test_no_frozen_process_whose_link_has_ended_outlives_its_time(world, reason):
    client, _ = frozen(world, claimed=False)
    off = []
    world._signal = lambda process, number: off.append((number.name, bool(world.gate.off))) is None
    assert world.gate.off

    world.register.leave(client, reason)
    world.run(29_000)
    assert not off
    assert world.thawer.standing == {ProcessId(pid=300, start_time=3000)}
    world.run(2_000)

    assert off == [("SIGSTOP", True), ("SIGKILL", False)]
    assert not world.thawer.standing
    assert [event.detail["pid"] for event in world.events(EventKind.KILLED)] == [300]
    assert not world.register.channels.leftovers.all()


@pytest.mark.parametrize("reason", ["link closed", "protocol error"])
def test_no_frozen_process_whose_link_has_ended_stands_on_once_its_gpus_are_stopped(world, reason):
    client, online = frozen(world, claimed=False)
    world.register.leave(client, reason)

    world.gate.come_back(gpu=0, service=world.service_of(online))
    world.run(60_000)

    assert world.signals == [(300, "SIGSTOP"), (300, "SIGCONT")]


def test_valved_never_ends_and_leaves_a_process_standing(world):
    _, online = frozen(world)
    doomed = world.offline(pid=301, gpus=(1,))
    world.processes.slow_to_stop.add(301)
    world.ladder.end(doomed, "it broke a promise")
    world.brake.hand_over()

    async def end():
        ending = asyncio.ensure_future(leave_nobody_standing(world.gate, world.brake))
        while not ending.done():
            world.processes.slow_to_stop.clear()
            world.run(10)
            await asyncio.sleep(0)

    asyncio.run(end())
    world.gate.fail(gpu=0, service=world.service_of(online))  # the native side tries on to the end
    world.run(100)
    world.handover.save()

    assert [name for pid, name in world.signals if pid == 300] == ["SIGSTOP", "SIGCONT"]
    assert [name for pid, name in world.signals if pid == 301] == ["SIGSTOP", "SIGKILL"]
    saved, _ = state.load(world.folder / "state.json")
    assert not saved.frozen


def test_no_channel_stays_off_because_valved_was_killed_before_it_wrote_its_state(world):
    """It was switched off within the moment after which the file is written, and no service is left that would hold."""
    online = world.online(pid=200)
    world.run(100)
    world.gate.launch(online)
    world.run(100)
    client = world.offline(pid=300)
    h_client = 0xC1D00000 + client
    assert world.gate.off
    world.processes.end(200)

    second = after_a_crash(world)
    second.run(10_000)  # no hold of its start is left
    again = second.hello(300).client
    second.add_channel(again, h_client=h_client)

    assert [ref.h_client for ref in second.gate.foreign_enabled] == [h_client]
    second.handover.save()
    third = after_a_crash(second)
    assert len(third.register.channels.leftovers) == 1, "named once, by the state file"


def test_no_channel_of_a_former_boot_is_taken_for_one_of_this(world):
    world.online(pid=200)
    world.run(100)
    world.offline(pid=300)

    second = World(world.folder, gate=FakeGate(world.clock, 2), clock=world.clock, boot="another")
    saved, _ = state.load(world.folder / "state.json")
    second.handover.restore(saved, come_back_s=2.0)

    assert not second.register.channels.leftovers.all()
    assert not list(second.handover._unsaved.read(with_older=True))


def test_no_channel_is_forgotten_because_another_one_was_noted_on_a_full_disk(world):
    """The disk takes a part of a line. Later it has room again."""
    world.online(pid=200)
    world.run(100)
    world.handover.save()
    world.offline(pid=300)
    file = world.folder / UNSAVED
    file.write_bytes(file.read_bytes()[:-9])
    client = world.offline(pid=301)

    second = after_a_crash(world)

    assert 0xC1D00000 + client in {left.channel.h_client for left in second.register.channels.leftovers.all()}


def test_no_channel_is_forgotten_because_the_first_valved_of_a_node_was_killed_at_once(tmp_path):
    first = World(tmp_path)
    take_over(first, first.config, tmp_path)
    first.brake.pause("a test")
    client = first.offline(pid=300)
    assert first.gate.off

    second = World(tmp_path, gate=FakeGate(first.clock, 2), clock=first.clock, processes=first.processes)
    take_over(second, second.config, tmp_path)

    assert [left.channel.h_client for left in second.register.channels.leftovers.all()] == [0xC1D00000 + client]


def test_a_process_whose_channels_are_on_to_be_killed_is_never_let_go_when_valved_is_killed(world, monkeypatch):
    """Its page says no longer that it is to hold its launches."""
    client, _ = frozen(world)
    assert world.thawer.standing
    seen, leave = [], world.register.leave

    def left(*why):
        seen.append(set(world.thawer.standing))
        leave(*why)

    monkeypatch.setattr(world.register, "leave", left)
    world.ladder.end(client, "a test")
    world.run(1000)

    assert seen == [set()]


def test_a_process_that_was_let_go_late_is_never_let_go_again_when_valved_is_killed(world):
    """Somebody may have stopped it by hand since."""
    _, online = frozen(world)
    world.is_scarce = True
    world.register.leave(online, "exit")
    world.processes.end(200)
    world.run(1000)
    assert world.thawer.standing, "it waits for a descriptor"

    world.is_scarce = False
    world.run(100)

    assert world.signals == [(300, "SIGSTOP"), (300, "SIGCONT")]
    assert not world.thawer.standing
