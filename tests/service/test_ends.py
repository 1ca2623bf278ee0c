"""When a process counts as ended: its memory and its claim are its own until then."""

from __future__ import annotations

import errno

from memory_world import kv_world

from valved.config import Config, MemoryTable
from valved.model.ids import Remap, Role

CONFIG = Config(memory=MemoryTable(handle_mib=2, remap=Remap.COOPERATIVE))
world = kv_world(CONFIG)


def without_descriptors(world, monkeypatch):
    def refuse(pid):
        raise OSError(errno.EMFILE, "too many")

    monkeypatch.setattr(world.processes, "open_pidfd", refuse)


def with_memory(world):
    shim = world.engine("online", columns=8).shim
    world.settle()
    return shim, shim.entry.process


def test_memory_never_changes_owner_while_a_thread_of_its_process_runs(world, monkeypatch):
    """Its first thread is a zombie, and /proc says of the whole what it says of that one."""
    shim, process = with_memory(world)
    start_time = world.processes.start_time
    monkeypatch.setattr(world.processes, "start_time", lambda pid: None if pid == process.pid else start_time(pid))

    shim.hang_up()

    assert world.kv.books.pool.has_orphans(process)
    world.run(5000)
    assert world.kv.books.pool.has_orphans(process)
    shim.die()
    assert not world.kv.books.pool.has_orphans(process)


def test_memory_never_changes_owner_for_want_of_a_descriptor(world, monkeypatch):
    shim, process = with_memory(world)
    with monkeypatch.context() as scarce:
        without_descriptors(world, scarce)
        shim.hang_up()
        world.run(3000)
        assert world.kv.books.pool.has_orphans(process)

    world.run(1000)
    shim.die()
    assert not world.kv.books.pool.has_orphans(process)


def test_no_claim_is_given_up_or_kept_for_ever_for_want_of_a_descriptor(world, monkeypatch):
    pid = world.processes.add(500)
    with monkeypatch.context() as scarce:
        without_descriptors(world, scarce)
        assert world.node.launch(pid, 5000, Role.ONLINE, "chat")
        world.run(3000)
        assert world.books.claims

    world.run(1000)
    world.processes.end(pid)
    assert not world.books.claims


def test_a_number_that_means_another_process_by_now_never_keeps_a_claim(world, monkeypatch):
    pid = world.processes.add(500)
    with monkeypatch.context() as scarce:
        without_descriptors(world, scarce)
        world.node.launch(pid, 5000, Role.ONLINE, "chat")
    world.processes.add(pid, start=6000)

    world.run(1000)

    assert not world.books.claims


def test_a_process_that_cannot_be_watched_is_refused_and_never_stays_in_a_book(world, monkeypatch):
    pid = world.processes.add(500)
    without_descriptors(world, monkeypatch)

    assert world.hello(pid).client is None
    assert not world.books.clients
    assert not world.gate.clients


def claimed(world):
    client = world.online()
    return client, world.books.clients[client].process


def test_no_claim_ends_with_the_last_link_while_a_thread_of_its_process_runs(world, monkeypatch):
    client, process = claimed(world)
    start_time = world.processes.start_time
    monkeypatch.setattr(world.processes, "start_time", lambda pid: None if pid == process.pid else start_time(pid))

    world.register.leave(client, "link closed")

    assert process in world.books.claims
    world.processes.end(process.pid)
    assert not world.books.claims


def test_no_claim_ends_with_the_last_link_for_want_of_a_descriptor(world, monkeypatch):
    """Not even a file of /proc is to be had."""
    client, process = claimed(world)
    with monkeypatch.context() as scarce:
        without_descriptors(world, scarce)
        scarce.setattr(world.processes, "start_time", world.processes.open_pidfd)
        world.register.leave(client, "link closed")
        world.run(3000)
        assert process in world.books.claims

    world.run(1000)
    world.processes.end(process.pid)
    assert not world.books.claims


def hide(monkeypatch, processes):
    def hidden(pid):
        raise PermissionError(1, "not permitted")

    monkeypatch.setattr(processes, "start_time", hidden)


def test_no_claim_outlives_a_process_that_hides_itself_after_it_was_watched(world, monkeypatch):
    client, process = claimed(world)
    hide(monkeypatch, world.processes)
    world.register.leave(client, "link closed")
    assert process in world.books.claims

    world.processes.end(process.pid)

    assert not world.books.claims


def test_no_claim_is_kept_for_ever_because_its_number_is_a_hidden_process_s_by_now(world, monkeypatch):
    pid = world.processes.add(500)
    with monkeypatch.context() as scarce:
        without_descriptors(world, scarce)
        assert world.node.launch(pid, 5000, Role.ONLINE, "chat")
    hide(monkeypatch, world.processes)
    world.run(3000)
    assert world.books.claims, "it may be the one that was claimed"
    monkeypatch.setattr(world.processes, "is_gone", lambda process: process.pid == pid)

    world.run(1000)

    assert not world.books.claims


def test_a_claim_whose_process_ended_first_ends_with_the_last_link(world):
    root = world.processes.add(500)
    assert world.node.launch(root, 5000, Role.ONLINE, "chat")
    client = world.hello(world.processes.add(501, parent=root), Role.ONLINE).client
    world.processes.end(root)
    assert world.books.claims

    world.register.leave(client, "link closed")

    assert not world.books.claims
