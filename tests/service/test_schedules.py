"""A shim that had stopped its own channels asks for all of them at once, with no h_client, before it ends that."""

from __future__ import annotations

import errno

import pytest

from valved.abi.link import LinkType
from valved.clients import schedules
from valved.clients.schedules import HANDED, HELD, HELD_PER_CLIENT
from valved.machine.stamps import StampKind
from valved.model.ids import GpuIndex, Role

H_CLIENT = 0xC1D00000  # of the first RM client of node_world's offline clients; their number is added


def acks(world, client, seq):
    return [status for number, status in world.connections[client].acks() if number == seq]


def test_no_process_is_let_run_while_one_of_its_gpus_is_gated(world):
    offline = world.offline(gpus=(0, 1))
    online = world.online(gpus=(1,))
    world.gate.launch(online)

    seq = world.schedule(offline, 0)

    assert acks(world, offline, seq) == []
    world.work(online, ms=5)
    world.run(5000)
    assert acks(world, offline, seq) == [0]


def test_no_process_ends_a_stop_of_its_own_while_a_held_gpu_is_open_for_a_moment(world):
    """It would run on after that moment, beside whoever holds the GPU, until it has said that it runs."""
    offline = world.offline()
    online = world.online()
    world.gate.launch(online)
    world.gating.let(frozenset({GpuIndex(0)}))
    assert not world.gate.is_gated(0)

    seq = world.schedule(offline, 0)

    assert acks(world, offline, seq) == []
    world.gating.let(frozenset())
    assert acks(world, offline, seq) == []
    world.work(online, ms=5)
    world.run(5000)
    assert acks(world, offline, seq) == [0]


def test_no_process_is_let_run_before_its_channels_are_armed(world):
    """The proof of their file is not there yet: a gate that fell now would miss them."""
    client = world.hello(world.processes.add(300), wanted=Role.OFFLINE).client
    world.add_channel(client, proven=False)

    seq = world.schedule(client, 0)

    assert acks(world, client, seq) == []
    world.show_rm_client(client)
    assert acks(world, client, seq) == [0]


def test_what_a_gate_met_between_answer_and_enable_is_stopped_again(world):
    offline = world.offline(gpus=(0, 1))
    seq = world.schedule(offline, 0)
    assert acks(world, offline, seq) == [0]
    online = world.online()
    world.gate.launch(online)

    world.schedule(offline, 0, LinkType.SCHEDULE_DONE)

    h_clients = {h_client for h_client, _ in world.books.clients[offline].channels}
    assert {call[1] for call in world.gate.calls if call[0] == "stop_again"} == h_clients


def test_a_process_whose_channels_valved_switches_is_never_told_to_enable_them_itself(world):
    """It may read that late: a gate that falls meanwhile would not be for it."""
    world.gate.switches_all = True
    offline, online = world.offline(), world.online()
    world.gate.launch(online)
    seq = world.schedule(offline, 0)
    world.work(online, ms=5)
    world.run(5000)
    assert acks(world, offline, seq) == [HANDED]
    assert ("run_again", offline) not in world.gate.calls

    world.schedule(offline, 0, LinkType.SCHEDULE_DONE)

    assert world.gate.calls[-1] == ("run_again", offline)


def test_no_process_has_all_channels_of_a_gpu_run_again_as_often_as_it_likes(world):
    """Each time costs calls of the driver."""
    world.gate.switches_all = True
    offline = world.offline()
    answers = [acks(world, offline, world.schedule(offline, 0)) for _ in range(20)]

    assert answers == [[HANDED], *[[0]] * 19]

    for _ in range(20):
        world.schedule(offline, 0, LinkType.SCHEDULE_DONE)

    assert [call for call in world.gate.calls if call[0] == "run_again"] == [("run_again", offline)]


def test_no_process_that_has_told_of_no_gpu_is_let_run_while_one_is_held(world):
    offline = world.hello(world.processes.add(300), wanted=Role.OFFLINE).client
    online = world.online()
    world.gate.launch(online)

    seq = world.schedule(offline, 0)

    assert acks(world, offline, seq) == []


def test_no_answer_is_given_twice_when_a_wake_is_noticed_while_answers_are_given(world):
    """To look whether a GPU is gated reads the stamps, and a wake among them lets go of the same calls."""
    offline = world.offline(gpus=(0, 1))
    online = world.online(gpus=(1,))
    world.gate.launch(online)
    seqs = [world.schedule(offline, H_CLIENT + offline) for _ in range(3)]
    world.work(online, ms=5)
    read = world.gate.drain_stamps
    world.gate.drain_stamps = lambda: []  # nobody reads them yet
    world.run(5000)
    assert not world.gate.is_gated(1)
    world.gate.drain_stamps = read

    world.register.channels.schedules.release()

    assert [acks(world, offline, seq) for seq in seqs] == [[0], [0], [0]]


