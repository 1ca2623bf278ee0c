"""One order for all ranges of a process: a reclaim costs as many packets whatever the planes, and older shims go on."""

from __future__ import annotations

import errno

import numpy as np
import pytest
from memory_walk import WALKS, Node
from memory_world import ORDERS, KvWorld, entries_of
from msgspec.structs import replace

from valved.abi.kv_link import MAX_RUNS, RUN, KvHow, KvOp
from valved.abi.link import Feature, LinkType
from valved.config import Config, MemoryTable
from valved.kv import outside
from valved.kv.slots import NO_HANDLE, KvRangeBook, RangeKey, RangeSlots
from valved.machine.uvm import SparseResult
from valved.model.events import EventKind
from valved.model.ids import Remap

MEMORY = MemoryTable(
    handle_mib=2, remap=Remap.SPARSE, headroom_min_mib=2, headroom_max_mib=8, tau_s=1.0, tau_min_s=0.2, order_s=0.05
)
OLDER = Feature.GAPS | Feature.KV_STEP


def node(folder, planes, *, features=None, remap=Remap.SPARSE):
    """Offline has the memory, online wants half of it: worlds that differ in nothing but the planes of a column."""
    memory = replace(MEMORY, headroom_min_mib=1, headroom_max_mib=1, remap=remap, pool_mib=2 * 20 * planes)
    world = KvWorld(folder, config=Config(memory=memory), handles=20 * planes)
    if features is not None:
        world.shim_features = features
    offline = world.engine("offline", columns=16, layers=planes)
    world.run(500)
    offline.hold(0, list(range(4, 60)))
    online = world.engine("online", columns=16, layers=planes)
    world.run(500)
    return world, offline, online


def sent(hook, kinds=ORDERS):
    return [body for kind, body, _, _ in hook.shim.connection.sent if kind in kinds]


def slots_of(body):
    return {(number, slot) for _, number, slot, _ in entries_of(body)}


def counts_of(raw):
    return np.frombuffer(raw, RUN)["count"].tolist()


def reclaim(world, offline, online):
    """Orders to each side of one reclaim."""
    before = len(sent(offline)), len(sent(online))
    online.want(used=4, wanted=40)
    world.run(100)
    assert [event for event in world.events(EventKind.RECLAIMED) if event.detail["freed"]]
    assert len(online.backed()) >= 40
    taken, given = sent(offline)[before[0] :], sent(online)[before[1] :]
    return [body for body in taken if body.op == KvOp.QUARANTINE], [body for body in given if body.op == KvOp.BACK]


