"""Signals that cannot be sent for want of a descriptor: what valved says, does and hands on until they are sent."""

from __future__ import annotations

import pytest
from node_world import World, successor

from valved.config import Config, LadderTable
from valved.model.events import EventKind
from valved.model.ids import ProcessId


@pytest.fixture
def world(tmp_path):
    return World(tmp_path, config=Config(ladder=LadderTable(kill_after_s=30)))


def pid_of(world, client):
    return world.books.clients[client].process.pid


def end_where_scarce(world, pid):
    """Whoever gets the signal after which no descriptor is left."""

    def signal(process, number):
        world.signals.append((process.pid, number.name))
        world.is_scarce = number.name == "SIGSTOP"
        return True

    world._signal = signal


def test_no_process_that_could_not_be_stopped_is_let_go_with_its_channels_on(world):
    pid = pid_of(world, world.offline(claimed=False))
    world.node.drain("me", stop=True)
    world.run(100)
    world.is_scarce = True

    for _ in range(20):
        world.run(5000)
        assert world.gate.off
        assert world.books.clients
    assert not world.events(EventKind.DRAINED, EventKind.KILLED)
    assert not world.stopped

    world.is_scarce = False
    world.run(1500)
    assert [name for _, name in world.signals][-1] == "SIGKILL"
    assert not world.gate.off
    world.processes.end(pid)
    world.run(1000)
    assert world.stopped


def test_no_node_is_told_empty_and_no_valved_ends_while_a_kill_waits(world):
    pid = pid_of(world, world.offline(claimed=False))
    world.node.drain("me", stop=True)
    world.run(100)
    end_where_scarce(world, pid)

    world.run(120_000)

    assert not world.books.clients
    assert world.signals[-1] == (pid, "SIGSTOP")
    assert len(world.events(EventKind.KILLED)) == 1
    assert not world.events(EventKind.DRAINED)
    assert not world.stopped

    world.is_scarce = False
    world.run(1000)
    assert world.signals[-1] == (pid, "SIGKILL")
    assert world.stopped


def test_no_process_that_closed_its_link_while_its_stop_waited_is_forgotten(world):
    """It would stand for ever once the signal is sent."""
    client = world.offline(claimed=False, gpus=())
    pid = pid_of(world, client)
    world.node.drain("me", stop=True)
    world.run(100)
    world.is_scarce = True
    world.run(60_300)
    world.register.leave(client, "link closed")
    world.run(5000)
    assert not world.stopped

    world.is_scarce = False
    world.run(1500)
    assert world.signals[-1] == (pid, "SIGKILL")
    world.processes.end(pid)
    world.run(1000)
    assert world.stopped


def test_no_process_is_left_standing_by_a_valved_that_ends_before_it_could_kill_it(world):
    pid = pid_of(world, world.offline())
    world.node.drain("me", stop=False)
    world.processes.slow_to_stop.add(pid)
    world.run(60_200)
    assert world.signals[-1] == (pid, "SIGSTOP")

    world.brake.hand_over()
    world.run(5000)

    assert world.signals[-1] == (pid, "SIGCONT")
    assert world.gate.off


def test_a_drain_taken_back_leaves_nobody_to_be_stopped_by_a_signal_that_waited(world):
    pid = pid_of(world, world.offline())
    world.node.drain("me", stop=False)
    world.run(100)
    world.is_scarce = True
    world.run(60_300)

    world.node.resume()
    world.is_scarce = False
    world.run(100_000)

    assert world.signals == [(pid, "SIGTERM"), (pid, "SIGCONT")]
    assert not world.gate.off


def fail_gate(world):
    """Returns the pid of an offline process that cannot be gated, and its GPU's online service."""
    pid, online = pid_of(world, world.offline(pid=300)), world.online(pid=200)
    world.run(100)
    world.gate.launch(online)
    world.gate.fail(gpu=0, service=world.service_of(online))
    return pid, online


def test_a_frozen_process_whose_stop_still_waits_is_never_let_go_to_be_killed(world):
    world.is_scarce = True
    pid, _ = fail_gate(world)

    world.run(60_000)
    assert not world.signals
    assert world.books.client_of_process([ProcessId(pid=pid, start_time=pid * 10)])

    world.is_scarce = False
    world.run(200)
    assert world.signals[-1] == (pid, "SIGKILL")


def test_a_process_that_closed_its_link_while_its_end_waited_never_stands_for_ever(world):
    client = world.offline()
    pid = pid_of(world, client)
    world.is_scarce = True
    world.ladder.end(client, "it broke a promise")
    world.register.leave(client, "link closed")

    world.is_scarce = False
    world.run(200)

    assert world.signals == [(pid, "SIGSTOP"), (pid, "SIGKILL")]


def test_no_stranger_is_said_to_stand_before_it_was_told_to(world):
    stranger = ProcessId(pid=900, start_time=9000)
    world.is_scarce = True
    assert not world.ladder.freeze_stranger(stranger, "process 900")
    assert not world.events(EventKind.FROZEN)

    world.is_scarce = False
    assert world.ladder.freeze_stranger(stranger, "process 900")
    assert len(world.events(EventKind.FROZEN)) == 1


def test_no_process_stands_for_ever_because_valved_ended_before_it_could_be_let_go(world, monkeypatch):
    """Neither the valved that froze it nor the next one has a descriptor."""
    pid, online = fail_gate(world)
    world.run(1)
    assert world.ladder.frozen()
    monkeypatch.setattr(World, "is_scarce", True)
    world.gate.finish(online)
    world.processes.end(200)
    world.register.leave(online, "exit")
    world.run(1000)
    assert not world.ladder.frozen()
    assert world.signals == [(pid, "SIGSTOP")]

    second = successor(world)
    third = successor(second)
    assert not second.signals
    assert not third.signals
    monkeypatch.setattr(World, "is_scarce", False)
    third.run(20)

    assert third.signals == [(pid, "SIGCONT")]


def test_no_frozen_process_that_closed_its_link_stands_for_ever_or_is_forgotten_by_a_successor(world):
    client, online = world.offline(pid=300), world.online(pid=200)
    process = world.books.clients[client].process
    world.run(100)
    world.gate.launch(online)
    world.gate.fail(gpu=0, service=world.service_of(online))
    world.run(1)

    world.register.leave(client, "link closed")
    world.run(20_000)  # before the time after which it is killed
    assert world.signals == [(300, "SIGSTOP")]
    assert process in world.ladder.to_release()

    world.gate.come_back(gpu=0, service=world.service_of(online))
    world.gate.finish(online)
    world.run(100_000)

    assert world.signals == [(300, "SIGSTOP"), (300, "SIGCONT")]
    assert process not in world.ladder.to_release()
