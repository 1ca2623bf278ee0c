"""The rest of a service that Valve delayed too much: no end of valved cuts it short."""

from __future__ import annotations

import json

import pytest
from node_world import SECOND, World, successor

from valved.model.events import EventKind
from valved.state import saved as state

ONLINE, OFFLINE = 200, 300


def tripped(world):
    """Requests of 1 ms, each delayed by 0.4 ms. Returns when the rest ends."""
    world.offline(pid=OFFLINE)
    online = world.online(pid=ONLINE)
    hook = world.hook(online)
    return trip(world, online, hook)


def trip(world, online, hook, count=0, most=500):
    """`count`: requests that the engine has told of before; `most`: how many more to try."""
    before, most = len(world.events(EventKind.BREAKER)), count + most
    while len(world.events(EventKind.BREAKER)) == before:
        count += 1
        assert count < most
        world.gate.hint(hook, count, count - 1)
        world.work(online, ms=1)
        world.gate.hint(hook, count, count)
        world.run(9)
    world.run(100)  # the state is written
    return world.state(online).breaker.open_until_ns


def come_back(world):
    online = world.online(pid=ONLINE)
    world.offline(pid=OFFLINE)
    return online


@pytest.mark.parametrize("was_killed", [True, False])
def test_a_service_never_loses_its_rest_because_valved_ended(tmp_path, was_killed):
    """Regression: after kill -9 and `valve up` offline work was stopped beside it again at once, ten times a second."""
    first = World(tmp_path)
    until_ns = tripped(first)

    second = successor(first, was_killed=was_killed)
    online = come_back(second)
    second.run(60_000)

    assert second.state(online).breaker.open_until_ns == until_ns
    assert second.gate.off
    (service,) = [one for one in second.reporter.status().services if one.name == "chat"]
    assert "no offline work runs for another" in service.state
    second.clock.advance(until_ns - second.clock.now_ns())
    second.beat_all()
    second.run(5000)
    assert not second.gate.off, "nor has it a longer one"


def test_a_rest_after_a_crash_is_never_the_first_one_again(tmp_path):
    first = World(tmp_path)
    until_ns = tripped(first)
    second = successor(first, was_killed=True)
    online = come_back(second)
    second.clock.advance(until_ns - second.clock.now_ns())
    second.beat_all()
    second.run(5000)
    hook = second.hook(online)
    second.gate.hint(hook, 1000, 1000)

    trip(second, online, hook, 1000)

    assert [event.detail["rest_s"] for event in second.events(EventKind.BREAKER)] == [1200]


@pytest.mark.parametrize(
    ("said", "most_s"), [([1 << 62, 1 << 62], 3600), ([-(1 << 62), -1], 0), ([0, 0], 0), (None, 0), ("absent", 0)]
)
def test_a_rest_is_never_longer_than_one_can_be_whatever_the_file_says(tmp_path, said, most_s):
    first = World(tmp_path)
    tripped(first)
    first.handover.save()
    path = tmp_path / "state.json"
    whole = json.loads(path.read_bytes())
    for service in whole["services"]:
        service.pop("breaker") if said == "absent" else service.update(breaker=said)
    path.write_bytes(json.dumps({**whole, "services": [{**one, "of later": 1} for one in whole["services"]]}).encode())

    second = successor(first, was_killed=True)
    (online,) = second.gating.online.values()

    assert state.load(path)[1] == ""
    assert online.breaker.open_until_ns <= second.clock.now_ns() + most_s * SECOND
    assert 0 <= online.breaker.trips <= 16


@pytest.mark.parametrize("hours", [0, 2])
def test_no_long_hold_hides_what_valve_costs_a_service_after_it(tmp_path, hours):
    """Regression: for a minute the hold of a rest, or one of hours, counted as time in which nothing was delayed."""
    world = World(tmp_path)
    world.offline(pid=OFFLINE)
    online = world.online(pid=ONLINE)
    hook = world.hook(online)
    if hours:
        world.gate.hint(hook, 1, 0)
        world.work(online, ms=1)
        world.clock.advance(hours * 3600 * SECOND)
        world.beat_all()
        world.gate.hint(hook, 1, 1)
        world.run(100)
    else:
        until_ns = trip(world, online, hook)
        world.clock.advance(until_ns - world.clock.now_ns())
        world.beat_all()
        world.run(5000)
    begun_ns = world.clock.now_ns()

    trip(world, online, hook, 1000, most=10_000)

    assert world.clock.now_ns() - begun_ns < (world.gating.settings.breaker.window_ns if hours else SECOND)
