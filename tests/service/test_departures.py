"""What becomes of the stopped channels of a client that leaves: its process ends, or lives on."""

from __future__ import annotations

from collections import Counter

import pytest
from fake_gate import FakeGate
from node_world import World

from valved.clients.departures import EXIT, LOOKS
from valved.clients.turns import PASS_NS
from valved.gate.ending import KILL
from valved.model.ids import Role
from valved.state import saved as state

JOB, H_CLIENT = 300, 0xC1D0AAAA


def come(world):
    """The job's shim, with its one channel."""
    client = world.hello(JOB).client
    world.add_channel(client, h_client=H_CLIENT)
    return client


def is_off(world):
    return any(h_client == H_CLIENT for h_client, _ in world.gate.off)


@pytest.fixture
def stopped(world):
    """A job, stopped beside a busy service, and a second one for which the service lets go."""
    world.node.launch(world.processes.add(JOB), 10 * JOB, Role.OFFLINE, "batch")
    offline = come(world)
    world.offline(name="other")
    online = world.online()
    world.gate.launch(online)
    assert is_off(world)
    return world, offline, online


def rest(world, online):
    """The service falls quiet and lets go."""
    world.work(online, ms=5)
    world.run(5000)
    assert not world.gate.is_gated(0)


def test_a_living_process_is_never_let_run_for_leaving_while_its_gpu_is_held(stopped):
    world, offline, _ = stopped

    world.register.leave(offline, "link closed")

    assert is_off(world)
    assert not world.gate.foreign_enabled


def test_who_left_and_lives_stays_stopped_after_the_gpu_opened(stopped):
    """It is in no plan: once on, nobody would stop it for the next request."""
    world, offline, online = stopped
    world.register.leave(offline, "link closed")

    rest(world, online)
    world.handover.settle(patience_over=True)

    assert is_off(world)


def test_who_comes_back_beside_a_busy_service_stays_stopped_until_that_lets_go(stopped):
    world, offline, online = stopped
    world.register.leave(offline, "link closed")

    come(world)

    assert is_off(world)
    assert not len(world.register.channels.leftovers)
    rest(world, online)
    assert not is_off(world)


def test_who_comes_back_to_a_free_gpu_runs(stopped):
    world, offline, online = stopped
    world.register.leave(offline, "link closed")
    rest(world, online)

    come(world)

    assert not is_off(world)


def test_who_left_and_ends_without_coming_back_is_enabled_at_once(stopped):
    """Else the driver waits for its channels in the teardown, under locks that online work needs."""
    world, offline, _ = stopped
    readers = len(world.reactor.readers)
    world.register.leave(offline, "link closed")

    world.processes.end(JOB)

    assert not is_off(world)
    assert len(world.reactor.readers) == readers - 2  # its own and its claim's


def test_whose_link_ends_as_the_process_does_is_enabled_at_once(stopped):
    world, offline, _ = stopped
    world.processes.ending.add(JOB)

    world.register.leave(offline, "link closed")

    assert not is_off(world)


def test_who_left_and_is_killed_never_waits_for_its_channels_in_the_teardown(stopped):
    """Its pidfd says nothing before that is over."""
    world, offline, _ = stopped
    world.register.leave(offline, "link closed")
    world.run(1000)
    assert is_off(world)

    world.processes.ending.add(JOB)
    world.run(150)

    assert not is_off(world)
    assert not len(world.register.channels.leftovers)


def test_a_process_of_a_predecessor_that_is_killed_before_it_is_back_never_waits_for_its_channels(stopped):
    world, _, _ = stopped
    world.handover.save()
    saved, _ = state.load(world.folder / "state.json")
    second = World(world.folder, gate=FakeGate(world.clock, 2), clock=world.clock, processes=world.processes)
    second.handover.restore(saved, 2.0)
    second.run(1000)
    assert not second.gate.foreign_enabled

    world.processes.ending.add(JOB)
    second.run(150)

    assert [channel.h_client for channel in second.gate.foreign_enabled] == [H_CLIENT]


def test_nobody_looks_for_ends_while_nothing_is_left_off(stopped):
    world, offline, _ = stopped
    looks = []
    is_ending = world.processes.is_ending
    world.processes.is_ending = lambda *process: looks.append(process) or is_ending(*process)
    world.run(2000)
    assert not looks

    world.register.leave(offline, "link closed")
    world.run(1050)
    assert len(looks) == 11, "one as it left, and ten since"
    world.processes.end(JOB)
    world.run(150)
    looks.clear()
    world.run(2000)

    assert not looks


def test_many_who_left_are_never_looked_at_in_one_turn(stopped):
    world, _, _ = stopped
    most = 3 * LOOKS
    for pid in range(1000, 1000 + most):
        world.register.leave(world.offline(pid=pid, claimed=False), "link closed")
    turns = []
    is_ending = world.processes.is_ending
    world.processes.is_ending = lambda *process: turns.append(world.clock.now_ns()) or is_ending(*process)

    world.run(450)

    assert max(Counter(turns).values()) == LOOKS
    assert len(turns) >= most, "and all of them have their turn"


