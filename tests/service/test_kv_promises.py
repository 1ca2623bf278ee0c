"""What was freed or offered for one is never somebody else's, and what a client says is kept in bounds."""

from __future__ import annotations

import errno

import pytest
from memory_walk import under_pressure
from memory_world import BASE, Hook, KvWorld
from node_world import Shares

from valved.abi.kv_link import KvLayoutPart
from valved.abi.link import LinkType, Malformed
from valved.config import Config, MemoryTable
from valved.kv.journey import Pause
from valved.model.events import EventKind
from valved.model.ids import GpuIndex, Remap
from valved.model.memory import KvTensor
from valved.policy.columns import MAX_PLANES

GPU = GpuIndex(0)


def node(tmp_path, *, remap=Remap.COOPERATIVE, handles=24, columns=16, shares=None):
    memory = MemoryTable(handle_mib=2, remap=remap, headroom_min_mib=2, headroom_max_mib=2, tau_s=1.0, tau_min_s=0.2)
    world = KvWorld(tmp_path, config=Config(memory=memory), handles=handles, shares=shares)
    offline = world.engine("offline", columns=columns)
    offline.shim.has_stepped = False
    world.run(500)
    offline.shim.has_stepped = True
    offline.book["steps"] = 7
    return world, offline


def test_free_handles_that_a_need_counts_on_are_never_anothers(tmp_path):
    """Cooperative: the first waits for a step of the offline engine, and the second could live on what is free."""
    shares = Shares(1.0)
    world, offline = node(tmp_path, handles=36, columns=32, shares=shares)
    offline.shim.steps = True
    shares.share = 0.0  # what comes free stays free
    first, second = (world.engine("online", columns=16, name=name) for name in ("first", "second"))
    for engine in (first, second) * 2:
        world.gate.finish(engine.shim.client)
        engine.want(used=4)
        world.run(5000)
        engine.obey_target()
        world.run(2000)
    offline.shim.steps = False
    supply = world.kv.supply
    free = supply.affordable(GPU)
    assert free >= 4
    need = world.kv.reclaimer.ask(first.shim.entry.service, {GPU: free + 2}, lambda: False, Pause())
    had = len(second.backed())

    second.want(used=4, wanted=had + 4)
    world.run(20)

    assert len(second.backed()) == had
    supply.settle(need)
    offline.shim.steps = True
    offline.shim.step()
    world.run(4000)
    assert len(second.backed()) >= had + 4
    world.check()


def test_what_is_promised_to_one_need_never_counts_for_the_next(tmp_path):
    world, _ = node(tmp_path)
    supply, reclaimer = world.kv.supply, world.kv.reclaimer
    before = supply.affordable(GPU)

    need = reclaimer.ask(991, {GPU: before + 100}, lambda: False, Pause())

    assert supply.affordable(GPU) == 0
    assert supply.affordable(GPU, 992) == 0
    assert supply.affordable(GPU, 991) == before
    supply.settle(need)
    assert supply.affordable(GPU) == before
    world.run(60_000)
    world.check()


def test_an_offer_of_an_older_table_is_never_accepted(tmp_path):
    world, _ = node(tmp_path, handles=64)
    online = world.engine("online", columns=16)
    world.gate.finish(online.shim.client)
    online.want(used=40)
    world.run(1000)
    online.want(used=0)
    online.offered[:] = 1  # said before its hook has read what the table says by now
    online.book["epoch_seen"] = int(online.table["epoch"][0]) - 1
    before = len(online.backed())

    world.run(200)
    assert len(online.backed()) == before

    world.run(60_000)
    online.obey_target()
    world.run(1000)
    assert len(online.backed()) < before
    world.check()


def test_a_layout_without_end_is_never_kept(tmp_path):
    world, offline = node(tmp_path)
    tensor = KvTensor(base_addr=BASE, block_stride_bytes=1 << 19, block_bytes=1 << 19)
    hook = Hook(offline.shim, 64)

    def say(total, first):
        body = KvLayoutPart(blocks=64, block_tokens=16, total=total, first=first, pinned=(), tensors=(tensor,))
        return hook.say(LinkType.KV_LAYOUT, body)

    sequences = [say(MAX_PLANES + 1, 0), say(2**32 - 1, 0)]

    acks = dict(hook.connection.acks())
    assert [acks[seq] for seq in sequences] == [errno.EINVAL, errno.EINVAL]
    assert acks.get(say(MAX_PLANES, 0)) is None
    world.register.leave(hook.client, "link closed")
    assert not world.events(EventKind.KILLED)


def test_what_a_stranger_passes_as_its_uvm_file_is_never_closed_here(tmp_path):
    """Who reads the socket closes what nobody took, on a thread: a file of its sender's own may hang there."""
    from valved.abi.kv_link import KvScratch

    world, offline = node(tmp_path, remap=Remap.SPARSE)
    world.outside.is_uvm = lambda fd: False
    body = KvScratch(gpu_uuid=bytes([1]) * 16, device_instance=0, place=3, base=BASE, bytes=2 << 20)
    fds = [12345]

    with pytest.raises(Malformed):
        world.register.handle(offline.shim.client, world.packet(LinkType.KV_SCRATCH, body), fds)

    assert fds == [12345]


