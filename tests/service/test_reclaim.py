"""Memory moves between engines on virtual time: who gets it, in which order, and what is left when somebody goes."""

from __future__ import annotations

import errno

import numpy as np
import pytest
from memory_scenes import in_a_step
from memory_world import BASE, ORDERS, Hook, KvWorld, entries_of, kv_world
from node_world import Shares

from valved.abi.kv_link import KvHow, KvMode, KvOp
from valved.config import Config, MemoryTable
from valved.errors import NotFound
from valved.kv.reserve import says_the_same
from valved.model.events import EventKind
from valved.model.ids import Mode, Remap
from valved.model.memory import KvTensor, OnlineMemory, ReservationAction, ReservationDecision
from valved.state import saved as state

MEMORY = MemoryTable(handle_mib=2, remap=Remap.HELPER, headroom_min_mib=2, headroom_max_mib=8, tau_s=1.0, tau_min_s=0.2)
CONFIG = Config(memory=MEMORY)
world = kv_world(CONFIG)


def reclaims(world):
    return world.events(EventKind.RECLAIMED)


def both(world, *, columns=16):
    """An offline engine that has all it can use, and an online one with its headroom."""
    offline = world.engine("offline", columns=16)
    world.run(500)
    online = world.engine("online", columns=columns)
    world.run(500)
    return offline, online


def test_an_offline_engine_alone_gets_all_that_it_can_use(world):
    offline = world.engine("offline", columns=16)

    world.run(500)

    assert len(offline.backed()) == 64


def test_an_offline_engine_is_lent_no_more_than_its_ceiling(tmp_path):
    shares = Shares(0.25)
    world = KvWorld(tmp_path, config=CONFIG, handles=20, shares=shares)
    offline = world.engine("offline", columns=16)
    world.run(500)
    [engine] = world.kv.books.engines.values()

    assert len(offline.backed()) == 16
    assert world.kv.lender.short_of_ceiling(engine) == 0
    assert world.kv.lender.withheld(engine) == {0: 12 * 2 << 20}
    shares.share = 0.5
    world.kv.looks.look()
    world.run(500)

    assert len(offline.backed()) == 32
    shares.share = 0.25
    assert world.kv.lender.short_of_ceiling(engine) == -4  # nothing is taken for it
    world.run(500)
    assert len(offline.backed()) == 32
    world.check()


def test_a_stop_that_hangs_on_some_gpu_never_keeps_memory_from_growing_for_ever(world):
    world.gate.is_turning = lambda: True

    online = world.engine("online", columns=16)
    world.run(5000)

    assert len(online.backed())


def test_an_online_engine_gets_its_headroom_when_it_attaches(world):
    online = world.engine("online", columns=16)

    world.run(100)

    assert len(online.backed()) == 4  # one column of two MiB


def test_free_memory_goes_first_and_nobody_is_stopped_for_it(world):
    online = world.engine("online", columns=16)
    world.run(100)

    online.want(used=4, wanted=12)
    world.run(100)

    assert len(online.backed()) >= 12
    assert not reclaims(world)


def test_what_is_missing_is_taken_from_offline_work(world):
    offline, online = both(world)

    online.want(used=4, wanted=32)
    world.run(100)

    assert len(online.backed()) >= 32
    assert len(offline.backed()) <= 64 - 16
    [*_, reclaim] = reclaims(world)
    assert reclaim.detail["freed"] >= reclaim.detail["missing"]


def test_the_columns_that_hold_no_request_go_first(world):
    offline = world.engine("offline", columns=16)
    world.run(500)
    offline.hold(0, list(range(4, 40)))  # columns 1 to 9
    world.run(100)
    online = world.engine("online", columns=16)
    world.run(500)

    online.want(used=4, wanted=20)
    world.run(100)

    assert set(range(4, 40)) <= set(offline.backed().tolist())
    assert reclaims(world)[-1].detail["cost"] == 0


def test_the_null_block_is_never_taken(world):
    offline, online = both(world, columns=19)

    online.want(used=4, wanted=80)
    world.run(3000)

    assert offline.backed().tolist() == [0, 1, 2, 3]
    assert len(online.backed()) == 76  # more does not exist


