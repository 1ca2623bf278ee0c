"""Processes that are to be killed: with their channels on, never forgotten, and never left standing."""

from __future__ import annotations

import errno
from itertools import pairwise

import pytest
from fake_gate import FakeGate
from node_world import World, successor

from valved.config import Config, LadderTable
from valved.model.events import EventKind
from valved.model.ids import ProcessId
from valved.state import saved as state


@pytest.fixture
def world(tmp_path):
    return World(tmp_path, config=Config(ladder=LadderTable(kill_after_s=30)))


def pid_of(world, client):
    return world.books.clients[client].process.pid


def stopped(world, **more):
    """An offline process whose channel is off beside a busy service."""
    client, online = world.offline(pid=300, **more), world.online(pid=200)
    world.run(100)
    world.gate.launch(online)
    assert world.gate.off
    return client, online


def left_to_be_killed(world):
    """Its end waits for a descriptor, and it has closed its link."""
    client, _ = stopped(world, claimed=False)
    world.is_scarce = True
    world.ladder.end(client, "it broke a promise")
    world.register.leave(client, "link closed")


def what_is_off_at_a_kill(world):
    seen = []
    world._signal = lambda process, number: number.name != "SIGKILL" or seen.append(dict(world.gate.off)) is None
    return seen


def after_a_crash(world):
    """A successor of a valved that was killed: it has the file as it is."""
    gate = FakeGate(world.clock, 2)
    second = World(world.folder, gate=gate, clock=world.clock, processes=world.processes)
    saved, problem = state.load(world.folder / "state.json")
    assert not problem
    second.handover.restore(saved, come_back_s=2.0)
    second.run(0)  # the next turn of its loop
    return second


def test_no_process_that_closed_its_link_is_killed_with_its_channels_off(world):
    left_to_be_killed(world)
    off = what_is_off_at_a_kill(world)

    world.is_scarce = False
    world.run(1000)

    assert off == [{}]


def test_no_node_is_told_empty_while_the_end_of_a_process_without_a_link_waits(world):
    client = world.offline(pid=300, claimed=False, gpus=())
    world.is_scarce = True
    world.ladder.end(client, "it broke a promise")
    world.register.leave(client, "link closed")

    world.node.drain("me", stop=True)
    world.run(5000)

    assert not world.stopped
    assert world.reporter.status().offline_pids == (300,)
    world.is_scarce = False
    world.run(1000)
    assert world.signals[-1] == (300, "SIGKILL")
    assert world.stopped


def test_no_node_is_told_empty_while_a_frozen_process_without_a_link_stands(world):
    client, online = stopped(world, claimed=False)
    world.gate.fail(gpu=0, service=world.service_of(online))
    world.run(1)
    assert world.ladder.frozen()
    world.register.leave(client, "link closed")
    world.register.channels.leftovers.take_where(lambda left: True)  # none of its channels was off

    world.node.drain("me", stop=True)
    world.run(5000)

    assert not world.stopped
    world.processes.end(300)
    world.run(1000)
    assert world.stopped


def test_no_kill_that_could_not_be_sent_is_lost_with_the_valved_that_decided_it(world, monkeypatch):
    pid = pid_of(world, world.offline(claimed=False))
    world.node.drain("me", stop=False)
    world.run(59_900)
    sent = world._signal

    def signal(process, number):
        world.is_scarce = number.name == "SIGSTOP"
        return sent(process, number)

    world._signal = signal
    world.run(1000)
    assert world.signals[-1] == (pid, "SIGSTOP")
    assert not world.books.clients

    world.brake.hand_over()
    second = successor(world)
    second.run(1000)

    assert [name for who, name in second.signals if who == pid][-1] == "SIGKILL"


def test_the_end_of_a_process_that_broke_a_promise_is_never_lost_with_valved(world, monkeypatch):
    client, _ = stopped(world)
    monkeypatch.setattr(World, "is_scarce", True)
    world.ladder.end(client, "it broke a promise")

    second = successor(world)
    off = what_is_off_at_a_kill(second)
    second.gate.off.update(world.gate.off)
    monkeypatch.setattr(World, "is_scarce", False)
    second.run(1000)

    assert off == [{}]
    assert not second.register.channels.leftovers.all()


def test_no_process_stands_for_ever_because_valved_was_killed_just_after_it_froze_it(world):
    _, online = stopped(world)
    world.handover.save()

    world.gate.fail(gpu=0, service=world.service_of(online))
    world.run(1)
    assert world.signals == [(300, "SIGSTOP")]

    assert after_a_crash(world).signals == [(300, "SIGCONT")]


def test_a_stop_that_failed_is_never_told_by_a_number_alone(world):
    _, online = stopped(world)

    for status, words in ((-110, "no answer in time"), (0x65, "the GPU did not answer in time (RM status 0x65)")):
        world.gate.fail(gpu=0, service=world.service_of(online), status=status)
        world.run(1)

        told = {event.kind.value: event.reason for event in world.journal.recent(lambda event: True, 10_000)}
        assert told["gate-failed"] == f"the stop failed: {words}"
    assert told["frozen"] == "the stop failed: no answer in time"


