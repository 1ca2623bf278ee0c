"""Containers share users, and a node has so many places: who may take how many, and who is never without."""

from __future__ import annotations

import errno

import pytest
from node_world import World

from valved.abi.link import LinkType, Note, NoteMessage, Refusal
from valved.clients import admission
from valved.clients.complaints import AT_ONCE, TELL_NS
from valved.config import Config, QuotaTable
from valved.model.events import EventKind
from valved.model.ids import GpuIndex, Role

QUOTA = QuotaTable(clients_per_process=4, clients_per_uid=6, root_clients=1000, kept_for_online=10)


@pytest.fixture
def world(tmp_path, monkeypatch):
    monkeypatch.setattr(admission, "CLIENT_SLOTS", 40)
    world = World(tmp_path, config=Config(quota=QUOTA))
    yield world
    world.check()


def claimed_online(world, pid):
    world.processes.add(pid, cgroup=f"/chat{pid}")  # of its own, as a scope or a container has
    world.node.launch(pid, world.processes.start_time(pid), Role.ONLINE, f"chat{pid}")
    return pid


def test_a_claimed_online_process_is_never_refused_for_what_its_user_has(world):
    for pid in range(200, 206):
        world.hello(world.processes.add(pid))
    assert world.refusal(world.hello(world.processes.add(206))) is Refusal.QUOTA

    assert world.hello(claimed_online(world, 300), Role.ONLINE).client is not None


def test_one_process_never_takes_the_places_of_its_user(world):
    world.processes.add(200)
    for _ in range(4):
        assert world.hello(200).client is not None

    assert world.refusal(world.hello(200)) is Refusal.QUOTA
    assert world.hello(world.processes.add(201)).client is not None


def test_containers_of_one_user_never_share_a_quota(world):
    for pid in range(200, 206):
        world.hello(world.processes.add(pid, cgroup="/pods/a"), uid=1000)

    assert world.refusal(world.hello(world.processes.add(206, cgroup="/pods/a"), uid=1000)) is Refusal.QUOTA
    assert world.hello(world.processes.add(207, cgroup="/pods/b"), uid=1000).client is not None


def test_root_in_containers_never_takes_the_places_of_online_services(world):
    """4,096 links of one root process were every place there is."""
    pid, refused = 1000, 0
    while not refused:
        pid += 1
        refused = world.hello(world.processes.add(pid, cgroup=f"/pods/{pid}"), uid=0).client is None

    assert len(world.books.clients) == 30
    for number in range(10):
        online = claimed_online(world, 5000 + number)
        connection = world.hello(online, Role.ONLINE, uid=0)
        assert connection.client is not None
        assert world.hello(online, Role.HOOK, uid=0).client is not None


def test_the_last_descriptors_are_never_given_to_offline_work(world):
    world.processes.add(200)
    online = claimed_online(world, 300)
    connection = FakePeer(world, 200)

    assert connection.hello(Role.OFFLINE, is_scarce=True) is None
    assert world.refusal(connection.connection) is Refusal.QUOTA
    assert FakePeer(world, online).hello(Role.ONLINE, is_scarce=True) is not None


class FakePeer:
    """A HELLO as the link server passes it on when descriptors are short."""

    def __init__(self, world, pid):
        self.world, self.pid, self.connection = world, pid, None

    def hello(self, wanted, is_scarce):
        real = self.world.register.hello
        self.world.register.hello = lambda connection, packet: real(connection, packet, is_scarce=is_scarce)
        try:
            self.connection = self.world.hello(self.pid, wanted)
        finally:
            self.world.register.hello = real
        return self.connection.client


def test_being_out_of_descriptors_is_never_answered_with_silence(world):
    world.processes.add(200)

    def cannot_look(pid):
        raise OSError(errno.EMFILE, "too many open files")

    world.processes.start_time, found = cannot_look, world.processes.start_time

    connection = world.hello(200)
    world.processes.start_time = found

    assert connection.client is None
    assert world.refusal(connection) is Refusal.QUOTA


def test_joins_and_leaves_never_use_a_place_up(world):
    """After 1,024 offline engines with a hook no online service could be claimed."""
    for number in range(300):
        pid = world.processes.add(10_000 + number)
        shim = world.offline(pid=pid, gpus=(), claimed=number % 2 == 0)
        hook = world.hook(shim)
        world.register.leave(hook, "link closed")
        world.register.leave(shim, "exit")
        world.processes.end(pid)

    assert not world.books.services
    assert not [service for service in world.gate.services if service >= 2]


def test_a_process_under_mps_is_never_stopped(world):
    """Its channels are the server's: who is stopped with them may be online."""
    world.online()
    offline = world.offline()
    assert world.gate.off

    note = NoteMessage(code=int(Note.MPS), h_client=0, h_channel=0, text="an MPS object was allocated")
    world.register.handle(offline, world.packet(LinkType.NOTE, note), [])

    assert not world.gate.off
    assert ("give_up", offline) in world.gate.calls
    assert world.books.offline_on[GpuIndex(0)] == 1  # seen, and known not to be reached


def test_a_stranger_never_keeps_the_thread_that_gives_it_an_order(world):
    """What rings it takes as long as it likes. A process that could end valved needs no such means."""
    for pid in (200, 201):
        world.processes.add(pid)
    world.processes.near.add(201)

    stranger, near = world.hello(200).client, world.hello(201).client

    assert [world.gate.clients[one].at_once for one in (stranger, near)] == [False, True]


def test_who_is_refused_in_a_loop_never_pushes_a_pause_out_of_the_audit_file(world):
    """It holds 32 MiB, which one program of four processes filled within minutes: each is told of once."""
    for pid in range(1000, 1000 + 10 * AT_ONCE):
        world.processes.add(pid)
        assert world.refusal(world.hello(pid, abi=(9, 9))) is Refusal.VERSION
    told = world.events(EventKind.REFUSED)
    assert len(told) == AT_ONCE
    assert world.gating.counters.refusals["version"] == 10 * AT_ONCE

    world.processes.add(500)
    world.hello(500, abi=(9, 9), uid=2000)
    assert world.events(EventKind.REFUSED)[-1].detail["pid"] == 500, "another account is told of"
    world.run(TELL_NS // 1_000_000)
    world.hello(pid, abi=(9, 9))
    assert world.events(EventKind.REFUSED)[-1].detail["pid"] == pid, "who asks again is told of when it may be"


def test_a_process_that_is_refused_is_never_unknown_because_others_of_its_account_are_too(world):
    """As after an upgrade: the journal is told of twenty, and the others ask again after 5 s at the soonest."""
    for pid in range(1000, 1001 + AT_ONCE):
        world.processes.add(pid)
        world.hello(pid, abi=(9, 9))

    assert "refused: this valved speaks link ABI" in world.node.explain("pid", pid).summary
