"""A process that valved cannot take for want of descriptors may be online work: no offline work runs meanwhile."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import socket
from unittest import mock

import pytest
from link_peers import say
from node_world import FakeConnection
from scarce import left

from valved.abi.link import MAX_FDS, Ack, LinkType, RmClient
from valved.clients import admission
from valved.clients.deaf import DEAF_NS
from valved.model.ids import ProcessId, Role
from valved.rpc.front import _CallerListener
from valved.state.registry import DEAF_SERVICE


def are_held(world):
    return [DEAF_SERVICE in account.holders for account in world.gating.gpus.values()]


def test_offline_work_never_runs_beside_a_service_for_which_valved_had_no_descriptor(world):
    """Nobody hears its launches, and the guard may see as little."""
    world.gate.create_error = OSError(errno.EMFILE, "too many")
    for pid, role in ((200, Role.ONLINE), (201, Role.OFFLINE)):
        world.processes.add(pid)
        world.node.launch(pid, world.processes.start_time(pid), role, role.name)

    world.hello(201)
    assert not any(are_held(world))
    assert not world.node.status().lack
    world.hello(200)
    assert all(are_held(world))
    assert world.node.status().lack

    world.run(DEAF_NS / 2e6)
    world.hello(200)
    world.run(DEAF_NS / 2e6 + 1)
    assert all(are_held(world)), "it asked again"
    world.gate.create_error = None
    world.run(DEAF_NS / 1e6)
    assert not any(are_held(world))
    assert not world.node.status().lack


@pytest.mark.parametrize("wanted", [Role.ONLINE, Role.HOOK])
def test_a_process_that_ends_as_it_is_welcomed_never_stops_the_offline_work_of_all(world, wanted):
    """Anybody can make such processes, as engines of his own offline job."""
    world.processes.add(200)
    role = Role.ONLINE if wanted is Role.ONLINE else Role.OFFLINE
    world.node.launch(200, world.processes.start_time(200), role, "short")
    world.processes.open_pidfd = lambda pid: -1

    assert world.hello(200, wanted).client is None
    assert not any(are_held(world))


@pytest.mark.parametrize("error", [errno.EACCES, errno.EMFILE])
def test_a_neighbour_whom_valved_may_not_see_never_stops_the_offline_work_of_all(world, monkeypatch, error):
    """With hidepid, by a connection each half a minute. The guard finds those that use a GPU."""

    def hidden(pid, most=64):
        raise OSError(error, "no")

    monkeypatch.setattr(world.processes, "ancestors", hidden)

    assert world.hello(200).client is None
    assert all(are_held(world)) is (error == errno.EMFILE)


def test_a_job_to_which_valved_came_too_late_never_stands_for_good(world, monkeypatch):
    """The guard froze it, so it cannot ask again. It is in no book, as nobody heard its answer."""
    world.processes.add(200)
    process = ProcessId(pid=200, start_time=world.processes.start_time(200))
    world.node.launch(200, process.start_time, Role.OFFLINE, "batch")
    monkeypatch.setattr(FakeConnection, "has_left", lambda _: True)

    connection = world.hello(200)

    assert (connection.client, connection.sent) == (None, [])
    assert world.register.admission.waits_for_room(process)
    monkeypatch.undo()
    assert world.hello(200).client is not None
    assert not world.register.admission.waits_for_room(process)


def test_a_job_that_waits_for_room_is_never_forgotten_for_the_many_of_another_account(world, monkeypatch):
    """The guard would take it for one that never asks again, and let it stand."""
    monkeypatch.setattr(admission, "REFUSALS_KEPT", 8)
    monkeypatch.setattr(FakeConnection, "has_left", lambda _: True)
    kept = world.register.admission.waits_for_room

    for pid, uid in [(200, 1000), *((300 + number, 2000) for number in range(20))]:
        world.processes.add(pid)
        world.hello(pid, uid=uid)

    waiting = [
        pid
        for pid in range(200, 320)
        if pid in world.processes.table and kept(ProcessId(pid=pid, start_time=world.processes.start_time(pid)))
    ]
    assert waiting == [200, *range(313, 320)]


def test_offline_work_never_runs_while_nobody_who_connects_can_be_heard(server):
    server.rest()
    with left(1):
        sock = server.connect()
        server.until(lambda: all(are_held(server.world)))
    sock.close()


def test_offline_work_never_runs_while_the_kernel_has_no_room_to_wait_for_who_connects(server, monkeypatch):
    """And that is no fault of theirs, so they are not told of as hostile."""
    ears = mock.Mock()
    ears.register.side_effect = OSError(errno.ENOSPC, "a test")
    with monkeypatch.context() as patch:
        patch.setattr(server.link.arrivals, "_ears", ears)
        with server.connect() as sock:
            said = sock.recv(4096)

    assert said == b""
    assert all(are_held(server.world))
    assert not server.world.gating.counters.malformed


@pytest.mark.parametrize("role", [Role.ONLINE, Role.OFFLINE])
def test_offline_work_never_runs_beside_a_service_that_comes_and_goes_as_its_words_are_lost(server, role):
    """Between two of its links nobody hears its launches."""
    world, start_time = server.world, server.world.processes.start_time(os.getpid())
    if role is Role.ONLINE:
        server.call(lambda: world.node.launch(os.getpid(), start_time, role, "chat"))
    sock, welcome, _ = server.welcome()
    body = RmClient(gpu_uuid=bytes(16), device_instance=0, h_client=1, h_device=2, h_subdevice=3, has_fd=True)
    server.rest()
    with left(0):
        say(sock, LinkType.RM_CLIENT, body, [sock.fileno()])
        server.until(lambda: welcome.client not in world.books.clients)

    assert all(are_held(world)) is (role is Role.ONLINE)
    sock.close()


@pytest.mark.parametrize("role", [Role.ONLINE, Role.OFFLINE])
def test_offline_work_never_runs_beside_a_service_that_is_dropped_as_valved_cannot_copy_what_it_sends_it(server, role):
    world, start_time = server.world, server.world.processes.start_time(os.getpid())
    if role is Role.ONLINE:
        server.call(lambda: world.node.launch(os.getpid(), start_time, role, "chat"))
    sock, welcome, fds = server.welcome()

    def is_dropped():
        """For want of a descriptor, once its socket is full: it reads nothing."""
        for _ in range(200):
            world.register.send(welcome.client, LinkType.ACK, Ack(), 1, (fds[0],))
        return welcome.client not in world.books.clients

    server.rest()
    with left(0):
        server.until(is_dropped)

    assert all(are_held(world)) is (role is Role.ONLINE)
    sock.close()


def test_a_service_that_sends_more_descriptors_than_any_packet_has_never_holds_the_gpus_of_others(server):
    world, start_time = server.world, server.world.processes.start_time(os.getpid())
    server.call(lambda: world.node.launch(os.getpid(), start_time, Role.ONLINE, "chat"))
    sock, welcome, _ = server.welcome()
    body = RmClient(gpu_uuid=bytes(16), device_instance=0, h_client=1, h_device=2, h_subdevice=3, has_fd=True)
    server.rest()
    with left(2 * MAX_FDS):
        say(sock, LinkType.RM_CLIENT, body, [sock.fileno()] * (3 * MAX_FDS))
        server.until(lambda: welcome.client not in world.books.clients)

    assert not any(are_held(world))
    sock.close()


def test_an_offline_process_never_gets_the_descriptors_that_are_kept_for_online_work(server, monkeypatch):
    """Also where the limit was lowered since valved began."""
    seen = []
    hello = server.world.register.hello
    server.world.register.hello = lambda *given, is_scarce: seen.append(is_scarce) or hello(*given)
    sock, _, _ = server.welcome()
    monkeypatch.setattr(resource, "getrlimit", lambda _: (8, 8))
    other, _, _ = server.welcome()

    assert seen == [False, True]
    sock.close()
    other.close()


def test_a_valved_without_descriptors_never_fills_its_log(tmp_path):
    """asyncio tries a hundred times in one pass, logs each, and begins anew by as many timers (Python 3.11)."""

    async def story():
        loop, told = asyncio.get_running_loop(), []
        loop.set_exception_handler(lambda loop, context: told.append(context))
        listener = _CallerListener()
        listener.bind(str(tmp_path / "socket"))
        server = await loop.create_unix_server(asyncio.Protocol, sock=listener)
        with left(1), socket.socket(socket.AF_UNIX) as caller:
            caller.connect(str(tmp_path / "socket"))
            while not told:
                await asyncio.sleep(0)
        server.close()
        return told

    assert len(asyncio.run(story())) == 1
