"""Channels are pairs of numbers that anybody can say. What must not follow from saying them."""

from __future__ import annotations

import errno

from valved.abi.link import LinkType
from valved.clients.possession import OFFERS, PATIENCE_NS
from valved.clients.schedules import HELD_PER_CLIENT
from valved.machine.ports import ArmResult
from valved.model.ids import GpuIndex, Reach, Role

THEIRS = 0xC1D00777
REFUSED = errno.EOPNOTSUPP


def answers(world, client, seq):
    return [status for number, status in world.connections[client].acks() if number == seq]


def added(world):
    return [call for call in world.gate.calls if call[0] == "add_channel"]


def tell(world, client, number, **fields):
    named = {"h_client": THEIRS, "h_channel": 0xCAF00000 + number, **fields}
    return world.add_channel(client, proven=False, **named)


def test_a_process_without_the_file_never_stops_anybodys_channels(world):
    online = world.online()
    hostile = world.offline(gpus=())
    before = added(world)

    seqs = [
        world.add_channel(hostile, h_client=0xC1D00000 + online, h_channel=0xCAF00000 + guess, proven=False)
        for guess in range(16)
    ]
    world.run(PATIENCE_NS / 1e6 + 1)

    assert [answers(world, hostile, seq) for seq in seqs] == [[REFUSED]] * 16
    assert added(world) == before  # the driver was not even asked
    assert not world.gate.clients[hostile].channels
    assert not world.books.clients[hostile].channels
    assert world.books.offline_on[GpuIndex(0)] == 0


def test_a_file_that_owns_another_rm_client_proves_nothing(world):
    world.prover.foreign.add(THEIRS)
    hostile = world.offline(gpus=())

    seq = world.add_channel(hostile, h_client=THEIRS)
    world.run(PATIENCE_NS / 1e6 + 1)

    assert answers(world, hostile, seq) == [REFUSED]
    assert not world.books.clients[hostile].channels


def test_the_answer_never_tells_channels_that_exist_from_those_that_do_not(world):
    """Same words, at the same time, whether the pair is an online process's, nobody's, or a card's that is not ours."""
    online = world.online()
    hostile = world.offline(gpus=())
    guesses = [(0xC1D00000 + online, 0xCAF00001), (0xC1D00000 + online, 0xDEAD), (0xDEAD, 0xDEAD)]
    seqs = [world.add_channel(hostile, h_client=c, h_channel=h, proven=False) for c, h in guesses]
    at = {}
    world.connections[hostile].on_send = lambda kind, body, seq, fds: at.setdefault(seq, world.clock.now_ns())

    world.run(PATIENCE_NS / 1e6 + 1)

    assert len({(at[seq], *answers(world, hostile, seq)) for seq in seqs}) == 1


def test_a_channel_that_the_driver_does_not_know_is_in_no_book(world):
    offline = world.offline(gpus=())
    world.gate.next_arm = ArmResult(status=0x21, reach=Reach.NONE, want_fd=False, gated=False, is_known=False)

    seq = world.add_channel(offline)

    assert answers(world, offline, seq) == [REFUSED]
    assert not world.books.clients[offline].channels
    assert world.books.offline_on[GpuIndex(0)] == 0


def test_a_channel_of_an_online_process_is_never_armed_for_another(world):
    """Both have shown the file: the number was used twice, or the file was inherited."""
    online = world.online()
    other = world.offline(gpus=())

    seq = world.add_channel(other, h_client=0xC1D00000 + online)

    assert answers(world, other, seq) == [REFUSED]
    assert not world.gate.clients[other].channels


def test_what_an_online_process_shows_later_leaves_the_offline_one_that_claimed_it(world):
    world.online()
    hostile = world.offline(gpus=())
    world.add_channel(hostile, h_client=THEIRS, h_channel=5)
    victim = world.online(gpus=(), name="second")
    assert (THEIRS, 5) in world.gate.off

    world.add_channel(victim, h_client=THEIRS, h_channel=5)

    assert (THEIRS, 5) not in world.gate.off
    assert (THEIRS, 5) not in world.books.clients[hostile].channels
    assert (THEIRS, 5) in world.books.clients[victim].channels
    assert (THEIRS, 5) in {(ref.h_client, ref.h_channel) for ref in world.gate.foreign_enabled}

    again = world.add_channel(hostile, h_client=THEIRS, h_channel=5, proven=False)
    world.run(PATIENCE_NS / 1e6 + 1)

    assert answers(world, hostile, again) == [REFUSED]


