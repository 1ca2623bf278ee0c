"""Each way of taking memory asks its own of engines: early reclaims and short steps where it waits for a step."""

from __future__ import annotations

import pytest
from memory_scenes import in_a_step
from memory_world import KvWorld

from valved.config import Config, MemoryTable
from valved.kv.rungs import step_tokens
from valved.model.events import EventKind
from valved.model.ids import Remap


def make(tmp_path, remap, **more):
    memory = MemoryTable(handle_mib=2, remap=remap, **{"headroom_min_mib": 2, "headroom_max_mib": 8, **more})
    world = KvWorld(tmp_path, config=Config(memory=memory), handles=20)
    offline = in_a_step(world)
    return world, offline


def asked(world, offline):
    return int(world.kv.books.engines[offline.shim.entry.service].table._head["step_tokens"][0])


@pytest.mark.parametrize(
    ("remap", "is_asked"), [(Remap.COOPERATIVE, True), (Remap.HELPER, False), (Remap.SPARSE, False)]
)
def test_an_engine_makes_short_steps_only_where_a_request_could_wait_for_one(tmp_path, remap, is_asked):
    world, offline = make(tmp_path, remap)
    alone = asked(world, offline)
    online = world.engine("online", columns=16)
    world.run(500)
    beside = asked(world, offline)
    online.shim.die()
    world.run(1000)

    assert alone == 0
    assert beside == (step_tokens(world.config.memory) if is_asked else 0)
    assert asked(world, offline) == 0
    world.check()


def test_a_step_is_as_short_as_the_setting_says():
    assert step_tokens(MemoryTable(offline_step_ms=30.0, token_ns=21_000)) == 1429
    assert step_tokens(MemoryTable(offline_step_ms=0.0)) == 0


def first_reclaim(world, online, most):
    """How many blocks the online engine used when the first reclaim came."""
    for used in range(4, most):
        before = len(world.events(EventKind.RECLAIMED))
        online.want(used=used)
        world.run(200)
        if len(world.events(EventKind.RECLAIMED)) > before:
            return used
    return most


def test_memory_that_comes_between_two_steps_is_taken_before_anybody_waits_for_it(tmp_path):
    """A reserve of four columns: full when it is used up, or three quarters of the way."""
    found = {}
    for remap in (Remap.COOPERATIVE, Remap.HELPER):
        more = {"headroom_min_mib": 8, "headroom_max_mib": 8, "cooperative_ratio": 0.7}
        folder = tmp_path / remap.value
        folder.mkdir()
        world, _ = make(folder, remap, **more)
        online = world.engine("online", columns=16)
        world.run(1000)
        found[remap] = first_reclaim(world, online, 24)
        world.check()

    assert found[Remap.COOPERATIVE] < found[Remap.HELPER]
