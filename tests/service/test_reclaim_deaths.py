"""Whoever dies, hangs or lies at whatever moment of a move: the books add up, and nobody gets another's bytes."""

from __future__ import annotations

import errno

import numpy as np
import pytest
from lent_fds import lend
from memory_walk import MOMENTS_US, WALKS, Attacked, Node, beside, under_pressure
from memory_world import BASE, ORDERS, Hook, KvWorld, entries_of, kv_world
from msgspec.structs import replace

from valved.abi.kv_link import ENTRY, ZERO, KvDone, KvEntries, KvHow, KvLayoutPart, KvSpan, KvTableMessage
from valved.abi.link import LinkType, Malformed
from valved.config import Config, MemoryTable, QuotaTable
from valved.kv.journey import Pause
from valved.kv.pool import Place
from valved.model.events import EventKind
from valved.model.ids import GpuIndex, Remap, Role
from valved.model.memory import KvTensor

MEMORY = MemoryTable(
    handle_mib=2, remap=Remap.HELPER, headroom_min_mib=2, headroom_max_mib=8, tau_s=1.0, tau_min_s=0.2, order_s=0.05
)
CONFIG = Config(memory=MEMORY, quota=QuotaTable(clients_per_uid=1000))
world = kv_world(CONFIG)


@pytest.mark.parametrize("moment_us", MOMENTS_US)
def test_offline_dies_at_any_moment_and_online_gets_its_memory(world, moment_us):
    offline, online = under_pressure(world)
    world.clock.advance(moment_us * 1000)

    offline.shim.die()
    world.run(3000)

    assert len(online.backed()) >= 40
    assert not world.gate.off


@pytest.mark.parametrize("moment_us", MOMENTS_US)
def test_a_signal_that_ends_offline_at_any_moment_never_costs_online_its_memory(world, moment_us):
    offline, online = under_pressure(world)
    world.clock.advance(moment_us * 1000)

    world.say_ending(offline.shim.client)
    world.run(10)
    offline.shim.die()
    world.run(3000)

    assert len(online.backed()) >= 40
    assert not world.gate.off
    assert not world.ladder.standing()


@pytest.mark.parametrize("moment_us", MOMENTS_US)
def test_online_dies_at_any_moment_and_offline_gets_its_memory_back(world, moment_us):
    offline, online = under_pressure(world)
    world.clock.advance(moment_us * 1000)

    online.shim.die()
    world.run(3000)

    assert len(offline.backed()) == 64
    assert not world.gate.off


@pytest.mark.parametrize("moment_us", MOMENTS_US)
def test_a_hook_that_leaves_at_any_moment_is_never_asked_again(world, moment_us):
    offline, _ = under_pressure(world)
    world.clock.advance(moment_us * 1000)

    world.register.leave(offline.client, "link closed")
    world.run(1000)

    assert offline.table["detached"][0] == 1
    assert not any(service == offline.shim.entry.service for service in world.kv.books.engines)


@pytest.mark.parametrize("remap", [Remap.HELPER, Remap.COOPERATIVE])
@pytest.mark.parametrize("moment_us", MOMENTS_US)
def test_a_hook_that_comes_back_at_any_moment_is_never_told_that_memory_is_there_which_is_being_taken(
    tmp_path, moment_us, remap
):
    """A new table, made while an older one's losses are carried out, must not call them backed."""
    world = KvWorld(tmp_path, config=replace(CONFIG, memory=replace(MEMORY, remap=remap, step_s=30.0)), handles=20)
    offline = world.engine("offline", columns=16)
    offline.shim.has_stepped = False
    world.run(500)
    offline.shim.has_stepped = offline.shim.steps = True
    offline.hold(0, list(range(4, 60)))
    offline.shim.steps = False  # it is in the middle of one
    world.shim("online").reserve(0, 10)  # takes what it needs from the other
    world.clock.advance(moment_us * 1000)

    world.register.leave(offline.client, "link closed")
    again = Hook(offline.shim, offline.blocks)
    stride = MEMORY.handle_mib * (1 << 20) // 4
    tensor = KvTensor(base_addr=BASE, block_stride_bytes=stride, block_bytes=stride)
    assert again.register([tensor], (0,)) == 0
    again.ask_table()
    for _ in range(400):
        if isinstance(again.connection.sent[-1][1], KvTableMessage):
            break
        world.run(10)
    if isinstance(again.connection.sent[-1][1], KvTableMessage):
        assert again.take_table() == 0
        world.hooks[world.hooks.index(offline)] = again
    offline.shim.steps = True
    offline.shim.step()
    world.run(3000)

    world.check()