def test_the_loss_is_told_before_the_memory_goes(world):
    offline, online = both(world)
    seen = []
    shim = offline.shim
    hear = shim.connection.on_send

    def look(kind, body, seq, fds):
        if kind in ORDERS and body.op == KvOp.QUARANTINE:
            lost = {block for _, _, slot, _ in entries_of(body) for block in range(slot * 4, slot * 4 + 4)}
            seen.append(lost.isdisjoint(offline.backed().tolist()))
        hear(kind, body, seq, fds)

    shim.connection.on_send = look
    online.want(used=4, wanted=32)
    world.run(100)

    assert seen
    assert all(seen)


def test_the_gate_opens_when_the_memory_has_arrived(world):
    offline = world.engine("offline", columns=16)
    world.run(500)
    online = world.engine("online", columns=16)
    world.gate.finish(online.shim.client)
    world.run(1500)
    assert not world.gate.off

    online.want(used=4, wanted=32)
    world.clock.settle()
    assert world.gate.off
    world.run(50)

    assert not world.gate.off
    assert len(offline.backed()) < 64


def test_a_loss_stays_told_when_the_memory_is_lent_again(world):
    """Gone and come back between two looks of the hook: the generation says so."""
    offline = world.engine("offline", columns=16)
    world.run(500)
    before = offline.entries.copy()
    online = world.engine("online", columns=16)
    world.run(500)
    online.want(used=4, wanted=32)
    world.run(100)
    gone = np.setdiff1d(np.arange(64), offline.backed())
    online.shim.die()
    world.run(1000)

    assert len(offline.backed()) == 64
    assert ((offline.entries[gone] >> 1) >= (before[gone] >> 1) + 2).all()


def test_an_engine_that_cannot_recompute_loses_nothing(world):
    offline = world.engine("offline", columns=16, mode=KvMode.NONE)
    world.run(61_000)  # nobody else will back it
    online = world.engine("online", columns=4)  # what was left: 4 of 20 handles
    world.run(500)

    online.want(used=4, wanted=16)
    world.run(2000)

    assert world.engine("online", columns=5) is None
    assert len(online.backed()) == 16
    assert len(offline.backed()) == 64
    assert not reclaims(world)


def test_a_hook_whose_mode_sinks_loses_nothing_more(world):
    offline = world.engine("offline", columns=16)
    world.run(500)
    online = world.engine("online", columns=8)
    world.run(500)
    offline.book["mode"] = KvMode.NONE
    backed = len(offline.backed())

    online.want(used=4, wanted=32)
    world.run(2000)

    assert len(offline.backed()) >= backed


def test_a_gpu_that_cannot_be_stopped_is_tried_ever_less_often_for_lending(world):
    world.gate.deaf.add(0)
    offline = world.engine("offline", columns=16)

    world.run(10_000)
    early = world.gate.calls.count(("stop", 0))
    world.run(200_000)
    late = world.gate.calls.count(("stop", 0)) - early

    assert len(offline.backed()) == 0
    assert early >= 2
    assert late <= 5  # once a minute, and the way there
    world.gate.deaf.clear()
    world.run(61_000)
    assert len(offline.backed()) == 64


def test_an_offer_goes_back_and_is_lent(world):
    offline, online = both(world)
    online.want(used=4, wanted=32)
    world.run(100)
    lent = len(offline.backed())
    world.gate.finish(online.shim.client)
    online.want(used=4)
    for _ in range(40):
        world.run(1000)
        online.obey_target()
    world.run(1000)

    assert len(online.backed()) < 32
    assert len(offline.backed()) > lent


def decision(action, *, mapped=9, columns=1, reason="idle for tau"):
    memory = OnlineMemory(used_handles=0, mapped_handles=mapped, pool_handles=16)
    return ReservationDecision(
        action=action,
        handles=columns,
        is_reclaim=False,
        headroom_handles=1,
        tau_ns=1,
        reclaims_per_hour=0.0,
        memory=memory,
        reason=reason,
    )


