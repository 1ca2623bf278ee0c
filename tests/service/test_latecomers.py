"""Offline engines that have memory and cannot give it yet: a service that waits for it keeps their step from ending."""

from __future__ import annotations

import pytest
from memory_scenes import in_a_step
from memory_world import BASE, Hook, KvWorld

from valved.abi.kv_link import KvMode
from valved.config import Config, MemoryTable
from valved.model.memory import KvTensor

BLOCK = (2 << 20) // 4


@pytest.fixture
def scene(tmp_path):
    """A request waits for memory. The offline engine that has it stands in its step, and its hook is not back."""
    memory = MemoryTable(handle_mib=2, headroom_min_mib=2, headroom_max_mib=8, let_ms=100.0)
    world = KvWorld(tmp_path, config=Config(memory=memory), handles=20)
    offline = in_a_step(world)
    online = world.engine("online", columns=16)
    world.gate.finish(online.shim.client)
    world.run(1500)
    world.register.leave(offline.client, "link closed")
    world.gate.hint(online.client, started=1, ended=0)
    world.gate.launch(online.shim.client)
    online.want(used=4, wanted=32)
    return world, offline.shim, online


def let_ms(world, online, ms, is_over=lambda: False):
    """For how long offline work ran beside the service."""
    count = 0
    for at in range(ms):
        if at % 100 == 0:
            world.gate.hint(online.client, started=1, ended=0)
            world.gate.beat(online.shim.client)
        world.run(1)
        count += not world.gate.off
        if is_over():
            break
    return count


def attach(shim, mode=KvMode.FULL):
    hook = Hook(shim, 64, mode=mode)
    assert hook.register([KvTensor(base_addr=BASE, block_stride_bytes=BLOCK, block_bytes=BLOCK)], (0,)) == 0
    assert hook.attach() == 0
    return hook


def test_an_engine_that_cannot_attach_in_its_step_never_keeps_a_service_waiting_for_its_memory(scene):
    """Regression: after a restart of valved a request waited for a minute."""
    world, shim, online = scene

    assert let_ms(world, online, 2000, is_over=lambda: not world.gate.off) == 1
    attach(shim)
    world.run(50)

    assert len(online.backed()) >= 32
    assert world.gate.off
    world.check()


def test_who_has_no_hook_never_runs_beside_a_service_for_longer_than_one_may_take_to_come(scene):
    world, _, online = scene

    assert 500 <= let_ms(world, online, 20_000) <= 2000  # a tenth of a second in each
    assert let_ms(world, online, 3000) == 0


def test_who_never_gives_memory_never_runs_beside_a_service_that_waits_for_it(scene):
    world, shim, online = scene
    attach(shim, mode=KvMode.NONE)
    world.run(200)

    assert let_ms(world, online, 3000) == 0