def test_a_channel_is_never_armed_for_two_offline_processes(world):
    first, second = world.offline(gpus=()), world.offline(gpus=())
    world.add_channel(first, h_client=THEIRS, h_channel=5)

    seq = world.add_channel(second, h_client=THEIRS, h_channel=5)

    assert answers(world, second, seq) == [REFUSED]

    world.register.leave(first, "exit")
    heir = world.add_channel(second, h_client=THEIRS, h_channel=5)

    assert answers(world, second, heir) == [0]


def test_no_process_is_refused_its_own_channels_because_the_end_of_its_old_link_is_read_later(world):
    online = world.online()
    old = world.offline(gpus=())
    world.add_channel(old, h_client=THEIRS, h_channel=5)
    world.gate.launch(online)
    assert (THEIRS, 5) in world.gate.off
    new = world.hello(world.books.clients[old].process.pid).client

    seq = world.add_channel(new, h_client=THEIRS, h_channel=5)

    assert answers(world, new, seq) == [0]
    world.register.leave(old, "its link ended")
    assert (THEIRS, 5) in world.gate.off
    world.work(online, ms=5)
    world.run(5000)
    assert (THEIRS, 5) not in world.gate.off
    assert not len(world.register.channels.leftovers)
    world.books.check_integrity()


def test_an_online_process_never_widens_its_domain_by_words(world):
    online = world.online(gpus=(0,))

    world.add_channel(online, gpu=1, h_client=THEIRS, proven=False)
    world.run(60_000)

    assert world.books.services[world.service_of(online)].gpus == {0}

    world.show_rm_client(online, gpu=1, h_client=THEIRS)

    assert world.books.services[world.service_of(online)].gpus == {0, 1}


def test_a_proof_for_one_card_is_none_for_another(world):
    online = world.online(gpus=(0,))
    world.show_rm_client(online, gpu=0, h_client=THEIRS)

    world.add_channel(online, gpu=1, h_client=THEIRS, proven=False)

    assert world.books.services[world.service_of(online)].gpus == {0}


def test_a_shim_of_0_1_is_asked_for_its_file(world):
    """It sends RM_CLIENT without one, and again with it when an ACK says so."""
    offline = world.offline(gpus=())
    first = world.show_rm_client(offline, h_client=THEIRS, fds=[])
    seq = world.add_channel(offline, h_client=THEIRS, proven=False)

    asked = [body.want_fd for kind, body, number, _ in world.connections[offline].sent if number == first]
    assert asked == [True]
    assert answers(world, offline, seq) == []  # held: it may not run before it is known

    world.show_rm_client(offline, h_client=THEIRS)

    assert answers(world, offline, seq) == [0]
    assert (THEIRS, 0xCAF00001) in world.gate.clients[offline].channels


def test_a_proof_that_comes_late_still_counts(world):
    """The driver was busy for longer than an ACK can wait: the job is gated all the same."""
    world.prover.is_slow = True
    offline = world.offline(gpus=())
    seq = world.add_channel(offline, h_client=THEIRS)
    world.run(PATIENCE_NS / 1e6 + 1)
    assert answers(world, offline, seq) == [REFUSED]

    world.prover.answer()

    assert (THEIRS, 0xCAF00001) in world.books.clients[offline].channels


def test_a_proof_never_lets_in_more_than_one_waiting_channel_in_a_turn(world):
    """Each of them costs calls of the driver, and its sender decides how many wait."""
    hostile = world.offline(gpus=())
    before = len(added(world))
    seqs = [tell(world, hostile, number) for number in range(64)]

    world.show_rm_client(hostile, GpuIndex(0), THEIRS)

    assert len(added(world)) == before + 1
    world.run(1)
    assert len(added(world)) == before + 64
    assert [answers(world, hostile, seq) for seq in seqs] == [[0]] * 64


def test_files_that_are_shown_again_and_again_never_let_in_more_channels_in_a_turn(world):
    hostile = world.offline(gpus=())
    before = len(added(world))
    for number in range(16):
        tell(world, hostile, number)
        tell(world, hostile, number, h_client=THEIRS + 1)

    for _ in range(8):
        world.show_rm_client(hostile, GpuIndex(0), THEIRS)
        world.show_rm_client(hostile, GpuIndex(0), THEIRS + 1)

    assert len(added(world)) == before + 1
    world.run(1)
    assert len(added(world)) == before + 32