@pytest.mark.parametrize("moment_us", MOMENTS_US)
def test_a_broken_link_keeps_its_memory_from_everybody_until_the_process_ends(world, moment_us):
    offline, online = under_pressure(world)
    world.clock.advance(moment_us * 1000)
    shim = offline.shim
    shim.hang_up()
    world.run(2000)
    held = {physical for slots in shim.ranges.values() for _, physical in slots.values()}
    elsewhere = {physical for slots in online.shim.ranges.values() for _, physical in slots.values()}
    assert held.isdisjoint(elsewhere)

    shim.die()
    world.run(3000)

    assert len(online.backed()) >= 40


def test_a_link_that_comes_back_finds_its_memory(world):
    offline = world.engine("offline", columns=16)
    world.run(500)
    shim, pid = offline.shim, offline.shim.entry.process.pid
    total = world.kv.books.pool.total
    shim.hang_up()
    world.run(10)

    shim.retell(world.offline(pid=pid, gpus=(0,)))
    world.run(100)

    pool = world.kv.books.pool
    assert pool.total == total
    assert pool.count_in(Place.ORPHAN, 0) == 0
    assert pool.mapped(0, (shim.client,)) == 16


def test_an_order_that_hangs_gives_up_the_gate_and_holds_the_launches(world):
    offline, online = under_pressure(world)
    offline.shim.answers = False

    world.run(70)

    assert not world.gate.off  # the order waits for kernels, and they for the gate
    assert offline.shim.client in world.gate.launches_held
    lost = np.setdiff1d(np.arange(64), offline.backed())
    assert len(lost)
    assert world.events(EventKind.REMAP_UNSAFE)

    offline.shim.catch_up()
    world.run(2000)

    assert offline.shim.client not in world.gate.launches_held
    assert len(online.backed()) > 16  # the late memory arrived after all


def test_a_client_whose_order_hung_is_asked_between_its_steps_from_then_on(world):
    offline, online = under_pressure(world)
    offline.shim.answers = False
    world.run(70)
    offline.shim.catch_up()
    offline.book["steps"] = 9
    world.run(3000)
    online.want(used=4, wanted=60)
    world.run(1500)

    assert world.kv.ways.unsafe == {offline.shim.client}
    offline.shim.step()
    world.run(100)


def late_behind_one_that_waits(world):
    """It was asked between its steps once, together with another; the next order, at once, stands behind that."""
    offline, online = beside(world)
    client = offline.shim.client
    world.kv.ways.unsafe.add(client)
    online.want(used=4, wanted=40)
    world.run(20)
    assert offline.shim.at_step
    world.kv.ways.unsafe.clear()
    need = world.kv.reclaimer.ask(online.shim.entry.service, {GpuIndex(0): 3}, lambda: False, Pause())
    world.run(200)
    assert client in world.kv.ways.unsafe
    world.kv.supply.settle(need)
    return offline, online


def test_the_hold_of_a_late_order_never_keeps_the_step_from_ending_that_an_order_before_it_waits_for(world):
    offline, online = late_behind_one_that_waits(world)
    assert offline.shim.client not in world.gate.launches_held

    offline.shim.step()
    world.run(3000)

    assert offline.shim.client not in world.gate.launches_held
    assert len(online.backed()) >= 40


def test_an_order_that_is_late_is_never_launched_beside_once_those_before_it_are_done(world):
    offline, _ = late_behind_one_that_waits(world)
    shim = offline.shim
    first, *late = shim.at_step
    waiting = [each for each in late if each[0].how == KvHow.AT_STEP]
    shim.at_step = [each for each in late if each not in waiting]
    for each in (first, *waiting):
        shim._do(*each)
    world.run(1)
    assert shim.client in world.gate.launches_held

    shim.step()
    world.run(100)
    assert shim.client not in world.gate.launches_held


def test_a_client_that_leaves_with_a_late_order_behind_one_that_waits_is_never_held(world):
    offline, _ = late_behind_one_that_waits(world)
    offline.shim.die()
    world.run(3000)

    assert offline.shim.client not in world.gate.launches_held


@pytest.mark.parametrize(("done", "status"), [(0, errno.EIO), (3, errno.EIO), (2, errno.EBUSY), (1, errno.EAGAIN)])
def test_an_order_that_fails_half_way_leaves_the_books_right(world, done, status):
    offline, online = under_pressure(world)
    offline.shim.fails.append((done, status))
    online.shim.fails.append((done, status))

    world.run(5000)

    assert len(online.backed()) >= 40


def test_a_gate_that_fails_takes_nothing(world):
    offline, online = under_pressure(world)
    world.gate.fail(0)
    world.gate.deaf.add(0)  # it is tried again and never comes back

    world.run(900)

    assert len(offline.backed()) == 64
    assert len(online.backed()) <= 16


