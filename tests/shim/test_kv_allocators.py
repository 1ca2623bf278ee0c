"""Memory that an engine's allocator makes past cuMemAlloc is never silently taken for Valve's."""

from __future__ import annotations

import pytest
from fake_daemon import OFFLINE, ONLINE
from kv_pool import ELASTIC, MIB

H = 2 * MIB
WORDS = "valve: the KV cache is ordinary memory and is not shared: cuMemAlloc did not make it"


@pytest.mark.parametrize("role", [OFFLINE, ONLINE])
@pytest.mark.parametrize("how", ["async", "mapped"])
def test_memory_of_another_allocator_works_and_is_said_to_be_ordinary(kv_world, role, how):
    """backend:cudaMallocAsync, and expandable_segments:True, in a bracket."""
    world = kv_world(role)
    pool = world.begin()
    engine, _ = world.engine()

    address = engine.other_alloc(how, 8 * H, ELASTIC)
    assert engine.tag(address, 8 * H, 7) == 0

    assert engine.wrong_pages(address, 8 * H, 7) == 0
    assert engine.ranges() == 0
    assert pool.born.empty()
    assert engine.errors.read_text().count(WORDS) == 1
    assert "cudaMallocAsync" in engine.errors.read_text()


def test_a_cache_by_the_usual_allocator_is_valves_and_nothing_is_said(kv_world):
    world = kv_world(OFFLINE)
    pool = world.begin()
    engine, _ = world.engine()

    address = engine.alloc(8 * H, ELASTIC)
    assert engine.tag(address, 8 * H, 7) == 0

    assert engine.wrong_pages(address, 8 * H, 7) == 0
    assert (engine.ranges(), pool.born.qsize()) == (1, 1)
    assert WORDS not in engine.errors.read_text()


def test_a_bracket_around_both_is_valves_as_far_as_it_goes(kv_world):
    """The first allocation is the cache; a workspace from a stream's pool beside it is nobody's business."""
    world = kv_world(OFFLINE)
    world.begin()
    engine, _ = world.engine()
    engine.alloc(8 * H, ELASTIC)

    other = engine.other_alloc("async", 8 * H, ELASTIC)
    assert engine.tag(other, 8 * H, 9) == 0

    assert engine.ranges() == 1
    assert engine.wrong_pages(other, 8 * H, 9) == 0