def test_looks_that_take_long_never_take_more_than_a_pass_of_the_loop(stopped, monkeypatch):
    """Of threads that a tracer keeps each process may have as many as are looked at."""
    world, _, _ = stopped
    for pid in range(1000, 1000 + LOOKS):
        world.register.leave(world.offline(pid=pid, claimed=False), "link closed")
    turns, took = [0], [0]
    now_ns, is_ending = world.clock.now_ns, world.processes.is_ending

    def look(*process):
        turns[-1] += 1
        took[0] += PASS_NS
        return is_ending(*process)

    def turn():
        turns.append(0)
        took[0] = 0
        looks()

    departures, looks = world.register.departures, world.register.departures._look
    monkeypatch.setattr(departures._ticker, "_call", turn)
    monkeypatch.setattr(world.clock, "now_ns", lambda: now_ns() + took[0])
    world.processes.is_ending = look

    world.run(1000)

    assert max(turns) == 2
    monkeypatch.undo()


def test_an_end_that_fails_never_keeps_the_channels_of_another_off(stopped, monkeypatch):
    world, offline, _ = stopped
    world.register.leave(world.offline(pid=1000, claimed=False), "link closed")
    world.register.leave(offline, "link closed")
    assert is_off(world)

    def fail(*_):
        raise OSError(24, "too many open files")

    with monkeypatch.context() as broken:
        broken.setattr(world.gate, "enable_foreign", fail)
        world.processes.ending.add(1000)
        with pytest.raises(OSError, match="too many"):
            world.run(1000)
    world.processes.ending.add(JOB)
    world.run(1000)

    assert not is_off(world)


@pytest.mark.parametrize("reason", [EXIT, KILL])
def test_no_process_is_taken_out_of_the_books_for_its_end_with_channels_off(stopped, reason):
    world, offline, _ = stopped

    world.register.leave(offline, reason)

    assert not is_off(world)


def test_no_process_is_killed_with_channels_off_for_having_left_before(stopped):
    world, offline, _ = stopped
    world.register.leave(offline, "link closed")
    again = world.hello(JOB)

    world.ladder.end(again.client, "test")
    world.run(1)

    assert not is_off(world)


def test_leaving_many_times_leaves_nothing_behind(stopped):
    world, offline, _ = stopped
    world.register.leave(offline, "link closed")
    world.register.leave(come(world), "link closed")
    readers = len(world.reactor.readers)

    for _ in range(100):
        world.register.leave(come(world), "link closed")

    assert len(world.reactor.readers) == readers
    assert len(world.register.channels.leftovers) == 1


def test_a_successor_hears_of_who_left(stopped):
    world, offline, _ = stopped
    world.register.leave(offline, "link closed")

    saved = world.handover.snapshot()

    assert [(client.pid, len(client.channels)) for client in saved.clients if client.pid == JOB] == [(JOB, 1)]


def test_no_process_that_is_claimed_anew_as_online_keeps_its_channels_off(stopped):
    """Its shim comes back as an online one: no valved would ever enable them."""
    world, _, _ = stopped

    world.node.launch(JOB, 10 * JOB, Role.ONLINE, "chat-2")

    assert not is_off(world)
    assert not len(world.register.channels.leftovers)


def test_no_online_process_keeps_channels_off_that_a_client_with_its_file_left(stopped):
    """The other had inherited the file, was stopped with it, and closed its link before the owner showed its own."""
    world, offline, online = stopped
    world.register.leave(offline, "link closed")
    assert is_off(world)

    world.show_rm_client(online, h_client=H_CLIENT)

    assert not is_off(world)
    assert not len(world.register.channels.leftovers)


def test_what_the_driver_refused_to_enable_for_an_online_process_is_never_forgotten(stopped):
    """Regression: nothing asked again, and the file that alone may reach the channel was let go."""
    world, offline, online = stopped
    world.register.leave(offline, "link closed")
    world.gate.refuses = True
    world.show_rm_client(online, h_client=H_CLIENT)
    assert is_off(world)
    assert len(world.register.channels.leftovers)

    world.gate.refuses = False
    rest(world, online)
    world.handover.settle(patience_over=True)  # every two seconds

    assert not is_off(world)
    assert not len(world.register.channels.leftovers)


def test_no_owner_is_looked_at_more_than_once_a_round_however_many_channels_it_left(stopped):
    """Each look reads files of /proc while the loop waits."""
    world, offline, _ = stopped
    for number in range(20):
        world.add_channel(offline, h_client=H_CLIENT, h_channel=0xCAF01000 + number)
    world.register.leave(offline, "link closed")
    looks = []
    is_ending = world.processes.is_ending
    world.processes.is_ending = lambda *who: looks.append(who) or is_ending(*who)

    world.handover.settle(patience_over=True)

    assert len(looks) == 1