@pytest.mark.parametrize("planes", [1, 4, 16, 64])
def test_more_planes_never_cost_more_packets_but_by_descriptors(tmp_path, planes):
    world, offline, online = node(tmp_path, planes)
    calls = []
    [way] = world.kv.outside._ways.values()
    make = way.door.make_sparse
    way.door.make_sparse = lambda runs, then: (calls.append(runs), make(runs, then))

    taken, given = reclaim(world, offline, online)

    handles = sum(len(entries_of(body)) for body in given)
    stages = 1 if planes == 1 else 2
    assert len(taken) == len(calls) <= stages + planes // MAX_RUNS
    assert len(given) < stages + -(-handles // 64)  # descriptors in a packet
    assert {number for body in taken for _, number, _, _ in entries_of(body)} == set(range(planes))
    world.check()


def test_what_the_driver_did_before_it_refused_is_never_asked_for_again(tmp_path):
    world, offline, online = node(tmp_path, 4, features=OLDER)
    offline.shim.steps = True
    world.outside.fails += [0, 0x1F]  # of the second stage, after its first run
    before = len(sent(offline))

    online.want(used=4, wanted=40)
    world.run(100)

    taken = [body for body in sent(offline)[before:] if body.op == KvOp.QUARANTINE]
    _, first, *others = [slots_of(body) for body in taken if body.how == KvHow.OUTSIDE]
    asked = set().union(*(slots_of(body) for body in taken if body.how == KvHow.AT_STEP))
    assert others
    assert asked >= set().union(*others)
    assert not asked & first
    world.check()


@pytest.mark.parametrize("remap", [Remap.SPARSE, Remap.HELPER])
def test_a_shim_that_knows_no_runs_is_never_sent_one(tmp_path, remap):
    world, offline, online = node(tmp_path, 4, features=OLDER, remap=remap)
    offline.shim.steps = True

    taken, _ = reclaim(world, offline, online)

    assert not sent(offline, (LinkType.KV_RUNS,)) + sent(online, (LinkType.KV_RUNS,))
    assert len(taken) >= 4
    world.check()


def test_an_older_shim_and_a_newer_one_share_a_card(tmp_path):
    world, offline, online = node(tmp_path, 4, features=OLDER)
    world.shim_features = OLDER | Feature.KV_RUNS
    second = world.engine("online", columns=16, layers=4, name="other")
    world.run(500)

    reclaim(world, offline, second)

    assert sent(second, (LinkType.KV_RUNS,))
    assert not sent(online, (LinkType.KV_RUNS,))
    world.check()


def test_a_range_that_goes_while_its_order_is_under_way_frees_no_handle_twice(tmp_path):
    world, _, online = node(tmp_path, 4)
    orders, client = world.kv.books.orders, online.shim.client
    online.want(used=4, wanted=40)
    for _ in range(2000):
        if any(order.op is KvOp.BACK and len(order.slots) for order in orders.under_way(client)):
            break
        world.run(0.01)
    else:
        raise AssertionError("no order to map")

    online.shim.free_range(2)
    world.run(100)

    world.kv.check_integrity()
    assert not [order for order in orders.under_way(client) if order.op is KvOp.BACK]


def test_an_order_that_stopped_in_the_middle_gives_what_was_done_and_no_more(tmp_path):
    world, offline, online = node(tmp_path, 4, remap=Remap.HELPER)
    online.shim.fails.append((5, errno.EIO))

    reclaim(world, offline, online)

    world.run(2000)
    world.check()


def test_the_ranges_of_other_gpus_never_count_against_those_of_one(tmp_path, monkeypatch):
    """Counted together, an engine of eight GPUs and 80 layers was never taken from outside."""
    monkeypatch.setattr(outside, "UNHEARD", 6)
    world = KvWorld(tmp_path, config=Config(memory=replace(MEMORY, pool_mib=320)), handles=160)
    world.engine("offline", columns=16, layers=4, gpus=(0, 1))
    world.run(500)

    for slots in next(iter(world.kv.books.engines.values())).cells(np.arange(4), backed=True):
        assert len(slots.books) == 4
        assert {book.gpu for book in slots.books} == {slots.book.gpu}
        [draft] = world.kv.books.orders.draft_away(slots)
        [part] = world.kv.outside.plan([(slots, draft.raw)], is_ours=True)
        assert world.kv.outside.take(part)


def test_a_client_that_left_is_never_asked_for_what_the_driver_refused(tmp_path):
    """It has heard of the order, and died before the driver's call was back: nobody waits for it."""
    world, offline, online = node(tmp_path, 4)
    [way] = world.kv.outside._ways.values()
    calls = []
    way.door.make_sparse = lambda runs, then: calls.append(then)
    online.want(used=4, wanted=40)
    for _ in range(2000):
        if calls and not world.kv.books.orders.under_way(offline.shim.client):
            break
        world.run(0.01)
    else:
        raise AssertionError("no order that it has heard of")
    heard = world.kv.books.orders.leaving(frozenset({offline.shim.client}))
    assert heard

    offline.shim.die()
    world.run(1)
    assert all(order.settled.is_set for order in heard)
    calls[0](SparseResult(status=0x40, runs=0, took_ns=1000))

    world.run(100)
    assert not world.kv.books.orders.leaving(frozenset({offline.shim.client}))
    world.check()


@pytest.mark.parametrize("done", [0, 3])
def test_what_a_driver_that_refused_made_sparse_never_counts_as_memory_when_the_process_refuses_too(tmp_path, done):
    world, offline, online = node(tmp_path, 8)
    world.outside.fails.append(0x40)  # after the first of two ranges
    offline.shim.fails.append((done, errno.EIO))  # between its steps
    online.want(used=4, wanted=40)
    world.run(2)
    online.shim.die()  # no reclaim comes for the rest
    for _ in range(500):
        world.run(1)
        told = {int(block) // 4 for block in offline.backed()}
        assert told.isdisjoint(slot for _, slot in offline.shim.read_zero)
    world.check()
    offline.shim.die()
    world.run(3000)
    pool = world.kv.books.pool
    assert pool.free_handles(0) == pool.total


def test_slots_of_ranges_in_one_array_and_of_one_that_stayed_behind_are_written_alike():
    books = [
        KvRangeBook(
            key=RangeKey(1, n), gpu=0, base=n << 40, handle_bytes=1, is_elastic=True, at=np.full(4, NO_HANDLE, np.int64)
        )
        for n in range(3)
    ]
    slots = RangeSlots(books=tuple(books), of=np.array([0, 0, 1, 2, 2]), slots=np.array([1, 2, 0, 2, 3]))

    slots.put(np.arange(5))

    assert slots.standing().tolist() == [0, 1, 2, 3, 4]
    assert [book.at.tolist() for book in books] == [[-1, 0, 1, -1], [2, -1, -1, -1], [-1, -1, 3, 4]]
    assert counts_of(slots.runs()) == [2, 1, 2]
    assert counts_of(slots.runs(np.array([7, 9, 1, 2, 3]))) == [1, 1, 1, 2]


class OlderWalk(Node):
    """Shims that know no runs."""

    config = Config(memory=MEMORY)
    features = OLDER


class PlanesWalk(Node):
    """Columns of several handles."""

    config = Config(memory=MEMORY)
    layers = 3


OlderWalk.TestCase.settings = PlanesWalk.TestCase.settings = WALKS
TestOlderWalk, TestPlanesWalk = OlderWalk.TestCase, PlanesWalk.TestCase
