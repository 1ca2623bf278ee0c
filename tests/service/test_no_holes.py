"""No answer may rest on a hole: elastic KV memory whose hook has not attached, whatever way memory is taken."""

from __future__ import annotations

import errno

import pytest
from memory_world import BASE, Hook, KvWorld

from valved.abi.kv_link import HEEDED, KvMode
from valved.abi.link import Feature
from valved.config import Config, MemoryTable
from valved.model.events import EventKind
from valved.model.ids import Remap
from valved.model.memory import KvTensor

WAYS = [Remap.AUTO, Remap.COOPERATIVE, Remap.SPARSE, Remap.HELPER]
STRIDE = 1 << 19  # four blocks in a handle of 2 MiB


@pytest.fixture(params=WAYS, ids=lambda way: way.value)
def world(tmp_path, request):
    memory = MemoryTable(handle_mib=2, remap=request.param, headroom_min_mib=2, headroom_max_mib=8)
    world = KvWorld(tmp_path, config=Config(memory=memory), handles=20)
    yield world
    world.check()


def lender(world, columns=16):
    """An offline engine that has all it can use, and makes steps."""
    offline = world.engine("offline", columns=columns)
    offline.shim.has_stepped = False
    world.run(500)
    offline.shim.has_stepped = offline.shim.steps = True
    offline.book["steps"] = 7
    return offline


def virtual(world, slots=10, **more):
    """An offline process whose engine has allocated elastic memory and warms up."""
    shim = world.shim("offline", **more)
    seq = shim.reserve(0, slots)
    world.run(10)
    return shim, seq


def attach(shim, slots=10, **more):
    hook = Hook(shim, slots * 4, **more)
    tensor = KvTensor(base_addr=BASE, block_stride_bytes=STRIDE, block_bytes=STRIDE)
    assert hook.register([tensor], (0,)) == 0
    assert hook.attach() == 0
    return hook


def killed(world):
    return [event.reason for event in world.events(EventKind.KILLED)]


def is_held(world, shim):
    return shim.client in world.gate.launches_held


def test_an_online_allocation_never_returns_with_a_hole(world):
    offline = lender(world)
    shim = world.shim("online")

    seq = shim.reserve(0, 10)
    for _ in range(300):
        world.run(1)
        assert shim.acked(seq) is None or len(shim.ranges[0]) == 10

    assert shim.acked(seq) == 0
    assert len(offline.backed()) == 64 - 24


def test_online_memory_that_does_not_suffice_is_never_left_in_the_pool(world):
    """The allocation becomes the driver's own: what was taken from offline work must be there for it."""
    lender(world)
    shim = world.shim("online")

    seq = shim.reserve(0, 40)
    world.run(300)

    assert shim.acked(seq) == errno.ENOMEM
    assert not shim.ranges[0]
    assert world.kv.books.pool.free_handles(0) == 0
    shim.free_range(0)


def test_an_offline_step_never_runs_over_holes_that_no_hook_heeds(world):
    shim, seq = virtual(world)
    assert shim.acked(seq) == 0
    assert not is_held(world, shim)  # warming up is harmless

    assert shim.begin_step() == errno.EAGAIN
    assert is_held(world, shim)
    assert shim.begin_step() == errno.EAGAIN

    attach(shim)
    assert not is_held(world, shim)
    assert shim.begin_step() == 0


def test_a_hook_that_only_reports_never_frees_a_step_over_holes(world):
    lender(world)
    shim, _ = virtual(world)
    shim.begin_step()

    attach(shim, mode=KvMode.NONE)
    world.run(100)

    assert is_held(world, shim)
    world.run(61_000)
    assert len(killed(world)) == 1


def test_a_stepping_process_without_a_hook_is_never_left_on_the_zero_page_but_backed_whole(world):
    shim, _ = virtual(world)
    shim.begin_step()
    world.run(59_000)
    assert is_held(world, shim)

    world.run(2000)

    assert len(shim.ranges[0]) == 10
    assert not is_held(world, shim)
    assert shim.begin_step() == 0
    assert not killed(world)


def test_a_stepping_process_without_a_hook_or_memory_is_never_left_on_the_zero_page_but_ended_by_name(world):
    lender(world)
    shim, _ = virtual(world)
    shim.begin_step()

    world.run(61_000)

    [reason] = killed(world)
    assert "no hook reads the table" in reason
    assert world.signals[-1] == (shim.entry.process.pid, "SIGKILL")
    shim.die()


def test_a_process_whose_memory_is_slow_to_come_is_never_ended_for_it(world):
    """Zeroing needs channels that are on: beside a busy service it takes as long as that is busy."""
    shim, _ = virtual(world)
    world.run(30_000)
    shim.begin_step()
    shim.answers = False

    world.run(120_000)

    assert not killed(world)
    shim.catch_up()
    world.run(1000)
    assert len(shim.ranges[0]) == 10
    assert shim.begin_step() == 0


def test_the_time_to_attach_never_begins_before_the_first_step(world):
    """Looks are on a grid since the allocation: one may fall just behind the first step."""
    lender(world)
    shim, _ = virtual(world)
    world.run(59_000)
    shim.begin_step()
    world.run(30_000)

    assert not killed(world)
    attach(shim)
    assert not is_held(world, shim)


def test_a_process_that_frees_its_range_is_never_held_for_it_any_longer(world):
    shim, _ = virtual(world)
    shim.begin_step()
    assert is_held(world, shim)

    shim.free_range(0)

    assert not is_held(world, shim)


def test_a_process_that_warms_up_for_minutes_is_never_ended_for_it(world):
    shim, _ = virtual(world)

    world.run(300_000)

    assert not is_held(world, shim)
    assert not killed(world)
    shim.begin_step()
    attach(shim)
    assert not is_held(world, shim)


def test_a_process_that_never_says_that_it_steps_is_never_left_on_the_zero_page(world):
    shim, _ = virtual(world)

    world.run(602_000)

    assert len(shim.ranges[0]) == 10


def test_a_shim_that_does_not_tell_of_steps_never_gets_holes(world):
    lender(world)
    old = world.shim("offline")
    old.entry.features &= ~int(Feature.KV_STEP)
    old.has_stepped = False

    seq = old.reserve(0, 10)
    world.run(100)
    assert old.acked(seq) == errno.ENOMEM
    old.free_range(0)
    seq = old.reserve(1, 3)
    world.run(100)

    assert (old.acked(seq), len(old.ranges[1])) == (0, 3)


def test_a_step_is_never_cleared_before_its_range_is_known(world):
    shim, _ = virtual(world)
    shim.ranges[7] = {}

    assert shim.begin_step() == errno.EBUSY

    del shim.ranges[7]


def test_an_engine_that_was_heeded_is_never_ended_when_its_hook_goes(world):
    lender(world)
    shim, _ = virtual(world)
    hook = attach(shim)
    assert shim.begin_step() == 0

    world.register.leave(hook.client, "link closed")
    world.run(120_000)

    assert not killed(world)
    assert not is_held(world, shim)
    shim.hang_up()
    shim.retell(world.offline(pid=shim.entry.process.pid, gpus=(0,)), flags=HEEDED)
    world.run(120_000)
    assert not killed(world)
    assert not is_held(world, shim)


def test_a_hung_order_and_a_missing_hook_never_free_each_others_hold(world):
    shim, _ = virtual(world)
    shim.begin_step()
    holds = world.kv.books.holds
    holds.hold(shim.client, "something else")

    attach(shim)

    assert is_held(world, shim)
    holds.release(shim.client, "something else")
    assert not is_held(world, shim)