def test_a_give_that_an_engine_has_not_answered_yet_is_written_down_once():
    give, take, hold = ReservationAction.GIVE, ReservationAction.TAKE, ReservationAction.HOLD

    assert says_the_same(decision(give), decision(give))
    assert not says_the_same(decision(give), decision(give, mapped=8))
    assert says_the_same(decision(hold), decision(hold, mapped=8))
    assert not says_the_same(decision(hold), decision(hold, reason="another"))
    assert not says_the_same(decision(take), decision(take))


def test_tensor_parallel_ranks_lose_the_same_columns(tmp_path):
    world = KvWorld(tmp_path, config=CONFIG, handles=20, gpus=2)
    offline = world.engine("offline", columns=16, gpus=(0, 1))
    world.run(500)
    online = world.engine("online", columns=16, gpus=(0,))
    world.run(500)

    online.want(used=4, wanted=32)
    world.run(100)

    left, right = (set(offline.shim.ranges[number]) for number in (0, 1))
    assert left == right
    assert len(left) < 16
    world.check()


def test_layers_are_taken_together(world):
    offline = world.engine("offline", columns=4, layers=4)
    world.run(500)
    online = world.engine("online", columns=16)
    world.run(500)

    online.want(used=4, wanted=32)
    world.run(100)

    slots = [set(one) for one in offline.shim.ranges.values()]
    assert all(one == slots[0] for one in slots)
    assert len(online.backed()) >= 32


def test_a_range_without_an_engine_is_backed_whole_before_its_allocation_returns(world):
    shim = world.shim("offline")
    shim.has_stepped = False

    seq = shim.reserve(1, 10, elastic=False)
    assert shim.acked(seq) is None
    world.run(10)

    assert shim.acked(seq) == 0
    assert len(shim.ranges[1]) == 10


def test_an_online_range_without_an_engine_takes_from_offline_work(world):
    offline = world.engine("offline", columns=16)
    world.run(500)
    shim = world.shim("online")

    seq = shim.reserve(1, 10, elastic=False)
    world.run(100)

    assert shim.acked(seq) == 0
    assert len(offline.backed()) == 64 - 24


def test_an_offline_range_that_does_not_fit_is_refused(world):
    world.engine("offline", columns=16)
    world.run(500)
    shim = world.shim("offline")
    shim.has_stepped = False

    seq = shim.reserve(1, 10, elastic=False)
    world.run(100)

    assert shim.acked(seq) == errno.ENOMEM
    shim.free_range(1)


def test_an_elastic_range_whose_engine_never_attaches_is_backed_whole(world):
    shim = world.shim("online")
    shim.reserve(1, 10)

    world.run(61_000)

    assert len(shim.ranges[1]) == 10


def test_nothing_is_taken_while_harvesting_is_off(world):
    offline, online = both(world)
    world.brake.drain("test")

    online.want(used=4, wanted=48)
    world.run(2000)

    assert len(offline.backed()) == 64
    world.node.resume()


def test_an_engine_whose_shim_lost_its_link_comes_anew_and_can_lose_memory_again(world):
    """Both links are of one process, and only one of them broke: valved was late with its heartbeat, say."""
    offline, online = both(world)
    shim = offline.shim
    shim.hang_up()
    world.run(1)
    assert not offline.connection.is_open

    shim.retell(world.offline(pid=shim.entry.process.pid, gpus=(0,)))
    again = Hook(shim, 64)
    tensor = KvTensor(base_addr=BASE, block_stride_bytes=1 << 19, block_bytes=1 << 19)
    assert again.register([tensor], (0,)) == 0
    assert again.attach() == 0
    world.hooks = [online, again]
    online.want(used=4, wanted=48)
    world.run(2000)

    assert len(online.backed()) >= 48


def under_the_gate(world, offline, online):
    """A reclaim whose mapping work is under way."""
    offline.hold(0, list(range(8, 60)))
    online.want(used=4, wanted=48)
    for _ in range(1000):
        world.clock.advance(10_000)
        if world.gate.is_stopped(0) and not world.kv.books.orders.is_idle:
            return
    raise AssertionError("no reclaim began")