def test_nobody_runs_on_because_the_file_of_a_successor_cannot_be_written(world, monkeypatch):
    client, online = stopped(world)

    def fail():
        raise RuntimeError("a book makes no sense")

    monkeypatch.setattr(world.handover, "snapshot", fail)
    world.handover.save_soon = lambda: None
    world.gate.fail(gpu=0, service=world.service_of(online))
    world.run(1)
    assert world.signals == [(300, "SIGSTOP")]

    world.ladder.end(client, "it broke a promise")
    world.run(1)

    assert world.signals[-1] == (300, "SIGKILL")


def test_no_process_stands_for_ever_because_the_file_could_not_be_written_when_it_was_frozen(world, monkeypatch):
    _, online = stopped(world)
    world.handover.save()
    write = state.save

    def fail(path, saved, encoder):
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(state, "save", fail)
    world.gate.fail(gpu=0, service=world.service_of(online))
    world.run(3500)
    assert world.signals == [(300, "SIGSTOP")]
    assert len(world.events(EventKind.NOTED)) == 1
    monkeypatch.setattr(state, "save", write)
    world.run(1500)

    assert after_a_crash(world).signals == [(300, "SIGCONT")]


def test_no_process_stands_for_ever_because_a_book_could_not_be_kept_when_it_was_to_die(world, monkeypatch):
    client, _ = stopped(world)

    def fail(entry, *, is_dead):
        raise RuntimeError("a book makes no sense")

    monkeypatch.setattr(world.register.listener, "client_left", fail)
    world.ladder.end(client, "it broke a promise")
    with pytest.raises(RuntimeError):
        world.run(1)

    assert world.signals[-1] == (300, "SIGKILL")


def test_no_process_stands_for_ever_because_valved_lost_its_folder(world):
    _, online = stopped(world)
    doomed = world.offline(pid=301, gpus=(1,))
    world.gate.fail(gpu=0, service=world.service_of(online))
    world.run(1)
    world.processes.slow_to_stop.add(301)
    world.ladder.end(doomed, "it broke a promise")

    world.brake.hand_over()
    assert world.ladder.to_end()
    world.processes.slow_to_stop.clear()
    world.run(1000)
    assert not world.ladder.to_end()
    world.ladder.let_all_go()

    assert [name for pid, name in world.signals if pid == 300] == ["SIGSTOP", "SIGCONT"]
    assert [name for pid, name in world.signals if pid == 301] == ["SIGSTOP", "SIGKILL"]


def test_no_process_stands_for_ever_because_valved_was_killed_while_it_waited_for_it_to_stand(world):
    client, _ = stopped(world)
    world.node.drain("me", stop=True)
    world.run(59_900)
    world.processes.slow_to_stop.add(300)
    world.run(200)
    world.handover.save_soon = lambda: None
    assert world.signals[-1] == (300, "SIGSTOP")
    assert client in world.books.clients

    assert after_a_crash(world).signals == [(300, "SIGCONT")]


def test_nobody_who_is_to_be_killed_is_let_go_because_its_gpu_opened_meanwhile(world):
    """With its channels on it would run, and be killed in the middle of it."""
    client, online = stopped(world)
    world.gate.fail(gpu=0, service=world.service_of(online))
    world.run(1)
    world.processes.slow_to_stop.add(300)
    world.ladder.end(client, "it broke a promise")
    world.gate.come_back(gpu=0, service=world.service_of(online))
    world.gate.finish(online)

    world.run(1000)

    assert "SIGCONT" not in [name for _, name in world.signals]
    assert world.signals[-1] == (300, "SIGKILL")


def test_a_drain_taken_back_never_lets_go_whose_gate_failed_meanwhile(world):
    _, online = stopped(world)
    world.node.drain("me", stop=False)
    world.run(59_900)
    world.processes.slow_to_stop.add(300)
    world.run(200)
    world.gate.fail(gpu=0, service=world.service_of(online))
    world.run(1)

    world.node.resume()
    world.run(1)

    assert [name for _, name in world.signals][-1] == "SIGSTOP"
    assert world.ladder.frozen()


def test_nobody_is_let_run_with_its_channels_on_before_it_stands(world):
    """A stop signal takes its time on a busy machine."""
    client, _ = stopped(world)
    world.processes.slow_to_stop.add(300)
    world.ladder.end(client, "it broke a promise")
    assert world.gate.off

    world.processes.slow_to_stop.clear()
    world.run(100)

    assert not world.gate.off
    assert world.signals[-1] == (300, "SIGKILL")
    assert len(world.events(EventKind.KILLED)) == 1


def test_who_was_stopped_without_the_shim_is_remembered_for_as_long_as_it_lives_and_no_longer(world):
    for pid in range(1000, 1100):
        stranger = ProcessId(pid=world.processes.add(pid), start_time=pid * 10)
        assert world.ladder.freeze_stranger(stranger, f"process {pid}")
        assert world.ladder.freeze_stranger(stranger, f"process {pid}")
        world.processes.end(pid)

    assert len(world.events(EventKind.FROZEN)) == 100
    assert len(world.ladder._strangers) <= 2


