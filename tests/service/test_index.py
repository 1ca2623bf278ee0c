"""What the choice of victims costs the loop ahead of need."""

from __future__ import annotations

import numpy as np
from memory_world import kv_world

from valved.config import Config, MemoryTable
from valved.model.ids import Remap, Role

MEMORY = MemoryTable(handle_mib=2, pool_mib=40, remap=Remap.HELPER, headroom_min_mib=8, headroom_max_mib=8)
world = kv_world(Config(memory=MEMORY))


def test_no_index_is_made_while_no_reclaim_is_near(world):
    """It is work on the loop, and its size is the offline engine's to choose."""
    offline = world.engine("offline", columns=4)
    world.run(500)
    online = world.engine("online", columns=4)  # twelve of twenty handles are free
    world.run(500)
    [engine] = world.kv.books.engines_with(Role.OFFLINE)
    offline.hold(0, [4, 5])
    online.want(used=4)
    world.run(500)

    assert engine.index is None


def test_an_index_that_takes_long_is_never_more_than_a_share_of_the_loop(world, monkeypatch):
    offline = world.engine("offline", columns=16)
    world.run(500)
    world.engine("online", columns=16)
    world.run(500)
    [engine] = world.kv.books.engines_with(Role.OFFLINE)
    made = []

    real = engine.make_index

    def slow(settings):
        made.append(world.clock.now_ns())
        world.clock._now_ns += 10_000_000
        return real(settings)

    monkeypatch.setattr(engine, "make_index", slow)
    for _ in range(100):
        offline.hold(0, [4, 5])
        world.run(100)

    assert len(made) >= 10
    assert min(np.diff(made)) >= 180_000_000  # twenty times as long