@pytest.mark.parametrize(
    "leave", [lambda node: node.drain("me", stop=True), lambda node: node.set_policy(Mode.OFF, {}, 0)]
)
def test_offline_work_that_must_leave_stays_stopped_through_the_mapping_under_way_and_after_it(world, leave):
    offline, online = both(world)
    under_the_gate(world, offline, online)

    leave(world.node)

    assert world.gate.is_stopped(0)
    world.run(50)
    assert world.kv.books.orders.is_idle
    assert world.gate.off
    assert not world.stopped, "it has not gone yet"


def test_a_cooperative_reclaim_waits_for_the_step_and_stops_nobody(tmp_path):
    memory = MemoryTable(
        handle_mib=2, remap=Remap.AUTO, headroom_min_mib=2, headroom_max_mib=8, tau_s=1.0, tau_min_s=0.2
    )
    world = KvWorld(tmp_path, config=Config(memory=memory), handles=20)
    offline = world.engine("offline", columns=16)
    offline.shim.has_stepped = False
    world.run(500)
    offline.shim.has_stepped = True
    offline.book["steps"] = 7
    offline.shim.steps = True
    online = world.engine("online", columns=16)
    world.gate.finish(online.shim.client)
    world.run(2000)
    offline.shim.steps = False

    online.want(used=4, wanted=32)
    world.run(5)
    assert not world.gate.off
    assert {body.how for body, _ in offline.shim.at_step} == {KvHow.AT_STEP}
    offline.shim.step()
    world.run(100)

    assert len(online.backed()) >= 32
    world.check()


def waiting_world(tmp_path, *, let_ms=500.0, step_s=30.0):
    """An offline engine in the middle of a step, stopped by a request, and an online service whose reserve is small."""
    memory = MemoryTable(handle_mib=2, headroom_min_mib=2, headroom_max_mib=8, let_ms=let_ms, step_s=step_s)
    world = KvWorld(tmp_path, config=Config(memory=memory), handles=20)
    offline = in_a_step(world)
    online = world.engine("online", columns=16)
    world.gate.finish(online.shim.client)
    world.run(1500)  # what it does not need goes back to offline work
    assert len(offline.backed()) == 64
    world.gate.hint(online.client, started=1, ended=0)
    world.gate.launch(online.shim.client)
    world.run(20)
    assert world.gate.off
    return world, offline, online


