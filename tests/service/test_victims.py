"""Of several offline engines the cheapest memory goes first, and never that of the one which has most."""

from __future__ import annotations

from memory_world import kv_world

from valved.config import Config, MemoryTable
from valved.model.events import EventKind
from valved.model.ids import Remap

MEMORY = MemoryTable(handle_mib=2, pool_mib=64, remap=Remap.HELPER, headroom_min_mib=2, headroom_max_mib=8)
world = kv_world(Config(memory=MEMORY), handles=32)


def two(world):
    rich = world.engine("offline", columns=18, name="rich")
    world.run(1000)
    poor = world.engine("offline", columns=12, name="poor")
    world.run(1000)
    assert (len(rich.backed()), len(poor.backed())) == (72, 48)
    return rich, poor


def test_dear_columns_of_the_richest_never_go_before_free_ones_of_another(world):
    rich, poor = two(world)
    rich.hold(0, list(range(4, 72)))
    world.run(100)
    online = world.engine("online", columns=8)
    world.run(1000)

    assert online is not None
    assert set(range(4, 72)) <= set(rich.backed().tolist())
    [reclaim, *_] = world.events(EventKind.RECLAIMED)
    assert (reclaim.detail["from"], reclaim.detail["cost"]) == (str(poor.shim.entry.service), 0)


def test_cheap_and_dear_columns_of_both_are_taken_in_the_order_of_their_cost(world):
    rich, poor = two(world)
    rich.hold(0, list(range(8, 72)))  # one column is free
    poor.hold(0, list(range(12, 48)))  # two are
    world.run(100)
    online = world.engine("online", columns=5)  # two handles are free
    world.run(1000)

    assert online is not None
    [reclaim, *_] = world.events(EventKind.RECLAIMED)
    assert set(reclaim.detail["from"].split(",")) == {str(hook.shim.entry.service) for hook in (rich, poor)}
    assert reclaim.detail["cost"] == 0


def test_more_than_one_engine_has_is_taken_from_both(world):
    rich, poor = two(world)
    online = world.engine("online", columns=28)
    world.run(20)

    assert online is not None
    assert len(rich.backed()) >= 4
    assert len(poor.backed()) >= 4
