"""A service without hints whose requests are dense: what its cooldown learns from them (policy/apart.py)."""

from __future__ import annotations

import random

import pytest
from node_world import MS


def serve(world, requests, hinted=False):
    """Steps of 8 ms with host gaps of 1 to 9, ten a request; requests apart by an exponential law. Its client."""
    online, chance = world.online(), random.Random(1)
    if hinted:
        world.gate.hint(online, 1, 0)
    for _ in range(requests):
        for _ in range(10):
            world.work(online, ms=8)
            world.run(1 + chance.random() * 8)
            world.gate.beat(online)
        world.run(chance.expovariate(1 / 250))
        world.gate.beat(online)
    return online


def test_dense_requests_never_keep_the_cooldown_at_the_ceiling_where_arrivals_are_learned(world):
    """Gaps between them reach into every length, so the largest gap says nothing."""
    world.gating.settings.by_arrivals = True
    world.offline()

    online = serve(world, 1200)

    cooldown = world.state(online).cooldown
    assert (cooldown.reason, cooldown.cooldown_ns < 60 * MS) == ("arrivals", True), cooldown
    assert "(arrivals)" in str(world.node.explain("service", world.service_of(online)))


@pytest.mark.parametrize(("by_arrivals", "hinted"), [(False, False), (True, True)])
def test_a_gap_that_was_seen_never_loses_its_cover_unasked_or_beside_a_hint(world, by_arrivals, hinted):
    world.gating.settings.by_arrivals = by_arrivals
    world.offline()

    online = serve(world, 300, hinted)

    assert world.state(online).cooldown.reason != "arrivals"
    assert world.state(online).gaps.bound_ns is None