def test_two_gpus_under_pressure_at_once(tmp_path):
    world = KvWorld(tmp_path, config=CONFIG, handles=20, gpus=2)
    offline = [world.engine("offline", columns=16, gpus=(gpu,), name=f"batch{gpu}") for gpu in (0, 1)]
    world.run(1000)
    online = [world.engine("online", columns=16, gpus=(gpu,), name=f"chat{gpu}") for gpu in (0, 1)]
    world.run(500)

    for hook in online:
        hook.want(used=4, wanted=40)
    world.run(200)

    assert all(len(hook.backed()) >= 40 for hook in online)
    assert all(len(hook.backed()) < 64 for hook in offline)
    world.check()


def test_a_storm_of_needs_is_served_in_few_reclaims(world):
    _, online = under_pressure(world)
    for wanted in range(20, 60):
        online.want(used=4, wanted=wanted)
        world.clock.advance(50_000)
    world.run(2000)

    assert len(online.backed()) >= 56
    assert len(world.events(EventKind.RECLAIMED)) <= 6


def test_a_new_valved_learns_what_is_mapped_and_takes_from_it(tmp_path):
    first = KvWorld(tmp_path, config=CONFIG, handles=20)
    offline = first.engine("offline", columns=16)
    first.run(500)
    pid = offline.shim.entry.process.pid
    second = KvWorld(tmp_path, config=CONFIG, clock=first.clock, processes=first.processes)
    second.card = first.card
    shim = offline.shim
    shim.retell(second.offline(pid=pid, gpus=(0,)), second)
    second.shims.append(shim)
    hook = Hook(shim, 64)
    assert hook.register([KvTensor(base_addr=BASE, block_stride_bytes=1 << 19, block_bytes=1 << 19)], (0,)) == 0
    assert hook.attach() == 0
    second.hooks.append(hook)
    assert len(hook.backed()) == 64
    online = second.engine("online", columns=16)
    second.run(500)

    online.want(used=4, wanted=40)
    second.run(200)

    assert len(online.backed()) >= 40
    assert len(hook.backed()) < 64
    second.check()


LIES = {
    "a slot twice": lambda shim: held(shim, [(1, 0), (2, 0)]),
    "a handle twice": lambda shim: held(shim, [(1, 0), (1, 1)]),
    "a slot beyond the range": lambda shim: held(shim, [(1, 99)]),
    "fewer descriptors": lambda shim: held(shim, [(1, 0), (2, 1)], fds=1),
    "more than announced": lambda shim: held(shim, [(name, name - 1) for name in range(1, 7)]),
    "an order that was never given": lambda shim: shim.say(
        LinkType.KV_DONE, KvDone(order=99, done=0, status=0, cu_result=0)
    ),
    "a pin outside": lambda shim: shim.say(LinkType.KV_PIN, KvSpan(range=1, offset=0, bytes=1 << 40)),
    "the end of a range that is not": lambda shim: shim.say(LinkType.KV_RANGE_DEL, KvSpan(range=7)),
    "a layout from a shim": lambda shim: shim.say(LinkType.KV_NEED, None),
}


def held(shim, rows, fds=None):
    raw = np.array([(name, slot, 0) for name, slot in rows], ENTRY).tobytes()
    count = len(rows) if fds is None else fds
    body = KvEntries(order=0, range=1, op=0, how=0, raw=raw)
    shim.say(LinkType.KV_HELD, body, [lend() for _ in range(count)])


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_about_memory_ends_the_connection_and_changes_nothing(world, lie):
    shim = world.shim("offline")
    shim.reserve(1, 8, held=4)
    before = world.kv.books.pool.total

    with pytest.raises(Malformed):
        LIES[lie](shim)

    assert world.kv.books.pool.total == before
    shim.die()


def test_nobody_can_claim_a_handle_that_is_anothers(world):
    offline = world.engine("offline", columns=16)
    world.run(500)
    [name, *_] = [name for name, _ in offline.shim.ranges[0].values()]
    thief = world.shim("offline", name="thief")
    thief.reserve(1, 4, held=1)

    held(thief, [(name, 0)])

    assert thief.connection.last.status == errno.EEXIST
    thief.die()


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({"handle_mib": 4}, errno.EINVAL),
        ({"slots": 0}, errno.EINVAL),
        ({"slots": 1 << 20}, errno.ENOSPC),
        ({"gpu": 9}, errno.ENODEV),
    ],
)
def test_a_range_that_cannot_be_is_refused(world, change, status):
    shim = world.shim("offline")

    seq = shim.reserve(**{"number": 1, "slots": 4, **change})

    assert shim.acked(seq) == status
    shim.ranges.clear()