@pytest.mark.parametrize("held", [False, True])
def test_a_refused_range_never_leaves_its_process_asking_for_ever(tmp_path, held):
    """A successor with another handle size: what has holes ends by name, what has none goes on as ordinary memory."""
    world, _ = node(tmp_path)
    shim = world.shim("offline")
    seq = shim.reserve(0, 4, handle_mib=4, held=4 if held else 0)

    status = shim.begin_step()
    world.clock.settle()

    assert shim.acked(seq) == errno.EINVAL
    ended = [event.reason for event in world.events(EventKind.KILLED)]
    if held:
        assert status == 0
        assert not ended
    else:
        assert status in (errno.EAGAIN, None)
        assert len(ended) == 1
        assert "4194304" in ended[0]


@pytest.mark.parametrize("moment_us", [1200, 1500, 1800])
@pytest.mark.parametrize("remap", [Remap.HELPER, Remap.SPARSE])
def test_memory_that_came_while_a_hook_came_anew_never_stays_untold(tmp_path, remap, moment_us):
    """Its orders were given for the table before. The one that waits for it would wait for ever."""
    world = KvWorld(
        tmp_path, config=Config(memory=MemoryTable(handle_mib=2, headroom_min_mib=2, remap=remap)), handles=20
    )
    offline, online = under_pressure(world)
    world.clock.advance(moment_us * 1000)
    world.register.leave(online.client, "link closed")
    again = Hook(online.shim, online.blocks)
    assert again.register([KvTensor(base_addr=BASE, block_stride_bytes=1 << 19, block_bytes=1 << 19)], (0,)) == 0
    assert again.attach() == 0
    world.hooks = [offline, again]
    again.want(used=4, wanted=40)
    world.run(3000)

    assert len(again.backed()) >= 40
    world.check()


def test_a_service_never_rests_while_offline_work_has_what_the_driver_had_not(tmp_path):
    """Two services grow at once by what the card is said to have, and the first one gets all of it."""
    memory = MemoryTable(handle_mib=2, remap=Remap.HELPER, headroom_min_mib=2, headroom_max_mib=2)
    world = KvWorld(tmp_path, config=Config(memory=memory), handles=26)
    first = world.engine("online", columns=8, name="first")
    world.run(2000)
    second = world.engine("online", columns=8, name="second")
    world.run(4000)
    for engine in (first, second):
        engine.obey_target()
    world.run(100)
    offline = world.engine("offline", columns=16)
    world.run(500)
    offline.hold(0, list(range(4, 60)))
    assert [len(engine.backed()) for engine in (first, second, offline)] == [4, 4, 64]

    for engine in (first, second):
        engine.want(used=4, wanted=32)
    world.run(100)

    assert [len(engine.backed()) for engine in (first, second)] == [32, 32]
    world.check()


def test_an_online_allocation_never_fails_while_offline_work_has_what_the_driver_had_not(tmp_path):
    """Nothing is free, and the card is said to have room."""
    world, _ = node(tmp_path, remap=Remap.HELPER, handles=16)
    online = world.shim("online", gpus=(0,))
    asked = online.reserve(0, 4)
    world.run(500)

    assert online.acked(asked) == 0
    assert len(online.ranges[0]) == 4


def test_nothing_is_ever_taken_from_offline_work_for_a_process_that_has_ended(tmp_path):
    """It waits for its range, and the card has no room for that."""
    world, offline = node(tmp_path, remap=Remap.HELPER, handles=16)
    online = world.shim("online", gpus=(0,))
    online.reserve(0, 4)
    had = len(offline.backed())
    online.die()
    world.run(500)

    assert not world.events(EventKind.RECLAIMED)
    assert len(offline.backed()) == had
    world.check()


def test_an_engine_that_owes_memory_is_never_asked_again_while_another_one_could_give(tmp_path):
    """It hangs in a step, and what it holds is the cheapest."""
    memory = MemoryTable(handle_mib=2, remap=Remap.COOPERATIVE, headroom_min_mib=2, headroom_max_mib=2, step_s=5.0)
    world = KvWorld(tmp_path, config=Config(memory=memory), handles=36)
    engines = []
    for name in ("hung", "busy"):
        engines.append(engine := world.engine("offline", columns=16, name=name))
        engine.shim.has_stepped = False
        world.run(1000)
        engine.book["steps"] = 7
        engine.shim.has_stepped = True
    hung, busy = engines
    busy.hold(0, list(range(4, 60)))
    hung.shim.steps = busy.shim.steps = True
    online = world.engine("online", columns=16)
    world.gate.finish(online.shim.client)
    for _ in range(20):
        world.run(2000)
        online.obey_target()
    assert [len(engine.backed()) for engine in (hung, busy)] == [64, 64]
    hung.shim.steps = False

    online.want(used=4, wanted=24)
    world.run(7500)

    assert hung.shim.at_step
    assert len(online.backed()) >= 24
    hung.shim.step()
    world.run(2000)
    online.want(used=4, wanted=60)
    hung.shim.steps = True
    world.run(8000)
    assert len(online.backed()) >= 60  # it is asked again once it has given
    world.check()


def test_what_a_client_asks_in_vain_never_pushes_the_decisions_out_of_the_journal(tmp_path):
    """Regression: each range and each engine that was refused had an event of its own."""
    world = KvWorld(tmp_path, config=Config(ring_events=100), handles=4)
    hostile = world.engine("offline", columns=2)
    world.journal.emit(EventKind.PAUSED, reason="by alice")
    hostile.ranks = 0

    for number in range(1000, 1200):
        assert hostile.shim.acked(hostile.shim.reserve(number, 0)) == errno.EINVAL
        hostile.ask_table()

    assert world.events(EventKind.PAUSED)
    assert world.gating.counters.refusals["kv-range"] == 200
    assert world.gating.counters.refusals["kv-engine"] == 200