def keep_asking(world, online, ms):
    """An engine renews its hint."""
    for _ in range(ms // 100):
        world.gate.hint(online.client, started=1, ended=0)
        world.gate.beat(online.shim.client)
        world.run(100)


def test_a_step_that_the_gate_stopped_is_let_end_for_a_request_that_waits_for_its_memory(tmp_path):
    world, _, online = waiting_world(tmp_path)
    before = world.node.status().memory

    online.want(used=4, wanted=32)
    world.run(30)

    assert len(online.backed()) >= 32
    assert world.gate.off  # and offline work stands again
    [*_, reclaim] = reclaims(world)
    assert 0 < reclaim.detail["let_ns"] < 30e6
    assert reclaim.detail["lets"] == 1
    memory = world.node.status().memory
    assert (memory.lets - before.lets, memory.lets_again) == (1, 0)
    assert memory.let_ns - before.let_ns == reclaim.detail["let_ns"]
    assert max(world.gating.online[online.shim.entry.service].request_figures()[1:2]) >= 1  # the request was hit by it
    world.check()


def test_without_being_let_it_would_wait_for_ever(tmp_path):
    world, _, online = waiting_world(tmp_path, let_ms=0.0)

    online.want(used=4, wanted=32)
    keep_asking(world, online, 5000)

    assert len(online.backed()) < 32
    world.check()


def test_a_reserve_that_nobody_waits_for_is_not_worth_running_beside_online(tmp_path):
    world, offline, online = waiting_world(tmp_path)

    online.want(used=4, wanted=16)
    world.run(100)
    lets = sum("let_ns" in reclaim.detail for reclaim in reclaims(world))
    online.want(used=len(online.backed()))
    keep_asking(world, online, 1000)

    assert offline.shim.at_step
    assert world.gate.off
    assert sum("let_ns" in reclaim.detail for reclaim in reclaims(world)) == lets
    world.check()


def test_an_engine_that_leaves_while_its_reclaim_waits_never_makes_it_fail_for_the_others(tmp_path):
    world, offline, online = waiting_world(tmp_path, let_ms=100.0, step_s=2.0)
    offline.shim.steps = False  # it never comes to the end of its step
    online.want(used=4, wanted=32)
    world.run(50)

    world.register.leave(online.client, "link closed")
    world.run(1900)

    assert not world.journey_failures
    world.run(1000)
    assert "a step of it failed" not in [reclaim.reason for reclaim in reclaims(world)]
    world.check()


def test_a_step_that_does_not_end_is_never_let_for_longer_than_the_bound_in_a_second(tmp_path):
    world, offline, online = waiting_world(tmp_path, let_ms=100.0, step_s=2.0)
    before = world.node.status().memory
    offline.shim.steps = False  # it never comes to the end of its step
    on = 0

    online.want(used=4, wanted=32)
    for _ in range(200):
        world.run(10)
        world.gate.hint(online.client, started=1, ended=0)
        on += not world.gate.off

    assert 18 <= on <= 24  # twice a tenth of a second, in two seconds
    memory = world.node.status().memory
    assert (memory.lets - before.lets, memory.lets_again, memory.let_ns - before.let_ns) == (2, 1, 200e6)
    world.run(2100)  # what the driver still had came, so it asks once more
    [*_, reclaim] = [one for one in reclaims(world) if one.detail.get("lets")]
    lets = world.node.status().memory.lets - before.lets
    assert (reclaim.detail["late"], reclaim.detail["lets"], reclaim.detail["let_ns"]) == (2, lets, lets * 100e6)
    world.check()


def test_a_pause_ends_it_at_once(tmp_path):
    world, offline, online = waiting_world(tmp_path)
    offline.shim.steps = False
    online.want(used=4, wanted=32)
    world.run(20)
    assert not world.gate.off

    world.brake.pause("somebody")
    world.run(5)

    assert world.gate.off


def test_status_and_explain_tell_the_story_of_a_reclaim(world):
    world.engine("offline", columns=16)
    world.run(500)
    online = world.engine("online", columns=16)
    world.run(500)
    online.want(used=4, wanted=32)
    world.run(100)
    number = reclaims(world)[-1].seq

    told = world.node.explain("reclaim", number)
    memory = world.node.status().memory

    assert "from service 2" in " ".join(told.facts)
    assert any(event.kind is EventKind.RESERVED for event in told.decisions)
    [pool] = [gpu for gpu in memory.gpus if gpu.index == 0]
    assert pool.handles == pool.online + pool.offline + pool.free + pool.moving
    assert {phase.name: sum(phase.latency.count) for phase in memory.phases}["total"] == memory.reclaims
    assert memory.reclaimed_bytes == sum(event.detail["bytes"] for event in reclaims(world))


def test_an_unknown_reclaim_is_not_found(world):
    with pytest.raises(NotFound):
        world.node.explain("reclaim", 99)


def test_figures_and_the_reserve_survive_a_restart(world):
    world.engine("offline", columns=16)
    world.run(500)
    online = world.engine("online", columns=16)
    world.run(500)
    online.want(used=4, wanted=32)
    world.run(100)
    world.handover.save()
    saved, problem = state.load(world.folder / "state.json")
    assert not problem
    second = KvWorld(world.folder, config=CONFIG, clock=world.clock, processes=world.processes)

    second.handover.restore(saved, come_back_s=2.0)

    assert second.node.status().memory.reclaims == world.node.status().memory.reclaims > 0
    service = online.shim.entry.service
    assert second.kv.reserve.saved[service] == world.kv.reserve.online[service].state
