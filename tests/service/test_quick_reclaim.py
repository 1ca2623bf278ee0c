"""On the way of a need for memory lies only what was not worked out before, or is while the driver is busy."""

from __future__ import annotations

import errno
import os

import pytest
from memory_walk import beside
from memory_world import BASE, Hook, kv_world

from valved.abi import kv_files
from valved.abi.kv_link import KvNeed
from valved.abi.link import LinkType
from valved.config import MIB, Config, MemoryTable
from valved.kv import columns, reserve
from valved.kv.reclaim import BELIEVED_NS
from valved.model.events import EventKind
from valved.model.ids import Remap, Role
from valved.model.memory import KvTensor, ReservationAction
from valved.state.registry import MEMORY_SERVICE

MEMORY = MemoryTable(handle_mib=2, remap=Remap.SPARSE, headroom_min_mib=2, headroom_max_mib=8, pool_mib=40)
world = kv_world(Config(memory=MEMORY))


@pytest.fixture
def said(world, monkeypatch):
    """What the gate was told of the memory service, and what was decided meanwhile."""
    said = []
    put, decide = world.gate.put_service, reserve.decide

    def put_service(service, gpus):
        if service == MEMORY_SERVICE:
            said.append("stop")
        put(service, gpus)

    def decided(*arguments):
        said.append("decide")
        return decide(*arguments)

    monkeypatch.setattr(world.gate, "put_service", put_service)
    monkeypatch.setattr(reserve, "decide", decided)
    return said


def rings(online, wanted):
    online.book["used_blocks"], online.book["wanted_blocks"] = 4, wanted
    online.say(LinkType.KV_NEED, KvNeed(wanted_blocks=wanted))


def is_held(world):
    world.gating.drain()  # the books hear of it as they are read
    return any(MEMORY_SERVICE in account.holders for account in world.gating.gpus.values())


def test_who_waits_for_memory_never_waits_for_a_decision_before_the_stop(world, said):
    _, online = beside(world)
    said.clear()

    rings(online, 40)

    assert said[:2] == ["stop", "decide"]
    assert said.count("stop") == 1
    world.run(100)
    assert world.events(EventKind.RECLAIMED)[-1].detail["freed"]
    assert not is_held(world)


def test_who_waits_for_memory_never_waits_for_a_look_before_the_stop(world, said, monkeypatch):
    """What the last look foresaw is enough to stop offline work."""
    _, online = beside(world)
    observe = reserve.Reserve._observe
    monkeypatch.setattr(reserve.Reserve, "_observe", lambda *arguments: said.append("look") or observe(*arguments))
    said.clear()

    rings(online, 40)

    assert said[:2] == ["stop", "look"]
    assert said.count("stop") == 1
    world.run(100)
    assert not is_held(world)


def test_what_was_foreseen_never_stops_offline_work_once_it_is_not_so(world, said):
    """Between the look and the ring memory became free, and nobody has looked since."""
    offline, online = beside(world)
    [engine] = world.kv.books.engines_with(Role.ONLINE)
    assert world.kv.reserve.online[engine.service].foreseen is not None
    offline.shim.die()
    said.clear()

    rings(online, 40)

    assert "stop" not in said
    world.run(1000)
    assert not is_held(world)


def test_a_need_that_free_memory_serves_never_stops_offline_work(world, said):
    offline = world.engine("offline", columns=4)
    world.run(500)
    offline.hold(0, list(range(4, 16)))
    online = world.engine("online", columns=10)
    world.run(500)
    said.clear()

    rings(online, 32)
    world.run(100)

    assert len(online.backed()) >= 32
    assert "stop" not in said


def test_a_stop_of_which_nobody_makes_use_never_lasts(world, monkeypatch):
    _, online = beside(world)
    decide = reserve.decide

    def hold(state, memory, now_ns, settings):
        state, decision = decide(state, memory, now_ns, settings)
        return state, reserve.replace(decision, action=ReservationAction.HOLD)

    with monkeypatch.context() as patched:
        patched.setattr(reserve, "decide", hold)
        rings(online, 40)
        assert not is_held(world)

    world.run(100)
    assert len(online.backed()) >= 40


def test_a_look_that_fails_never_leaves_offline_work_stopped(world, monkeypatch):
    _, online = beside(world)

    def fail(*arguments):
        raise RuntimeError("no decision")

    with monkeypatch.context() as patched:
        patched.setattr(reserve, "decide", fail)
        with pytest.raises(RuntimeError):
            rings(online, 40)
        assert not is_held(world)


def test_a_stop_ahead_that_fails_half_way_never_leaves_offline_work_stopped(world, monkeypatch):
    _, online = beside(world)

    def fails(*_):
        assert is_held(world)
        raise RuntimeError("what follows the hold")

    with monkeypatch.context() as patched:
        patched.setattr(world.kv.reserve._firsts, "send", fails)
        with pytest.raises(RuntimeError):
            rings(online, 40)
        assert not is_held(world)


def test_a_brake_never_lets_a_need_stop_offline_work(world, said):
    _, online = beside(world)
    world.kv.allow(False)
    said.clear()

    rings(online, 40)
    world.run(100)

    assert "stop" not in said
    world.kv.allow(True)


def test_victims_that_were_in_order_before_the_need_are_never_put_in_order_again(world, monkeypatch):
    _, online = beside(world)
    made = []
    select = columns.select
    monkeypatch.setattr(columns, "select", lambda *arguments: made.append(arguments) or select(*arguments))

    rings(online, 40)
    world.clock.settle()
    before_the_stop_is_through = len(made)
    world.run(100)

    assert before_the_stop_is_through == 0
    assert world.events(EventKind.RECLAIMED)[-1].detail["freed"]