def test_a_channel_whose_proof_is_taken_back_never_waits_for_ever(world):
    """Its turn had not come when an online process showed the same RM client."""
    client = world.offline(gpus=())
    seqs = [tell(world, client, number) for number in range(3)]
    world.show_rm_client(client, GpuIndex(0), THEIRS)
    victim = world.online(gpus=(), name="second")
    world.show_rm_client(victim, GpuIndex(0), THEIRS)

    world.run(PATIENCE_NS / 1e6 + 1)

    assert [answers(world, client, seq) for seq in seqs] == [[0], [REFUSED], [REFUSED]]
    assert not world.register.channels.possession.is_judging(client)


def test_a_channel_whose_proof_finds_no_room_never_waits_for_ever(world):
    client = world.offline(gpus=())
    for number in range(world.config.quota.channels_per_client):
        world.show_rm_client(client, GpuIndex(0), THEIRS + 1 + number)
    seq = tell(world, client, 0)
    world.show_rm_client(client, GpuIndex(0), THEIRS)

    world.run(PATIENCE_NS / 1e6 + 1)

    assert answers(world, client, seq) == [REFUSED]


def test_a_channel_that_is_told_again_while_it_waits_is_never_taken_for_what_it_was(world):
    """Its proof has come, and others are let in before it."""
    client = world.offline(gpus=())
    tell(world, client, 0)
    first = tell(world, client, 1, cid=5)
    world.show_rm_client(client, GpuIndex(0), THEIRS)

    second = tell(world, client, 1, cid=6)
    world.run(1)

    assert (answers(world, client, first), answers(world, client, second)) == ([REFUSED], [0])
    assert world.books.clients[client].channels[THEIRS, 0xCAF00001].cid == 6


def test_a_client_that_leaves_while_it_is_looked_at_leaves_nothing(world):
    world.prover.is_slow = True
    offline = world.offline(gpus=())
    for _ in range(OFFERS + 8):
        world.show_rm_client(offline, h_client=THEIRS)
    world.add_channel(offline, h_client=THEIRS, proven=False)

    world.register.leave(offline, "exit")
    world.prover.answer()
    world.run(PATIENCE_NS / 1e6 + 1)

    assert not world.register.channels.possession.owners(THEIRS)


def test_waiting_channels_count_against_the_quota(world):
    hostile = world.offline(gpus=())
    most = world.config.quota.channels_per_client
    for number in range(most):
        world.add_channel(hostile, h_channel=number, proven=False)

    seq = world.add_channel(hostile, h_channel=most, proven=False)

    assert answers(world, hostile, seq) == [errno.ENOSPC]


def test_a_channel_that_is_freed_before_its_proof_is_never_armed(world):
    offline = world.offline(gpus=())
    world.add_channel(offline, h_client=THEIRS, h_channel=5, proven=False)
    world.register.handle(offline, world.packet(LinkType.CHANNEL_DEL, world.channel(h_client=THEIRS, h_channel=5)), [])

    world.show_rm_client(offline, h_client=THEIRS)

    assert not world.books.clients[offline].channels
    assert world.books.clients[offline].role is Role.OFFLINE


# What a client may make valved keep, or do


def test_held_schedule_calls_never_pile_up(world):
    """50,000 of one client took 40 MB, and letting them go took the loop seconds."""
    world.online()
    hostile = world.offline()
    h_client = 0xC1D00000 + hostile

    seqs = [world.schedule(hostile, h_client) for _ in range(HELD_PER_CLIENT + 10)]

    assert [answers(world, hostile, seq) for seq in seqs[:10]] == [[errno.EAGAIN]] * 10
    assert [answers(world, hostile, seq) for seq in seqs[10:]] == [[]] * HELD_PER_CLIENT
    world.register.leave(hostile, "exit")
    assert not world.register.channels.schedules._held


def test_saying_that_it_scheduled_never_asks_the_driver_about_each_channel(world):
    world.online()
    hostile = world.offline(gpus=())
    for number in range(32):
        world.add_channel(hostile, h_client=THEIRS, h_channel=number)
    before = len(world.gate.calls)

    world.schedule(hostile, THEIRS, LinkType.SCHEDULE_DONE)

    assert world.gate.calls[before:] == [("stop_again", THEIRS)]


def test_a_channel_that_is_told_again_for_another_gpu_is_never_counted_on_the_first(world):
    job = world.offline(gpus=())
    world.add_channel(job, gpu=0, h_channel=0xA1, compute=False)
    world.add_channel(job, gpu=0, h_channel=0xA2)
    world.add_channel(job, gpu=1, h_channel=0xA3)
    assert [world.gating.gpus[GpuIndex(gpu)].channels for gpu in (0, 1)] == [1, 1]

    world.add_channel(job, gpu=1, h_channel=0xA2)

    assert [world.gating.gpus[GpuIndex(gpu)].channels for gpu in (0, 1)] == [0, 2]
