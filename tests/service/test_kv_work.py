"""What a client makes large is worked out beside the loop, and what has changed meanwhile is not overlooked."""

from __future__ import annotations

import errno
import os
import threading

import pytest
from memory_world import BASE, Hook, kv_world

from valved.abi.kv_link import MAX_TENSORS, KvLayoutPart
from valved.abi.link import LinkType
from valved.config import MIB, Config, MemoryTable
from valved.machine.helpers import Worker
from valved.model.ids import Remap, Role
from valved.model.memory import KvTensor

MEMORY = MemoryTable(handle_mib=2, remap=Remap.HELPER, headroom_min_mib=8, headroom_max_mib=8)
STRIDE = 1 << 19
TENSOR = KvTensor(base_addr=BASE, block_stride_bytes=STRIDE, block_bytes=STRIDE)
world = kv_world(Config(memory=MEMORY), handles=40)


def begun(world, slots=4):
    """A shim and its hook, whose layout a thread works on."""
    shim = world.shim("offline")
    shim.reserve(0, slots)
    world.run(10)
    hook = Hook(shim, slots * 4)
    world.worker.later = True
    return shim, hook


def answer(hook, seq):
    return dict(hook.connection.acks()).get(seq)


def tell(hook, tensors=(TENSOR,), first=0, total=1):
    part = KvLayoutPart(
        blocks=hook.blocks, block_tokens=16, total=total, first=first, pinned=(0,), tensors=tuple(tensors)
    )
    return hook.say(LinkType.KV_LAYOUT, part)


def test_a_layout_is_never_worked_out_on_the_loop(world):
    shim, hook = begun(world)

    seq = tell(hook)

    assert answer(hook, seq) is None
    assert shim.client not in world.kv.books.ranks
    world.worker.finish()
    assert answer(hook, seq) == 0
    assert shim.client in world.kv.books.ranks


def planes_of_each(count):
    """Each tensor is as many planes as it can be, side by side in its blocks."""
    return [KvTensor(base_addr=BASE, block_stride_bytes=STRIDE, block_bytes=64, repeats=((4096, 64),))] * count


def planes_across(count):
    """Each plane goes through all handles, of which there are as many as a client may have."""
    size = 65536 * 2 * MIB // 16
    return [
        KvTensor(base_addr=BASE + number * (size // count), block_stride_bytes=size, block_bytes=size // count)
        for number in range(count)
    ]


@pytest.mark.parametrize(("tensors", "honest"), [(planes_of_each(256), 1), (planes_across(256), 3)])
def test_a_layout_never_costs_the_memory_of_a_daemon(world, tensors, honest):
    """4,096 tensors of 4,096 planes were all made before they were counted, and 4,096 planes through 65,536 handles
    took more than 470 MB and 40 s: whatever container valved was in, it was killed."""
    _, hook = begun(world)
    tell(hook, tensors[:honest], total=honest)
    assert world.worker._jobs, "so many are worked out"
    world.worker._jobs.clear()
    _, hook = begun(world)

    answers = [
        answer(hook, tell(hook, tensors[first : first + MAX_TENSORS], first, len(tensors)))
        for first in range(0, len(tensors), MAX_TENSORS)
    ]

    assert errno.EINVAL in answers
    assert not world.worker._jobs


def test_a_layout_whose_ranges_have_changed_meanwhile_is_never_believed(world):
    shim, hook = begun(world)
    seq = tell(hook)

    shim.free_range(0)
    world.worker.finish()

    assert shim.client not in world.kv.books.ranks
    world.run(1000)
    world.worker.finish()
    assert answer(hook, seq) == errno.EINVAL


@pytest.mark.parametrize("who", ["hook", "shim"])
def test_who_leaves_while_its_layout_is_worked_out_never_leaves_a_rank_behind(world, who):
    shim, hook = begun(world)
    tell(hook)

    world.register.leave(hook.client if who == "hook" else shim.client, "link closed")
    if who == "shim":
        shim.die()
    world.worker.finish()
    world.run(1000)
    world.worker.finish()

    assert not world.kv.books.ranks


def test_a_layout_that_takes_longer_than_its_hook_waits_is_answered_once(world):
    _, hook = begun(world)
    seq = tell(hook)

    world.run(2000)
    assert answer(hook, seq) is None
    world.worker.finish()
    world.run(2000)

    assert [status for number, status in hook.connection.acks() if number == seq] == [0]


def test_an_index_of_an_engine_that_has_left_is_never_used(world):
    offline = world.engine("offline", columns=16)
    world.run(500)
    world.engine("online", columns=16)
    world.run(500)
    [engine] = world.kv.books.engines_with(Role.OFFLINE)
    world.worker.later = True
    offline.hold(0, [4, 5])
    before = engine.index
    world.run(100)
    assert engine.is_indexing
    assert engine.index is before

    world.register.leave(offline.client, "link closed")
    world.worker.finish()

    assert engine.index is before
    assert not world.journey_failures


def test_a_worker_never_computes_in_the_loops_thread():
    class Loop:
        def __init__(self):
            self.called = []
            self.came = threading.Semaphore(0)

        def call_soon_threadsafe(self, call, *arguments):
            self.called.append((call, arguments))
            self.came.release()

    loop = Loop()
    worker = Worker(loop)

    worker.do(threading.get_ident, "then")
    worker.do(lambda: 1 // 0, "then")
    for _ in range(2):
        assert loop.came.acquire(timeout=200)

    results = [arguments for _, arguments in loop.called]
    assert all(result != threading.get_ident() for result, _ in results)
    assert sum(isinstance(error, ZeroDivisionError) for _, error in results) == 1


def test_handles_that_go_back_to_the_driver_are_never_closed_on_the_loop(world, monkeypatch):
    """Unless somebody makes new ones of that memory in the same breath."""
    world.engine("offline", columns=16)
    world.run(500)
    pool = world.kv.books.pool
    handed = []
    monkeypatch.setattr(pool, "_closer", type("Closer", (), {"close_in_turn": lambda _, fds: handed.extend(fds)})())
    offline = world.hooks[0]
    offline.shim.free_range(0)
    world.run(10)
    free = pool.free_handles(0)
    assert free == 16

    assert pool.trim(0, 10) == 10
    assert len(handed) == 10
    assert pool.trim(0, 6, is_awaited=True) == 6
    assert len(handed) == 10

    pool.check_integrity()
    for fd in handed:
        os.close(fd)
