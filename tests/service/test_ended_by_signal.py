"""A process that a signal ends: valved enables its channels, and lets it. One that stays is killed soon."""

from __future__ import annotations

import pytest
from node_world import World

from valved.abi.link import Ack
from valved.model.events import EventKind
from valved.model.ids import Mode


@pytest.fixture
def world(tmp_path):
    return World(tmp_path)


def stopped_job(world):
    """Of a node whose service is busy. Returns its client, and its pid."""
    client, online = world.offline(), world.online()
    world.run(100)
    world.gate.launch(online)
    world.run(100)
    assert world.gate.off
    return client, world.books.clients[client].process.pid


def until_it_is_let_go(world):
    while (world.signals or [(0, "")])[-1][1] != "SIGCONT":
        world.run(1)


def test_a_job_that_a_signal_ends_never_dies_with_its_channels_off(world):
    client, pid = stopped_job(world)
    order = []

    def signal(process, number):
        order.append((process.pid, number.name, bool(world.gate.off), client in world.books.clients))
        if number.name == "SIGCONT":
            world.processes.end(pid)
        return True

    world._signal = signal
    connection = world.connections[client]

    seq = world.say_ending(client)
    world.run(60_000)

    assert (seq, 0) in connection.acks(), "else it switches its channels itself"
    assert order == [(pid, "SIGSTOP", True, True), (pid, "SIGCONT", False, False)]
    assert not world.events(EventKind.KILLED)
    assert not world.ladder.standing()
    world.check()


@pytest.mark.parametrize("looks", [1, 3])
def test_a_job_never_dies_by_a_signal_before_a_driver_that_hangs_has_its_channels_on(world, looks):
    """Else the driver waits for them, longer than it hung. `looks`: at its threads, which may be many."""
    client, pid = stopped_job(world)
    world.processes.many[pid] = looks
    world.gate.hangs = True

    world.say_ending(client)
    world.run(5000)

    assert world.signals == [(pid, "SIGSTOP")]
    assert not world.gate.off
    world.gate.hangs = False
    until_it_is_let_go(world)
    world.processes.end(pid)
    world.run(1000)
    assert world.signals == [(pid, "SIGSTOP"), (pid, "SIGCONT")]
    assert not world.ladder.standing()


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_driver_that_never_answers_keeps_no_job_standing_for_good(world, is_killed):
    client, pid = stopped_job(world)
    world.gate.hangs = True

    world.say_ending(client)
    world.run(1000)
    if is_killed:
        world.processes.end(pid)
    world.run(60_000)

    assert "SIGCONT" in [name for _, name in world.signals]
    assert not world.ladder.standing()


def test_a_job_that_waits_for_a_driver_never_stands_for_good_where_valved_ends(world):
    """It waits for a second at most, and no successor is certain."""
    client, pid = stopped_job(world)
    process = world.books.clients[client].process
    world.gate.hangs = True

    world.say_ending(client)
    world.run(5000)

    assert world.signals == [(pid, "SIGSTOP")]
    assert world.thawer.standing == {process}
    world.run(60_000)
    assert not world.thawer.standing


def test_a_job_that_somebody_lets_go_while_the_driver_hangs_never_runs_on_beside_a_service(world):
    client, pid = stopped_job(world)
    world.gate.hangs = True
    world.say_ending(client)
    world.run(1000)
    assert world.signals == [(pid, "SIGSTOP")]

    world.processes.slow_to_stop.add(pid)  # it runs again
    world.run(200)

    assert world.signals[-1] == (pid, "SIGKILL")


def test_jobs_that_wait_for_a_driver_never_have_more_than_a_part_of_the_loop(world):
    """How long a look takes grows with them, and with what others left off."""
    first, _ = stopped_job(world)
    clients = [first, *[world.offline() for _ in range(9)]]
    spans = []

    def slow():
        world.clock._now_ns += 5_000_000
        spans.append(5_000_000)
        return world.gate.left_behind if world.gate.hangs else set()

    world.gate.hangs = True
    for client in clients:
        world.say_ending(client)
    world.run(1000)
    world.gate.behind = slow
    world.run(1000)

    assert len(spans) > 10
    assert sum(spans) < 1_000_000_000 // 3
    world.gate.hangs = False
    world.run(60_000)
    assert not world.ladder.standing()