def test_victims_are_put_in_order_anew_when_columns_have_come_or_gone(world):
    offline, online = beside(world)
    [engine] = world.kv.books.engines_with(Role.OFFLINE)
    before = engine.queue
    rings(online, 40)
    world.run(1000)

    assert engine.queue is not before
    assert engine.is_queue_new
    assert set(engine.queue.columns.tolist()) <= {block // 4 for block in offline.backed().tolist()}


def test_a_hook_that_rings_again_and_again_is_never_looked_at_more_than_twice_in_a_turn(world, monkeypatch):
    _, online = beside(world)
    looks = []
    look = world.kv.looks.look
    monkeypatch.setattr(world.kv.looks, "look", lambda **more: (looks.append(1), look(**more)))

    for _ in range(32):
        rings(online, 8)
    world.clock.settle()

    assert len(looks) <= 2


def test_a_ring_is_never_heeded_before_all_ranks_of_the_engine_are_known(world, said):
    """What its service had at a predecessor of valved counts for the whole engine: it would be used up."""
    world.engine("offline").hold(0, list(range(60)))
    world.settle()
    shim = world.shim("online")
    shim.reserve(0, 16)
    hook = Hook(shim, 64, ranks=2)
    world.settle()
    hook.register([KvTensor(base_addr=BASE, block_stride_bytes=MIB // 2, block_bytes=MIB // 2)], (0,))
    hook.ask_table()
    world.settle()
    [engine] = [each for each in world.kv.books.engines.values() if each.role is Role.ONLINE]
    assert not engine.is_complete
    before = object()
    world.kv.reserve.saved[engine.service] = before
    said.clear()
    hook.say(LinkType.KV_NEED, KvNeed(wanted_blocks=60))
    world.settle()

    assert said == []
    assert engine.service not in world.kv.reserve.online
    assert world.kv.reserve.saved == {engine.service: before}


def test_what_was_foreseen_never_stops_an_engine_that_is_asked_between_steps_since(world, said):
    """No memory has moved: only the way has changed by which it is taken."""
    offline, online = beside(world)
    [engine] = world.kv.books.engines_with(Role.ONLINE)
    assert world.kv.reserve.online[engine.service].foreseen is not None
    world.kv.ways.unsafe.add(offline.shim.entry.id)
    world.run(1000)
    assert world.kv.reserve.online[engine.service].foreseen is None
    said.clear()

    rings(online, 40)

    assert "stop" not in said


def test_the_time_of_a_reclaim_is_never_later_than_the_end_that_its_durations_count_back_from(world, monkeypatch):
    """GPUs are opened before it is told, and that takes time: whoever counted back would find that the hook rang later
    than it did, and that the stop came before."""
    _, online = beside(world)
    set_moving = world.gating.set_moving

    def slow_to_open(gpus):
        world.clock._now_ns += 0 if gpus else 3_000_000
        set_moving(gpus)

    monkeypatch.setattr(world.gating, "set_moving", slow_to_open)
    rung_ns = world.clock.now_ns()
    rings(online, 40)
    world.run(100)

    event = world.events(EventKind.RECLAIMED)[-1]
    assert event.t_ns - event.detail["total_ns"] == rung_ns


def test_moving_memory_never_goes_by_an_old_view_of_what_it_holds(world):
    """Whoever changed its hold meanwhile: the gate knows what is held, and nobody has a copy of that."""
    turn, gpus = world.kv.turn, frozenset({0})
    turn.stop_ahead(gpus)
    world.gating.set_standing(MEMORY_SERVICE, frozenset())
    assert not is_held(world)

    turn.stop_ahead(gpus)
    assert is_held(world)

    turn.calm()
    assert not is_held(world)


def test_a_move_of_memory_never_has_every_service_looked_at(world, monkeypatch):
    """A permission to wake rests on nothing that it changes, and a node may have a hundred services."""
    _, online = beside(world)
    looks, look_soon = [], world.gating.permits.look_soon
    monkeypatch.setattr(world.gating.permits, "look_soon", lambda *arguments: looks.append(1) or look_soon(*arguments))

    rings(online, 40)
    assert is_held(world)
    while is_held(world):
        world.run(1)

    assert world.events(EventKind.RECLAIMED)[-1].detail["freed"]
    assert looks == []


def test_a_machine_that_has_just_booted_never_takes_no_ring_for_one_long_ago(world):
    """Its clock begins at 0, which is not when a hook rang that never did."""
    _, online = beside(world)
    began_ns = world.clock.now_ns()
    assert began_ns < BELIEVED_NS

    online.book["used_blocks"], online.book["wanted_blocks"] = 4, 40
    world.run(500)

    event = world.events(EventKind.RECLAIMED)[-1]
    assert event.t_ns - event.detail["total_ns"] >= began_ns


def test_a_book_that_cannot_be_read_never_keeps_a_service_from_its_memory(world, monkeypatch):
    """A page of it was swapped out, and the control group that its hook is in has no room: pread fails, and with it
    every reclaim failed."""
    offline, online = beside(world)
    files, read = os.fstat(offline.connection.sent[-1][3][1]), kv_files.read_spans

    def read_others(fd, *spans):
        if os.path.samestat(os.fstat(fd), files):
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        return read(fd, *spans)

    monkeypatch.setattr(kv_files, "read_spans", read_others)
    world.run(2000)  # what was read of it before is old by now
    rings(online, 40)
    world.run(100)

    assert world.events(EventKind.RECLAIMED)[-1].detail["freed"]
    assert not is_held(world)
