"""What the choice of victims costs the loop ahead of need."""

from __future__ import annotations

import numpy as np
import pytest
from memory_world import kv_world

from valved.abi import kv_files
from valved.abi.kv_files import KvBook
from valved.config import Config, MemoryTable
from valved.kv import engines
from valved.model.events import EventKind
from valved.model.ids import Remap, Role

FEW = 16  # cells

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

    def slow(*arguments):
        made.append(world.clock.now_ns())
        world.clock._now_ns += 10_000_000
        return real(*arguments)

    monkeypatch.setattr(engine, "make_index", slow)
    for _ in range(100):
        offline.hold(0, [4, 5])
        world.run(100)

    assert len(made) >= 10
    assert min(np.diff(made)) >= 180_000_000  # twenty times as long


@pytest.fixture
def scene(world, monkeypatch):
    """An offline engine with an index, an online one beside it, and threads that do nothing from here on; how many
    cells of a book the loop may read, each time that it reads one."""
    monkeypatch.setattr(kv_files, "LOOP_CELLS", FEW)
    monkeypatch.setattr(engines, "LOOP_CELLS", FEW)
    offline = world.engine("offline", columns=16)
    world.run(500)
    online = world.engine("online", columns=16)
    offline.hold(0, [4])
    world.run(1000)
    [engine] = world.kv.books.engines_with(Role.OFFLINE)
    assert engine.index is not None
    world.worker.later = True
    real, read = KvBook.requests, []

    def requests(book, *most):
        read.append(most)
        return real(book, *most)

    monkeypatch.setattr(KvBook, "requests", requests)
    return engine, offline, online, read


def served(world, online):
    online.want(used=4, wanted=32)
    world.run(3000)
    return len(online.backed()) >= 32 and world.events(EventKind.RECLAIMED)


def test_a_reclaim_before_the_first_index_never_reads_more_than_a_service_can_wait_for(world, scene):
    """It was read whole on the loop: more than a second of it, for the largest book."""
    engine, offline, online, read = scene
    engine.index = engine.queue = None
    offline.hold(0, list(range(4, 4 + 2 * FEW)))

    assert served(world, online)
    assert set(read) == {(FEW,)}


@pytest.mark.parametrize(("cells", "reads"), [(FEW, {(FEW,)}), (FEW + 1, set())])
def test_a_book_that_has_grown_since_its_index_is_never_read_on_the_loop(world, scene, cells, reads):
    """That the last index was quick says nothing of the next: the engine may have filled its book since."""
    _, offline, online, read = scene
    offline.hold(0, list(range(4, 4 + cells)))
    world.run(2000)

    assert served(world, online)
    assert set(read) == reads