def test_a_look_that_was_long_once_keeps_no_job_standing_for_longer(world):
    """valved itself may have been stopped in it."""
    first, pid = stopped_job(world)
    second = world.offline()

    def stopped():
        world.clock._now_ns += 60_000_000_000
        world.gate.behind = lambda: world.gate.left_behind
        return world.gate.left_behind

    world.gate.hangs = True
    world.gate.behind = stopped
    world.say_ending(first)
    world.run(1000)
    world.say_ending(second)
    world.run(11_000)

    assert [name for one, name in world.signals if one != pid] == ["SIGSTOP", "SIGCONT", "SIGSTOP", "SIGKILL"]


def test_a_job_never_stands_with_its_channels_on_for_another_that_the_driver_hangs_with(world):
    """What it has queued would run beside the service meanwhile."""
    other, (client, pid) = world.offline(gpus=(1,)), stopped_job(world)
    world.gate.behind = lambda: {other}

    world.say_ending(client)
    world.run(100)

    assert (pid, "SIGCONT") in world.signals


def test_a_job_that_is_slow_to_stand_never_runs_with_its_channels_on(world):
    client, pid = stopped_job(world)
    world.processes.slow_to_stop.add(pid)

    world.say_ending(client)
    world.run(100)

    assert world.signals == [(pid, "SIGSTOP")]
    assert world.gate.off


@pytest.mark.parametrize("comes_back", [False, True])
def test_a_job_that_only_says_that_it_ends_never_runs_on_beside_a_service(world, comes_back):
    client, pid = stopped_job(world)

    world.say_ending(client)
    until_it_is_let_go(world)
    if comes_back:
        again = world.hello(pid).client
        world.add_channel(again, h_client=0xC1D0AAAA)
        assert world.gate.off
    world.run(20)

    assert [name for _, name in world.signals] == ["SIGSTOP", "SIGCONT", "SIGSTOP", "SIGKILL"]
    assert not world.gate.off
    assert world.events(EventKind.KILLED)


def test_a_job_that_is_slow_to_stand_again_never_runs_on_for_longer(world):
    """It may have so many threads that valved does not look at all of them: what it has queued runs meanwhile."""
    client, pid = stopped_job(world)

    world.say_ending(client)
    until_it_is_let_go(world)
    world.processes.slow_to_stop.add(pid)
    world.run(20)

    assert [name for _, name in world.signals][-1] == "SIGKILL"
    world.check()


def test_a_job_is_never_let_go_twice(world):
    client, pid = stopped_job(world)
    for _ in range(3):
        world.say_ending(client)
    until_it_is_let_go(world)
    world.processes.end(pid)
    world.run(1000)

    assert [name for _, name in world.signals] == ["SIGSTOP", "SIGCONT"]


def test_a_job_that_valved_told_to_end_never_runs_again_for_it(world):
    """Nobody waits for the status of that signal, and a kernel of it would end beside a busy service."""
    client, _ = stopped_job(world)

    world.brake.set_mode(Mode.OBSERVE, "test")
    world.say_ending(client)
    world.run(100)

    assert [name for _, name in world.signals] == ["SIGTERM", "SIGSTOP", "SIGKILL"]


def answer(world, client):
    seq = world.say_ending(client)
    [body] = [body for _, body, its_seq, _ in world.connections[client].sent if its_seq == seq]
    return body


def test_a_job_whose_channels_are_on_is_stopped_for_nothing(world):
    client = world.offline()

    assert answer(world, client) == Ack()
    world.run(1000)

    assert not world.signals
    assert client in world.books.clients


def test_no_online_process_is_ever_stopped_for_what_it_says(world):
    world.offline()
    online = world.online()

    assert answer(world, online) == Ack()
    world.run(1000)

    assert not world.signals
