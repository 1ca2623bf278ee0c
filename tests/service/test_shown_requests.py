"""What a status says of open requests is of its moment, and costs the gate nothing that it learns from."""

from __future__ import annotations

import pytest
from node_world import MS


def test_a_service_whose_requests_have_ended_is_never_shown_with_open_ones(world):
    """The gate looks at a service of short holds every 5 s, and at one that holds nothing not at all."""
    world.offline()
    online = world.online()
    hook = world.hook(online)
    world.run(100)
    for request in range(1, 4):
        world.gate.hint(hook, request, request - 1)
        world.work(online, ms=200)
        assert shown(world, online).open_requests == 1

        world.gate.hint(hook, request, request)
        assert shown(world, online).open_requests == 0

        world.run(50)
        assert not shown(world, online).busy
        assert shown(world, online).open_requests == 0


def test_to_show_open_requests_never_takes_a_gap_from_the_cooldown(world):
    world.offline()
    online = world.online()
    world.work(online, ms=5)
    world.run(15)
    world.work(online, ms=5)
    shown(world, online)
    world.run(20)

    assert world.state(online).cooldown.cooldown_ns == pytest.approx(30 * MS, rel=0.01)


def shown(world, client):
    return next(one for one in world.node.status().services if one.id == world.service_of(client))
