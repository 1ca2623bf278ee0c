"""Unlucky moments and hostile engines around the memory that a service has, is given and gives back."""

from __future__ import annotations

import errno
from dataclasses import replace

import numpy as np
import pytest
from memory_walk import beside, under_pressure
from memory_world import BASE, Hook, KvWorld

from valved.abi.kv_link import ENTRY, KvEntries, KvMode
from valved.abi.link import LinkType
from valved.config import MIB, Config, MemoryTable
from valved.kv.journey import Pause
from valved.machine.cards import CardUse
from valved.model.events import EventKind
from valved.model.ids import GpuIndex, Remap, Role
from valved.model.memory import KvTensor, ReservationRule

GPU = GpuIndex(0)
HANDLE = 2 * MIB


def node(tmp_path, *, handles=40, **more):
    settings = {"remap": Remap.HELPER, "headroom_min_mib": 2, "headroom_max_mib": 64, "order_s": 0.05, **more}
    return KvWorld(tmp_path, config=Config(memory=MemoryTable(handle_mib=2, **settings)), handles=handles)


def tensor(number=0):
    return KvTensor(base_addr=BASE + (number << 40), block_stride_bytes=HANDLE // 4, block_bytes=HANDLE // 4)


def attach_anew(world, before, layers=1):
    """The hook of an engine comes anew, beside the same ranges."""
    world.register.leave(before.client, "link closed")
    world.hooks.remove(before)
    again = Hook(before.shim, before.blocks)
    assert again.register([tensor(number) for number in range(layers)], (0,)) == 0
    again.ask_table()
    return again


def lay_anew(world, before, columns, layers):
    """The engine makes its cache anew, with other columns."""
    shim = before.shim
    world.register.leave(before.client, "link closed")
    world.hooks.remove(before)
    for number in list(shim.ranges):
        shim.free_range(number)
    for number in range(layers):
        asked = shim.reserve(number, columns)
        world.run(100)
        assert shim.acked(asked) == 0
    again = Hook(shim, columns * 4)
    assert again.register([tensor(number) for number in range(layers)], (0,)) == 0
    assert again.attach() == 0
    world.hooks.append(again)
    world.clock.settle()
    return again


def reclaims(world):
    return len(world.kv.reserve.budget.seen_by({GPU}, 0))


@pytest.mark.parametrize("rule", list(ReservationRule))
@pytest.mark.parametrize(("first", "then"), [((16, 1), (4, 8)), ((4, 8), (16, 1))])
def test_a_reserve_never_means_another_amount_of_memory_in_another_layout(tmp_path, rule, first, then):
    """It is kept in columns, and a column of the new layout is eight times as large, or an eighth."""
    world = node(tmp_path, handles=200, reservation=rule)
    online = world.engine("online", columns=first[0], layers=first[1])
    service = online.shim.entry.service
    known = world.kv.reserve.online[service]
    known.state = replace(known.state, headroom_handles=16 // first[1], exact_handles=16.0 / first[1])

    lay_anew(world, online, *then)

    state = world.kv.reserve.online[service].state
    assert 0 <= 16 - state.headroom_handles * then[1] <= then[1]  # by the budget's rule time lowers it
    world.check()


def test_a_restart_with_a_smaller_bound_never_leaves_a_larger_reserve(tmp_path):
    world = node(tmp_path, headroom_max_mib=8, reservation=ReservationRule.MIAD)
    online = world.engine("online", columns=4)
    service = online.shim.entry.service
    known = world.kv.reserve.online[service]
    known.state = replace(known.state, headroom_handles=100, exact_handles=100.0)

    again = attach_anew(world, online)
    assert again.take_table() == 0
    world.hooks.append(again)
    world.run(100)

    assert world.kv.reserve.online[service].state.headroom_handles == 4


def test_a_reclaim_that_nothing_can_be_given_for_is_never_counted(tmp_path):
    """All that the service lacks is what it is giving back just now, and its shim is slow to do that."""
    world = node(tmp_path, handles=44, pool_mib=88, keep_s=0.2)
    offline = world.engine("offline", columns=40)
    world.run(3000)
    offline.hold(0, list(range(4, 120)))
    online = world.engine("online", columns=16)
    world.run(500)
    online.want(used=64)
    world.run(1000)
    assert len(online.backed()) == 64
    online.want(used=4)
    known = world.kv.reserve.online[online.shim.entry.service]
    known.state = replace(known.state, headroom_handles=1, exact_handles=1.0)
    for _ in range(200):
        world.run(10)
        if known.target_columns < 16:
            break
    assert known.target_columns < 16
    online.shim.answers = False
    online.obey_target()
    world.run(10)
    assert known.giving
    before = reclaims(world)

    online.want(used=8, wanted=64)
    world.run(1000)

    assert reclaims(world) == before
    online.shim.catch_up()
    world.run(3000)
    assert len(online.backed()) == 64
    world.check()


def test_a_service_whose_use_has_risen_is_never_asked_to_give_what_it_needs(tmp_path):
    """It has not offered yet what it was asked for while it needed little."""
    world = node(tmp_path, keep_s=0.2, headroom_max_mib=2)
    online = world.engine("online", columns=16)
    online.want(used=64)
    world.run(1000)
    online.want(used=4)
    world.run(3000)
    assert online.table["target_blocks"][0] < 32

    online.want(used=60)
    world.run(100)

    assert online.table["target_blocks"][0] >= 60
    world.check()


def test_an_engine_that_was_just_trimmed_is_never_asked_for_what_it_has_come_to_use(tmp_path):
    world = node(tmp_path, keep_s=30.0, headroom_max_mib=2)
    online = world.engine("online", columns=16)
    online.want(used=64)
    world.run(1000)
    again = attach_anew(world, online)
    assert again.take_table() == 0
    world.hooks.append(again)
    world.clock.settle()
    assert again.table["target_blocks"][0] < 24 < len(again.backed())

    again.want(used=24)
    world.run(100)

    assert again.table["target_blocks"][0] >= 24
    world.check()


def test_a_range_that_is_backed_whole_never_gets_what_its_engine_was_given_meanwhile(tmp_path):
    """A range that is not elastic is told with holes to a new valved; while memory is taken for it its hook comes."""
    world = node(tmp_path, handles=23, pool_mib=46, remap=Remap.COOPERATIVE, headroom_max_mib=2)
    offline = world.engine("offline", columns=16)
    offline.shim.has_stepped = False
    world.run(500)
    offline.shim.has_stepped = True
    offline.book["steps"] = 7
    shim = world.shim("online")
    shim.reserve(0, 8, elastic=False, held=4)
    raw, fds = np.array([(1000 + slot, slot, 0) for slot in range(4)], ENTRY).tobytes(), []
    for slot in range(4):
        fds.append(world.card.create(0, shim.entry.domain))
        physical = world.card.by_fd[fds[-1]]
        physical.mapped_by, physical.owner = shim, shim.entry.service
        shim.ranges[0][slot] = (1000 + slot, physical)
    world.kv.supply.see_cards({})
    world.kv.supply.make(GPU, 4)
    shim.say(LinkType.KV_HELD, KvEntries(order=0, range=0, op=0, how=0, raw=raw), fds)
    assert world.kv.supply.oldest
    online = Hook(shim, 32)
    assert online.register([tensor()], (0,)) == 0
    assert online.attach() == 0
    world.hooks.append(online)

    online.want(used=16, wanted=20)
    world.run(20)
    offline.shim.step()
    world.run(100)

    world.check_memory()
    offline.shim.steps = True
    world.run(3000)
    world.check()


def card(free_mib):
    return {bytes([1]) * 16: CardUse(total_bytes=100 * MIB, used_bytes=(100 - free_mib) * MIB, by_pid={}, is_mig=False)}


def test_a_card_that_is_silent_never_has_more_room_than_it_had(tmp_path):
    world = node(tmp_path, spare_mib=8)
    world.kv.service.see_cards(card(28))
    assert world.kv.supply.affordable(GPU) == 10
    world.kv.supply.make(GPU, 3)

    world.kv.service.see_cards({})

    assert world.kv.supply.affordable(GPU) == 7


def test_free_memory_is_never_lent_once_a_service_has_asked_for_it(tmp_path):
    """The lending had to wait for its turn at the gate."""
    world = node(tmp_path, handles=12, pool_mib=24)
    offline = world.engine("offline", columns=8)
    world.run(1000)
    world.kv.turn._turn = Pause()  # somebody else's
    other = world.engine("offline", columns=8, name="other")
    had = len(other.backed())
    service = other.shim.entry.service
    assert world.kv.lender._offline[service].lending

    need = world.kv.reclaimer.ask(991, {GPU: 5}, lambda: False, Pause())
    world.kv.turn.give_up()
    world.run(500)

    assert len(other.backed()) == had
    world.kv.supply.settle(need)
    world.run(2000)
    assert len(offline.backed()) + len(other.backed()) > 32
    world.check()


def test_a_service_that_does_not_map_what_it_was_sent_never_keeps_memory_from_others(tmp_path):
    world = node(tmp_path, handles=40, pool_mib=80)
    offline = world.engine("offline", columns=24)
    world.run(2000)
    offline.hold(0, list(range(4, 40)))
    online = world.engine("online", columns=24)
    world.run(500)
    online.shim.answers = False
    online.want(used=4, wanted=96)
    world.run(1000)
    assert world.kv.supply.oldest
    other = world.engine("online", columns=4, name="other")
    other.shim.die()
    held = len(offline.backed())

    world.run(5000)

    free = world.kv.books.pool.free_handles(GPU)
    assert len(offline.backed()) > held or not free
    online.shim.catch_up()
    world.run(2000)
    world.check()


def test_nothing_is_ever_taken_from_an_engine_that_says_it_cannot_recompute_any_more(tmp_path):
    """It says so while its GPU is being stopped for it."""
    world = node(tmp_path, handles=20)
    offline, online = under_pressure(world)
    had = len(offline.backed())

    offline.book["mode"] = KvMode.NONE
    world.run(500)

    assert len(offline.backed()) == had
    assert len(online.backed()) < 40
    assert not world.gate.off


@pytest.mark.parametrize("remap", [Remap.HELPER, Remap.SPARSE])
def test_a_column_in_part_never_stays_with_a_service_whose_hook_came_anew(tmp_path, remap):
    """Who gave it was the growth of the engine before. A part of a column is nobody's use, and no other can have it."""
    world = node(tmp_path, handles=4 * 20, remap=remap, headroom_max_mib=2)
    online = world.engine("online", columns=8, layers=4)
    world.run(500)
    online.shim.answers = False
    online.want(used=4, wanted=16)
    world.run(20)
    assert world.kv.books.orders.under_way(online.shim.client)
    again = attach_anew(world, online, layers=4)
    online.shim.fails.append((2, errno.EIO))
    world.run(200)
    assert again.take_table() == 0
    world.hooks.append(again)
    again.want(used=4)
    world.run(100)

    online.shim.catch_up()
    world.run(5000)

    [engine] = world.kv.books.engines_with(Role.ONLINE)
    assert not engine.partial_columns().tolist()
    world.check()


@pytest.mark.parametrize("moment_us", [2000, 3000, 6000])
def test_memory_on_its_way_is_never_missed_by_a_hook_that_came_anew(tmp_path, moment_us):
    """What was ordered for the engine before comes to this one."""
    world = node(tmp_path, handles=20, headroom_max_mib=2)
    _, online = beside(world)
    before = len(world.events(EventKind.RECLAIMED))
    online.shim.answers = False
    online.want(used=4, wanted=40)
    world.clock.advance(moment_us * 1000)
    again = attach_anew(world, online)
    world.run(100)
    assert again.take_table() == 0
    world.hooks.append(again)
    again.want(used=4, wanted=40)
    world.run(1000)
    [known] = world.kv.reserve.online.values()
    assert known.decision.memory.unmet_handles == 0

    online.shim.catch_up()
    world.run(4000)

    assert len(again.backed()) >= 40
    assert len(world.events(EventKind.RECLAIMED)) <= before + 1
    world.check()


def lending(world):
    """A service that gave back what it does not use, and the offline engine to which that is on its way."""
    online = world.engine("online", columns=16)
    world.run(500)
    online.want(used=4)
    for _ in range(100):
        world.run(200)
        online.obey_target()
    offline = world.engine("offline", columns=16)
    world.kv.service.see_cards({})
    for _ in range(300):
        world.clock.advance(50_000)
        if world.kv.books.orders.under_way(offline.shim.client):
            break
    return online, offline


@pytest.mark.parametrize("remap", [Remap.HELPER, Remap.SPARSE])
def test_a_service_never_waits_for_ever_for_memory_on_its_way_to_work_that_is_stopped(tmp_path, remap):
    """What free memory an offline engine is being lent is zeroed by its channels, or mapped at its next step; the
    request that waits for memory keeps those off."""
    world = node(tmp_path, handles=40, pool_mib=32, remap=remap, headroom_max_mib=2)
    online, offline = lending(world)
    assert world.kv.books.orders.under_way(offline.shim.client)
    world.gate.hint(online.client, 1, 0)
    world.gate.launch(online.shim.client)

    online.want(used=4, wanted=60)
    for _ in range(100):
        world.run(100)
        world.kv.service.see_cards({})

    assert len(online.backed()) == 60
    world.check()


@pytest.mark.parametrize("rule", list(ReservationRule))
def test_a_reclaim_for_which_the_gpu_could_not_be_stopped_is_never_counted(tmp_path, rule):
    """It is asked for each second. The hour's target would be spent in a minute, and the reserve at its bound."""
    world = node(tmp_path, handles=20, headroom_max_mib=24, headroom_step_mib=2, reservation=rule)
    offline, online = beside(world)
    [known] = world.kv.reserve.online.values()
    before = known.state.headroom_handles
    world.gate.deaf.add(0)

    online.want(used=4, wanted=40)
    world.run(60_000)

    assert len(offline.backed()) == 64
    assert reclaims(world) <= 1  # the try that is under way
    assert known.state.headroom_handles <= 2 * before
    world.gate.deaf.discard(0)
    world.run(3000)
    assert len(online.backed()) >= 40
    assert reclaims(world) == 1
    world.check()


def test_a_reserve_never_grows_while_no_memory_can_be_had(tmp_path):
    """A service that uses all there is is under pressure at every look, and that is one event."""
    world = node(tmp_path, handles=20, headroom_max_mib=24, headroom_step_mib=2)
    online = world.engine("online", columns=8)
    world.run(500)
    [known] = world.kv.reserve.online.values()

    online.want(used=32)
    world.run(1000)
    grown = known.state.headroom_handles
    world.run(5000)

    assert known.state.headroom_handles <= grown
    assert grown <= 4
    world.check()


@pytest.mark.parametrize("is_told_late", [False, True])
def test_a_service_never_waits_for_what_it_has_offered_itself(tmp_path, is_told_late):
    """A hook hands out no block that it has offered until valved has done something to it. Here the use of the service
    has risen before valved was told of the offer, or before it accepted it."""
    world = node(tmp_path, keep_s=0.2, headroom_max_mib=2)
    online = world.engine("online", columns=16)
    online.want(used=64)
    world.run(1000)
    online.want(used=4)
    world.run(3000)
    target, before = int(online.table["target_blocks"][0]), online.entries.copy()
    assert target < 32
    offered = np.arange(64) >= target
    online.book["epoch_seen"] = int(online.table["epoch"][0]) - (not is_told_late)

    online.offered[:] = 0 if is_told_late else offered
    online.want(used=4, wanted=48)
    world.run(100)
    assert online.table["target_blocks"][0] >= 48
    online.offered[:] = offered  # said when the steps that were in flight are over
    for _ in range(20):
        online.book["epoch_seen"] = int(online.table["epoch"][0])
        changed = (online.entries != before) & (online.entries & 1).astype(bool)
        online.offered[changed & (online.offered > 0)] = 0
        before = online.entries.copy()
        online.want(used=4, wanted=48)
        world.run(100)

    assert ((online.entries & 1) > online.offered).sum() >= 48
    world.check()


def test_work_that_is_lent_memory_never_runs_beside_a_service_without_a_rest(tmp_path):
    """A service waits for just that memory, and the process that gets it hangs: it is let run as for a reclaim."""
    world = node(tmp_path, handles=40, pool_mib=32, headroom_max_mib=2, let_ms=100.0)
    online, offline = lending(world)
    offline.shim.answers = False
    offline.shim.held_back += [(0, body, ()) for body in offline.shim.coming]
    offline.shim.coming.clear()
    world.gate.hint(online.client, 1, 0)
    world.gate.launch(online.shim.client)
    online.want(used=4, wanted=60)
    before = world.node.status().memory.let_ns

    world.run(10_000)

    assert 0 < world.node.status().memory.let_ns - before <= 10 * 100e6
    offline.shim.catch_up()
    world.run(3000)
    world.check()