def unread_edges(world, offline, online):
    """The service let go and holds again, and nobody has read of either."""
    world.gate.launch(online)
    seq = world.schedule(offline, 0)
    world.work(online, ms=5)
    read, world.gate.drain_stamps = world.gate.drain_stamps, lambda: []
    world.run(5000)
    world.gate.launch(online)
    assert world.gate.is_gated(0)
    world.gate.drain_stamps = read
    return seq


def test_no_process_is_let_run_by_a_wake_whose_next_hold_is_not_read_yet(world):
    offline, online = world.offline(), world.online()
    seq = unread_edges(world, offline, online)

    world.gating.drain()

    assert acks(world, offline, seq) == []


def test_no_process_is_let_run_by_a_move_that_ends_while_stamps_are_read(world, monkeypatch):
    offline, online = world.offline(), world.online()
    world.gating.set_moving(frozenset({GpuIndex(0)}))
    seq = unread_edges(world, offline, online)
    take = world.gating.edges.take

    def end_the_move(stamp):
        take(stamp)
        world.gating.set_moving(frozenset())

    monkeypatch.setattr(world.gating.edges, "take", end_the_move)
    world.gating.drain()

    assert acks(world, offline, seq) == []
    world.work(online, ms=5)
    world.run(5000)
    assert acks(world, offline, seq)[-1:] == [0]


def test_no_call_waits_on_because_a_stamp_before_that_of_the_wake_could_not_be_booked(world, monkeypatch):
    offline, online = world.offline(), world.online()
    world.gate.launch(online)
    world.run(5)
    seq, service = world.schedule(offline, 0), world.service_of(online)
    take = world.gating.edges.take

    def booked(stamp):
        assert stamp.kind is not StampKind.WAKE_REFUSED
        take(stamp)

    monkeypatch.setattr(world.gating.edges, "take", booked)
    world.gate.on_stamps = lambda: None
    world.gate.finish(online)
    world.gate._stamp(StampKind.WAKE_REFUSED, service, 0)
    world.gate.wake(service)
    with pytest.raises(AssertionError):
        world.gating.drain()

    assert acks(world, offline, seq) == [0]


def test_no_call_waits_on_where_a_service_left_its_gpu(world):
    """No stamp tells of that."""
    offline, online = world.offline(gpus=(1,)), world.online(gpus=(0, 1))
    world.gate.launch(online)
    world.run(5)
    seq = world.schedule(offline, 0)

    gone = world.channel(gpu=1, h_client=0xC1D00000 + online, h_channel=0xCAF00002)
    world.register.handle(online, world.packet(LinkType.CHANNEL_DEL, gone), [])

    assert acks(world, offline, seq) == [0]


def test_no_call_waits_on_for_a_wake_whose_stamp_was_lost(world):
    offline, online = world.offline(), world.online()
    world.gate.launch(online)
    world.run(5)
    seq = world.schedule(offline, 0)
    world.gate.on_stamps = lambda: None
    world.gate.finish(online)
    world.gate.wake(world.service_of(online))
    world.gate.stamps.clear()

    world.gating.resync()

    assert acks(world, offline, seq) == [0]


def test_held_calls_of_one_account_never_hold_up_the_loop_or_push_out_anothers(world):
    """16,384 of 256 links took 63 ms at each wake, and 229,376 of a container's root 0.9 s and 184 MB."""
    world.online()
    neighbour = world.offline(uid=2000)
    kept = world.schedule(neighbour, H_CLIENT + neighbour)
    links = [world.offline(uid=1000) for _ in range(HELD // HELD_PER_CLIENT + 2)]

    seqs = [(link, world.schedule(link, H_CLIENT + link)) for link in links for _ in range(HELD_PER_CLIENT)]

    held = world.register.channels.schedules._held
    assert sum(map(len, held.values())) == HELD
    assert kept in held[neighbour]
    assert all(seq in held[link] for link, seq in seqs[1 - HELD :]), "the oldest went"
    for link in (*links, neighbour):
        world.register.leave(link, "exit")
    assert not held
    assert not world.register.channels.schedules._of


def test_no_process_that_asks_for_all_its_channels_is_ever_left_without_an_answer(world, monkeypatch):
    """Its shim asks once, and enables nothing before it is answered: it was stopped for good where the calls of others
    of its account were too many."""
    monkeypatch.setattr(schedules, "HELD", 2)
    online = world.online()
    world.gate.launch(online)
    links = [world.offline() for _ in range(4)]

    asked = [(link, world.schedule(link, 0)) for link in links]
    for link in links:
        world.schedule(link, H_CLIENT + link)
    again = [(link, world.schedule(link, 0)) for link in links]

    assert sum(map(len, world.register.channels.schedules._held.values())) == len(links) + 2
    for link, seq in asked:
        assert acks(world, link, seq) == [errno.EAGAIN], "one of each is enough"
    world.work(online, ms=5)
    world.run(5000)
    for link, seq in again:
        assert acks(world, link, seq) == [0]
    assert not world.register.channels.schedules._of