def test_the_state_file_is_never_written_once_for_each_of_many_that_are_killed_in_one_turn(world, monkeypatch):
    jobs = [world.offline(pid=1000 + number) for number in range(64)]
    world.run(100)
    written, write = [], state.save
    monkeypatch.setattr(state, "save", lambda path, said, _: (written.append(len(said.ending)), write(path, said)))

    for job in jobs:
        world.ladder.end(job, "it broke a promise")
    assert world.signals == []  # nobody stands who is in no file
    world.run(1)

    assert written[0] == 64
    assert len(written) == 1
    assert [pid for pid, name in world.signals if name == "SIGKILL"] == list(range(1063, 999, -1))  # youngest first


def test_one_that_cannot_be_ended_never_keeps_another_that_was_begun_in_the_same_turn_from_its_end(world, monkeypatch):
    first, second = world.offline(pid=300), world.offline(pid=301)
    world.run(100)
    leave = world.register.listener.client_left

    def fail(entry, *, is_dead):
        if entry.process.pid == 300:
            raise RuntimeError("a book makes no sense")
        leave(entry, is_dead=is_dead)

    monkeypatch.setattr(world.register.listener, "client_left", fail)
    world.ladder.end(first, "it broke a promise")
    world.ladder.end(second, "it broke a promise")
    with pytest.raises(RuntimeError):
        world.run(1)
    world.run(1)

    assert {pid for pid, name in world.signals if name == "SIGKILL"} == {300, 301}


def test_processes_of_many_threads_that_are_to_end_never_have_more_than_a_part_of_the_loop(world):
    """How long a look takes is theirs to choose, and all of them are looked at until they stand."""
    clients = [world.offline(pid=300 + number) for number in range(10)]
    spans = []

    def slow(_pid, _stood):
        began_ns = world.clock.now_ns()
        world.clock._now_ns += 5_000_000
        spans.append((began_ns, world.clock.now_ns()))
        return False

    world.processes.is_stopped = slow
    for client in clients:
        world.ladder.end(client, "it broke a promise")
    world.run(3000)

    assert len(spans) > 20
    assert all(after - before >= 3 * 5_000_000 for (_, before), (after, _) in pairwise(spans))
    assert not world.ladder.to_end()


def test_no_process_that_waits_for_a_younger_one_is_looked_at_meanwhile(world, monkeypatch):
    """A pod or a drain may have hundreds of them, and each look is a file of /proc."""
    jobs = [world.offline(pid=1000 + number) for number in range(64)]
    world.run(100)
    world.processes.slow_to_stop.add(1063)
    looks, is_gone = [], world.processes.is_gone
    monkeypatch.setattr(world.processes, "is_gone", lambda process: (looks.append(process.pid), is_gone(process))[1])

    for job in jobs:
        world.ladder.end(job, "it broke a promise")
    world.run(400)

    assert looks.count(1063) > 100
    assert max(looks.count(1000 + number) for number in range(63)) < 10
    world.run(1000)
    assert [pid for pid, name in world.signals if name == "SIGKILL"] == list(range(1063, 999, -1))


def test_no_process_takes_a_younger_one_along_when_one_between_them_is_let_go(world):
    """A drain that is taken back, of processes of which some are to die with their pod as well."""
    processes = [world.books.clients[world.offline(pid=300 + number)].process for number in range(3)]
    world.run(100)
    world.processes.slow_to_stop.add(302)
    for process, is_final in zip(processes, (True, False, True), strict=True):
        world.ladder._endings.begin(process, "it must leave", is_final=is_final)
    world.run(10)

    world.ladder._endings.take_back(())
    world.run(100)
    assert not [pid for pid, name in world.signals if name == "SIGKILL"]
    world.processes.slow_to_stop.clear()
    world.run(100)

    assert [pid for pid, name in world.signals if name == "SIGKILL"] == [302, 300]


def test_none_that_is_begun_anew_in_the_same_turn_waits_for_itself(world):
    process = world.books.clients[world.offline(pid=300)].process
    world.run(100)
    for _ in range(2):
        world.ladder._endings.take_back(())
        world.ladder._endings.begin(process, "it must leave")
    world.run(100)

    assert world.signals[-1] == (300, "SIGKILL")


def test_none_waits_for_a_younger_one_that_was_let_go_before_it_was_stopped(world, monkeypatch):
    processes = [world.books.clients[world.offline(pid=300 + number)].process for number in range(3)]
    world.run(100)
    writes = []  # that the disk has not taken yet
    monkeypatch.setattr(world.gating.listener, "about_to_freeze", writes.append)
    for process, is_final in zip(processes, (True, False, False), strict=True):
        world.ladder._endings.begin(process, "it must leave", is_final=is_final)
    world.run(10)

    world.ladder._endings.take_back(())
    for write in writes:
        write()
    world.run(100)

    assert [name for pid, name in world.signals if pid == 300] == ["SIGSTOP", "SIGKILL"]
    assert "SIGSTOP" not in [name for pid, name in world.signals if pid != 300]
