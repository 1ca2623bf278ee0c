"""What a drain waits for, as the status says it: each process with what it still takes, and until when."""

from __future__ import annotations

import pytest
from node_world import World

from valved.config import Config
from valved.errors import NotFound
from valved.model.events import EventKind


@pytest.fixture
def world(tmp_path):
    return World(tmp_path, config=Config(leave_grace_s=60.0))


def told(world):
    status = world.node.status()
    return [(one.pid, one.waits_for, one.until_ns and one.until_ns - status.monotonic_ns) for one in status.leavers]


def test_nobody_who_may_stay_is_named(world):
    world.offline(pid=300)

    assert not told(world)
    world.node.drain("me", stop=False)
    world.brake.resume()
    assert not told(world)


def test_whoever_must_leave_is_named_with_what_that_takes_and_never_with_a_bound_that_is_over(world):
    world.offline(pid=300)
    world.processes.slow_to_stop.add(300)
    world.node.drain("me", stop=False)
    world.run(1000)
    assert told(world) == [(300, "it was asked to end", 59_000_000_000)]

    world.run(59_300)
    assert told(world) == [(300, "it is being stopped, and is killed then", 0)]
    world.run(300)
    assert world.events(EventKind.KILLED)
    for _ in range(10):
        world.run(260)
        assert told(world) == [(300, "it was killed, and the kernel has not ended it yet", 0)]
    world.processes.end(300)
    world.run(300)
    assert not told(world)


def test_a_signal_that_cannot_be_sent_is_never_a_process_that_was_asked(world):
    world.offline(pid=300)
    world.is_scarce = True
    world.node.drain("me", stop=False)
    world.run(10)

    assert told(world) == [(300, "its signal needs a free descriptor of valved", 0)]


def test_a_service_that_has_ended_is_never_explained_as_one_that_never_was(world):
    client = world.online(pid=200, name="chat")
    service = world.service_of(client)
    world.run(1000)
    world.processes.end(200)
    world.run(12_000)

    answer = world.node.explain("service", service)

    assert answer.summary == f"online service {service} chat: ended 12 s ago"
    assert [event.kind.value for event in answer.decisions][-2:] == ["left", "ended"]
    with pytest.raises(NotFound):
        world.node.explain("service", service + 100)


def test_a_process_that_is_refused_again_and_again_never_fills_the_journal_with_services_that_never_were(world):
    world.processes.add(300)
    world.gate.create_error = OSError(24, "Too many open files")
    for _ in range(10):
        assert world.hello(300).client is None

    assert not world.events(EventKind.ENDED)
    assert not world.books.services
