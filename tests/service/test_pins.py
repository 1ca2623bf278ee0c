"""Memory that has left its process is never taken, and never costs more than one look to remember."""

from __future__ import annotations

from memory_world import KvWorld

from valved.abi.kv_link import KvSpan
from valved.abi.link import LinkType
from valved.config import MIB, Config, MemoryTable
from valved.kv import columns
from valved.model.ids import Remap, Role

MEMORY = MemoryTable(handle_mib=2, remap=Remap.HELPER, headroom_min_mib=2, headroom_max_mib=8)
LAYERS = 8


def make(tmp_path):
    world = KvWorld(tmp_path, config=Config(memory=MEMORY), handles=17 * LAYERS)
    offline = world.engine("offline", columns=16, layers=LAYERS)
    world.run(500)
    [engine] = world.kv.books.engines_with(Role.OFFLINE)
    return world, offline, engine


def pin(shim, number, first, count=1):
    shim.say(LinkType.KV_PIN, KvSpan(range=number, offset=first * 2 * MIB, bytes=count * 2 * MIB))


def test_a_pin_never_builds_the_columns_anew(tmp_path, monkeypatch):
    world, offline, engine = make(tmp_path)
    monkeypatch.setattr(columns, "columns_of", None)

    for number in range(LAYERS):
        pin(offline.shim, number, 3)
        pin(offline.shim, number, 5, 2)

    assert [column for column, is_free in enumerate(engine.takeable()) if not is_free] == [0, 3, 5, 6]
    world.check()


def test_pins_of_one_place_never_add_up(tmp_path):
    _, offline, engine = make(tmp_path)

    for _ in range(1000):
        pin(offline.shim, 0, 3)

    [book, *_] = engine.ranks[offline.shim.client].books
    assert book.pinned.sum() == 1


def test_what_was_pinned_before_its_engine_attached_is_never_taken(tmp_path):
    world = KvWorld(tmp_path, config=Config(memory=MEMORY), handles=20)
    real = world.shim

    def pinned(*arguments, **named):
        shim = real(*arguments, **named)
        reserve = shim.reserve

        def reserve_and_pin(*inner, **more):
            seq = reserve(*inner, **more)
            pin(shim, 0, 2)
            return seq

        shim.reserve = reserve_and_pin
        return shim

    world.shim = pinned
    offline = world.engine("offline", columns=8)
    world.shim = real
    world.run(500)
    world.engine("online", columns=14)
    world.run(2000)

    assert set(range(8, 12)) <= set(offline.backed().tolist())
    world.check()
