"""The operator's target of reclaims holds for a GPU, however many engines share it and however often they come anew."""

from __future__ import annotations

import pytest
from memory_world import BASE, Hook, KvWorld

from valved.config import MIB, Config, MemoryTable
from valved.kv.reserve import ReclaimBudget
from valved.model.events import EventKind
from valved.model.ids import GpuIndex, Remap
from valved.model.memory import KvTensor
from valved.policy.reservation import start

HOUR_NS = 3600 * 10**9
UUIDS = {GpuIndex(0): b"a" * 16, GpuIndex(1): b"b" * 16}


@pytest.fixture
def world(tmp_path):
    memory = MemoryTable(handle_mib=2, pool_mib=120, remap=Remap.HELPER, headroom_min_mib=2, headroom_max_mib=8)
    world = KvWorld(tmp_path, config=Config(memory=memory), handles=60)
    yield world
    world.check()


def test_engines_that_share_a_gpu_never_have_a_target_each(world):
    for name in ("a", "b", "c"):
        world.engine("online", columns=4, name=name)
        world.run(200)

    online = list(world.kv.reserve.online.values())

    assert len(online) == 3
    assert {one.settings.target_per_hour for one in online} == {30.0}
    world.kv.reserve.budget.note({GpuIndex(0)}, world.clock.now_ns())
    world.run(200)
    assert {len(one.state.reclaims_ns) for one in online} == {1}  # one engine's reclaim counts for all


def test_an_engine_that_comes_anew_never_has_an_unspent_target(world):
    world.kv.reserve.budget.note({GpuIndex(0)}, world.clock.now_ns())
    for _ in range(3):
        online = world.engine("online", columns=4)
        world.run(500)
        [known] = world.kv.reserve.online.values()
        assert len(known.state.reclaims_ns) == 1
        online.shim.die()
        world.run(500)
    assert not world.events(EventKind.RECLAIMED)


def test_the_time_between_two_engines_never_counts_as_use(world):
    """Nobody saw any: what the first used last would stand for all of it."""
    online = world.engine("online", columns=4)
    service = online.shim.entry.service
    online.want(used=4)
    world.run(5000)
    world.register.leave(online.client, "link closed")
    world.run(20000)
    again = Hook(online.shim, online.blocks)
    assert again.register([KvTensor(base_addr=BASE, block_stride_bytes=MIB // 2, block_bytes=MIB // 2)], (0,)) == 0
    assert again.attach() == 0
    world.hooks = [again]
    world.run(3000)

    assert 5 <= len(world.kv.reserve.online[service].state.history.recent) < 12


def test_another_gpus_reclaims_never_count(world):
    world.kv.reserve.budget.note({GpuIndex(1)}, world.clock.now_ns())
    world.engine("online", columns=4)
    world.run(500)

    [known] = world.kv.reserve.online.values()
    assert known.state.reclaims_ns == ()


def test_what_was_spent_is_never_forgotten_by_a_restart_within_the_window():
    budget, successor = ReclaimBudget(UUIDS), ReclaimBudget(UUIDS)
    for second in range(10):
        budget.note({GpuIndex(0)}, second * 10**9)
    budget.note({GpuIndex(0), GpuIndex(1)}, HOUR_NS)

    successor.restore(budget.saved(), HOUR_NS)

    assert successor.seen_by({GpuIndex(0)}, HOUR_NS - 1) == (HOUR_NS,)
    assert len(successor.seen_by({GpuIndex(0), GpuIndex(1)}, -1)) == 11
    assert successor.seen_by((), 0) == ()


def test_what_was_spent_before_a_reboot_is_never_recent(world):
    """The clock was another: it would count until this one has run as long, and nothing would be given back."""
    reserve, day_ns = world.kv.reserve, 24 * HOUR_NS
    before, service = ReclaimBudget({info.index: info.uuid for info in world.gate.gpus()}), 7
    for second in range(30):
        before.note({GpuIndex(0)}, day_ns + second * 10**9)
    state = start(day_ns, world.config.reservation_settings())

    reserve.restore({service: state}, before.saved())

    assert reserve.budget.seen_by({GpuIndex(0)}, 0) == ()
    assert reserve.saved == {}
