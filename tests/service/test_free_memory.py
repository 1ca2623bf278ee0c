"""What offline processes are told of free memory, and that free handles never stand in the way of ordinary memory."""

from __future__ import annotations

import pytest
from memory_world import KvWorld

from valved.config import MIB, Config, MemoryTable
from valved.kube.observer import Observer
from valved.machine.cards import CardUse
from valved.model.ids import Remap

SIZE = 2 * MIB


@pytest.fixture
def world(tmp_path):
    memory = MemoryTable(handle_mib=2, remap=Remap.HELPER, headroom_min_mib=2, headroom_max_mib=8, spare_mib=8)
    world = KvWorld(tmp_path, config=Config(memory=memory), handles=20)
    yield world
    world.check()


def with_free_handles(world):
    """An engine came and went: the pool has its handles."""
    offline = world.engine("offline", columns=16)
    world.run(500)
    offline.shim.die()
    world.run(100)
    pool = world.kv.books.pool
    assert pool.free_handles(0) == 16
    return pool


def cards(free_mib, total_mib=100):
    return {
        bytes([gpu + 1]) * 16: CardUse(
            total_bytes=total_mib * MIB, used_bytes=(total_mib - free_mib) * MIB, by_pid={}, is_mig=False
        )
        for gpu in range(2)
    }


def test_every_client_is_told_of_free_handles_before_it_has_a_range(world):
    shim = world.shim("online")
    assert world.gate.free[shim.client] == {0: 0, 1: 0}
    with_free_handles(world)

    world.kv.service.see_cards(cards(free_mib=50))

    assert world.gate.free[shim.client] == {0: 16 * SIZE, 1: 0}


def test_a_card_that_is_short_never_keeps_free_handles(world):
    pool = with_free_handles(world)

    world.kv.service.see_cards(cards(free_mib=2))

    assert pool.free_handles(0) == 16 - 3  # eight MiB are to spare
    world.kv.service.see_cards(cards(free_mib=8))
    assert pool.free_handles(0) == 13


def test_free_handles_are_never_in_the_way_of_a_new_jobs_weights(world):
    pool = with_free_handles(world)

    world.shim("offline")

    assert pool.free_handles(0) == 0


def test_an_online_process_that_joins_never_costs_the_pool_its_handles(world):
    pool = with_free_handles(world)

    world.shim("online")

    assert pool.free_handles(0) == 16


def test_free_handles_are_never_reported_as_what_online_uses(world):
    """A job that came and went would have left its cache as a peak of online work, and no other job come for a day."""
    with_free_handles(world)
    observer = Observer(
        gpus=(), books=world.books, gating=None, book=None, register=None, processes=None, claims=None, kv=world.kv
    )
    use = CardUse(total_bytes=100 * MIB, used_bytes=16 * SIZE + 10 * MIB, by_pid={}, is_mig=False)

    assert observer.free_bytes(0, use) == 90 * MIB
    assert observer.free_bytes(1, use) == 90 * MIB - 16 * SIZE


def test_what_is_kept_for_online_services_is_never_offered_to_the_cluster_as_free(tmp_path):
    """Else a job is placed for memory that this node then refuses to it."""
    memory = MemoryTable(handle_mib=2, remap=Remap.HELPER, online_mib=60)
    world = KvWorld(tmp_path, config=Config(memory=memory), handles=20)
    service = world.shim("online")
    observer = Observer(
        gpus=(), books=world.books, gating=None, book=None, register=None, processes=None, claims=None, kv=world.kv
    )
    has = {service.entry.process.pid: 20 * MIB}
    use = CardUse(total_bytes=100 * MIB, used_bytes=30 * MIB, by_pid=has, is_mig=False)

    world.kv.service.see_cards({bytes([1]) * 16: use})

    assert observer.free_bytes(0, use) == 70 * MIB
    assert observer.offered_bytes(0, use) == 30 * MIB  # it has 20 of the 60
