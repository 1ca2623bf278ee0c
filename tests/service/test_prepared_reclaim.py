"""A reclaim that begins while the loop sleeps: the same books as one that is planned when its need is read."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_walk import MOMENTS_US, beside
from memory_world import ORDERS, KvWorld
from msgspec.structs import replace

from valved.abi.kv_link import KvNeed, KvOp, KvSpan
from valved.abi.link import LinkType
from valved.config import MIB, Config, MemoryTable
from valved.model.events import EventKind
from valved.model.ids import GpuIndex, Remap, Role

MEMORY = MemoryTable(
    handle_mib=2, remap=Remap.HELPER, headroom_min_mib=2, headroom_max_mib=8, tau_s=1.0, tau_min_s=0.2, order_s=0.05
)
GPU = GpuIndex(0)
WAYS = [Remap.SPARSE, Remap.HELPER]


def node(folder, remap=Remap.HELPER, **more):
    return KvWorld(folder, config=Config(memory=replace(MEMORY, remap=remap)), handles=20, **more)


@pytest.fixture(params=WAYS, ids=lambda remap: remap.value)
def world(request, tmp_path):
    world = node(tmp_path, request.param)
    yield world
    world.check()


def begins(world, online, wanted=60):
    """The need is there, and a reclaim has begun; it is not read yet."""
    looks = world.kv.looks
    looks.rests()
    online.book["used_blocks"], online.book["wanted_blocks"] = 4, wanted
    looks.wakes()
    return world.kv.preparing.begun


def reads(online, wanted=60):
    online.say(LinkType.KV_NEED, KvNeed(wanted_blocks=wanted))


def engine_of(world, role):
    [engine] = world.kv.books.engines_with(role)
    return engine


def takings(hook):
    """Orders that take memory from it, up to now."""
    orders = [body for kind, body, _, _ in hook.shim.connection.sent if kind in ORDERS]
    return sum(body.op == KvOp.QUARANTINE for body in orders)


def test_a_need_that_was_foreseen_begins_before_it_is_read(world):
    offline, online = beside(world)
    epoch = offline.table["epoch"][0]
    ahead = begins(world, online)

    assert ahead is not None
    assert engine_of(world, Role.OFFLINE).going[ahead.victims.columns].all()
    world.clock.advance(450_000)  # the GPU stands
    assert offline.table["epoch"][0] > epoch
    reads(online)
    world.run(100)

    assert len(online.backed()) >= 60
    assert world.gate.prepared.began == 1
    event = world.events(EventKind.RECLAIMED)[-1]
    assert event.detail["freed"] == event.detail["missing"]


def test_one_reclaim_is_made_of_both_parts(world):
    _, online = beside(world)
    before = len(world.events(EventKind.RECLAIMED))
    begins(world, online)
    reads(online)
    world.run(100)

    [event] = world.events(EventKind.RECLAIMED)[before:]
    assert event.detail["freed"] > 8
    assert world.kv.turn.is_free


@pytest.mark.parametrize("wanted", [6, 20, 33, 48, 60, 64])
@pytest.mark.parametrize("remap", WAYS, ids=lambda remap: remap.value)
def test_the_books_end_the_same_whether_it_was_prepared_or_not(tmp_path, remap, wanted):
    found = []
    for is_prepared in (True, False):
        world = node(tmp_path / str(is_prepared), remap)
        offline, online = beside(world)
        if not is_prepared:
            world.kv.looks.rests = world.kv.looks.wakes = lambda: None
        online.want(used=4, wanted=wanted)
        world.run(300)
        world.check()
        found.append((offline.backed().tolist(), len(online.backed()), world.kv.books.pool.free_handles(GPU)))
        losses = [event.detail["freed"] for event in world.events(EventKind.RECLAIMED)]
        found[-1] += (losses, world.kv.turn.is_free, sorted(world.gate.off))

    assert found[0] == found[1]


def test_a_need_that_never_comes_is_carried_out_and_its_memory_is_lent_again(world):
    offline, online = beside(world)
    begins(world, online)
    online.book["wanted_blocks"] = 4  # its request was cancelled

    world.run(5000)
    for _ in range(3):
        offline.shim.step()
        world.run(1000)

    assert not world.gate.off
    assert not world.kv.supply.is_waited_for
    assert not engine_of(world, Role.OFFLINE).going.any()
    assert len(offline.backed()) + len(online.backed()) >= 72


def test_a_stop_that_fails_takes_back_all_that_had_begun(world):
    offline, online = beside(world)
    backed, before, epoch = offline.backed().tolist(), takings(offline), offline.table["epoch"][0]
    world.gate.deaf.add(GPU)
    assert begins(world, online) is not None
    reads(online)
    world.run(1100)
    world.gate.deaf.clear()

    assert (offline.backed().tolist(), takings(offline), offline.table["epoch"][0]) == (backed, before, epoch)
    assert not engine_of(world, Role.OFFLINE).going.any()
    assert world.events(EventKind.RECLAIMED)[-1].reason.startswith("the GPU could not be stopped")


def test_a_hook_that_leaves_before_the_gpu_stands_never_loses_anything(world):
    offline, online = beside(world)
    before = takings(offline)
    begins(world, online)
    world.register.leave(offline.client, "link closed")
    reads(online)
    world.run(2000)

    assert takings(offline) == before
    assert not world.gate.off


@pytest.mark.parametrize("moment_us", MOMENTS_US)
@pytest.mark.parametrize("who", ["offline", "online", "hook of offline", "hook of online"])
def test_whoever_dies_at_any_moment_after_it_has_begun_leaves_the_books_right(world, who, moment_us):
    offline, online = beside(world)
    assert begins(world, online) is not None
    world.clock.advance(moment_us * 500)
    reads(online)
    world.clock.advance(moment_us * 500)

    hook = online if "online" in who else offline
    if "hook" in who:
        world.register.leave(hook.client, "link closed")
    else:
        hook.shim.die()
    world.run(3000)

    assert not world.gate.off
    assert world.kv.turn.is_free
    if who == "offline":
        assert len(online.backed()) >= 40


def test_what_is_pinned_after_it_has_begun_is_refused_by_its_process(world):
    """The pin may be under way when the order is: as with any other order."""
    offline, online = beside(world)
    ahead = begins(world, online)
    column = int(ahead.victims.columns[0])
    body = KvSpan(range=0, offset=column * 2 * MIB, bytes=1)
    offline.shim.say(LinkType.KV_PIN, body)
    reads(online)
    world.run(300)

    assert not world.gate.off


def test_a_client_that_does_not_read_gets_its_orders_later_and_in_turn(world):
    offline, online = beside(world)
    begins(world, online)
    connection = offline.shim.connection
    connection.is_full = True
    reads(online)
    world.clock.advance(1_000_000)
    assert connection.queue

    connection.is_full = False
    connection.flush()
    world.run(300)
    assert len(online.backed()) >= 60


@pytest.mark.parametrize(
    "meddle",
    [
        lambda world, offline, online: world.kv.allow(False),
        lambda world, offline, online: engine_of(world, Role.OFFLINE).heed_pins(),
        lambda world, offline, online: setattr(offline.shim.connection, "is_full", True),
        lambda world, offline, online: world.kv.ways.unsafe.add(offline.shim.client),
        lambda world, offline, online: offline.book.__setitem__("mode", 0),
        lambda world, offline, online: world.register.leave(offline.client, "link closed"),
        lambda world, offline, online: offline.shim.die(),
        lambda world, offline, online: setattr(world.kv.turn, "_turn", object()),
    ],
    ids=["braked", "books", "full", "unsafe", "mode", "hook left", "dead", "turn"],
)
def test_nothing_ever_begins_by_what_is_not_so_any_more(tmp_path, meddle):
    world = node(tmp_path)
    offline, online = beside(world)
    world.kv.looks.rests()
    world.kv.looks.wakes()
    assert world.gate.prepared.takes
    meddle(world, offline, online)

    assert begins(world, online) is None
    assert world.gate.prepared.began == 0
    world.kv.turn._turn = None


def test_an_exception_on_the_way_never_leaves_a_gpu_stopped(world, monkeypatch):
    _, online = beside(world)
    assert begins(world, online) is not None
    monkeypatch.setattr(world.kv.supply, "losers", lambda gpus: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        reads(online)
    monkeypatch.undo()
    world.run(3000)

    assert not world.gate.off
    assert world.kv.turn.is_free
    assert not engine_of(world, Role.OFFLINE).going.any()


@settings(max_examples=25, deadline=None)
@given(rows=st.lists(st.tuples(st.integers(0, 50), st.integers(1, 12)), max_size=6), wanted=st.integers(20, 64))
def test_the_victims_are_those_that_an_unprepared_reclaim_would_choose(tmp_path_factory, rows, wanted):
    found = []
    for is_prepared in (True, False):
        world = node(tmp_path_factory.mktemp("node"))
        offline, online = beside(world)
        for row, (first, count) in enumerate(rows):
            offline.hold(row + 1, list(range(first, first + count)), tokens=16 * count)
        world.run(1200)  # it is indexed
        if not is_prepared:
            world.kv.looks.rests = world.kv.looks.wakes = lambda: None
        online.want(used=4, wanted=wanted)
        world.run(100)
        world.check()
        found.append(np.setdiff1d(np.arange(64), offline.backed()).tolist())

    assert found[0] == found[1]