def test_ranges_that_overlap_are_refused(world):
    shim = world.shim("offline")
    shim.reserve(1, 4)
    shim.ranges_of.clear()
    seq = shim.reserve(1, 4)

    assert shim.acked(seq) == errno.EEXIST


@pytest.mark.parametrize(
    "tensor",
    [
        KvTensor(base_addr=BASE, block_stride_bytes=1 << 19, block_bytes=1 << 20),  # overlaps itself
        KvTensor(base_addr=BASE, block_stride_bytes=1 << 21, block_bytes=1 << 21),  # exceeds the range
        KvTensor(base_addr=BASE + (1 << 45), block_stride_bytes=1 << 19, block_bytes=1 << 19),  # nobody's addresses
        KvTensor(base_addr=BASE, block_stride_bytes=0, block_bytes=0),
        KvTensor(base_addr=BASE, block_stride_bytes=1 << 19, block_bytes=1 << 19, repeats=((1 << 60, 1),)),
    ],
)
def test_a_layout_that_lies_is_refused_and_its_engine_never_asked(world, tensor):
    shim = world.shim("offline")
    shim.has_stepped = False
    shim.reserve(0, 16)
    hook = Hook(shim, 64)

    assert hook.register([tensor]) == errno.EINVAL
    hook.ask_table()
    world.run(5000)

    assert hook.take_table() == errno.EAGAIN
    assert not world.kv.books.engines_with(Role.OFFLINE)


def test_a_table_is_handed_out_once_the_ranks_have_said_where_blocks_lie(world):
    """Told before, the engine would believe that all of its blocks have memory."""
    shim = world.shim("offline")
    shim.has_stepped = False
    shim.reserve(0, 16)
    hook = Hook(shim, 64)
    hook.ask_table()
    world.run(1000)
    before = len(hook.connection.sent)

    hook.register([KvTensor(base_addr=BASE, block_stride_bytes=1 << 19, block_bytes=1 << 19)])
    tables = [answer for kind, answer, _, _ in hook.connection.sent[before:] if kind is LinkType.KV_TABLE]

    assert len(tables) == 1


class HelperWalk(Node):
    config = CONFIG


class AttackedWalk(Attacked):
    config = CONFIG


HelperWalk.TestCase.settings = AttackedWalk.TestCase.settings = WALKS
TestHelperWalk, TestAttackedWalk = HelperWalk.TestCase, AttackedWalk.TestCase


def test_zeroing_is_asked_for_with_every_handle(world):
    """Recycled bytes are another tenant's; fresh ones may be anything, and NaN in an unused slot spreads."""
    seen = []
    offline = world.engine("offline", columns=16)
    hear = offline.shim.connection.on_send

    def look(kind, body, seq, fds):
        if kind in ORDERS:
            seen.extend(flags for _, _, _, flags in entries_of(body))
        hear(kind, body, seq, fds)

    offline.shim.connection.on_send = look
    world.run(500)

    assert seen
    assert all(flags & ZERO for flags in seen)


def test_a_hook_that_is_back_before_its_shim_waits_for_it(tmp_path):
    first = KvWorld(tmp_path, config=CONFIG, handles=20)
    offline = first.engine("offline", columns=16)
    first.run(500)
    pid = offline.shim.entry.process.pid
    second = KvWorld(tmp_path, config=CONFIG, clock=first.clock, processes=first.processes)
    second.card, shim = first.card, offline.shim
    client = second.offline(pid=pid, gpus=(0,))
    shim.world, shim.entry = second, second.books.clients[client]
    hook = Hook(shim, 64)
    tensor = KvTensor(base_addr=BASE, block_stride_bytes=1 << 19, block_bytes=1 << 19)
    body = KvLayoutPart(blocks=64, block_tokens=16, total=1, first=0, pinned=(0,), tensors=(tensor,))
    seq = hook.say(LinkType.KV_LAYOUT, body)
    assert seq not in dict(hook.connection.acks())

    shim.retell(client, second)
    second.run(10)

    assert dict(hook.connection.acks())[seq] == 0
    assert hook.attach() == 0
    assert len(hook.backed()) == 64


def test_a_slot_that_its_client_calls_backed_is_left_alone(world):
    """It was mapped while the link was down, and never told: its column is lost to the engine, the others are not."""
    offline = world.shim("offline")
    online = world.engine("online", columns=16)
    world.run(100)
    online.shim.fails.append((0, errno.EEXIST))

    online.want(used=4, wanted=40)
    world.run(5000)

    assert len(online.backed()) >= 40
    offline.die()
