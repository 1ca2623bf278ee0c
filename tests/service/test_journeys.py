"""One failure inside a step of the memory service never costs more than that step."""

from __future__ import annotations

import pytest
from memory_scenes import in_a_step
from memory_world import KvWorld

from valved.config import Config, MemoryTable
from valved.kv import reclaim
from valved.kv.journey import Pause, start
from valved.model.events import EventKind
from valved.model.ids import Remap, Role
from valved.state.registry import MEMORY_SERVICE

WAYS = [Remap.COOPERATIVE, Remap.SPARSE, Remap.HELPER]


def make(tmp_path, remap):
    memory = MemoryTable(
        handle_mib=2, remap=remap, headroom_min_mib=2, headroom_max_mib=8, tau_s=1.0, tau_min_s=0.2, step_s=5.0
    )
    world = KvWorld(tmp_path, config=Config(memory=memory), handles=20)
    offline = in_a_step(world)
    online = world.engine("online", columns=16)
    world.gate.finish(online.shim.client)
    world.run(2000)
    assert len(offline.backed()) == 64
    return world, offline, online


def fail_once(monkeypatch, owner, name):
    real, left = getattr(owner, name), [1]

    def broken(*arguments, **named):
        if left:
            left.pop()
            raise ValueError("once")
        return real(*arguments, **named)

    monkeypatch.setattr(owner, name, broken)
    return left


def is_idle(world):
    for engine in world.kv.books.engines.values():
        assert not engine.going.any()
        assert not engine.lost.any()
    assert not world.kv.supply.is_pressed(frozenset({0}))
    return True


@pytest.mark.parametrize("remap", WAYS)
@pytest.mark.parametrize("step", ["choose", "take", "give", "_end", "lose"])
def test_a_reclaim_that_fails_never_strands_its_engine(tmp_path, monkeypatch, remap, step):
    world, offline, online = make(tmp_path, remap)
    owner = {"choose": reclaim, "_end": world.kv.reclaimer}.get(step, world.kv.moves)
    left = fail_once(monkeypatch, owner, step)

    online.want(used=4, wanted=32)
    world.run(10_000)

    assert not left
    assert [str(error) for error in world.journey_failures] == ["once"]
    assert len(online.backed()) >= 32
    assert len(offline.backed()) >= 4
    assert not world.gate.off
    assert is_idle(world)
    world.journey_failures.clear()
    world.check()


@pytest.mark.parametrize("remap", WAYS)
def test_lending_that_fails_never_ends_all_lending(tmp_path, monkeypatch, remap):
    world, offline, online = make(tmp_path, remap)
    online.want(used=4, wanted=32)
    world.run(2000)
    left = fail_once(monkeypatch, world.kv.moves, "give")
    online.want(used=4)
    for _ in range(30):
        online.obey_target()
        world.run(1000)

    assert not left
    assert len(offline.backed()) >= 56
    assert is_idle(world)
    world.journey_failures.clear()
    world.check()


def test_a_look_that_fails_never_is_the_last(tmp_path, monkeypatch):
    world, _, online = make(tmp_path, Remap.HELPER)
    left = fail_once(monkeypatch, world.kv.books, "engines_with")

    with pytest.raises(ValueError, match="once"):
        world.run(100)
    assert not left
    online.book["wanted_blocks"] = 32  # and nobody rings
    world.run(1000)

    assert len(online.backed()) >= 32


def test_who_waits_for_a_pause_is_never_lost_for_another_that_fails():
    pause, came = Pause(), []

    def fail():
        raise ValueError("mine")

    pause.then(fail)
    pause.then(lambda: came.append(1))
    with pytest.raises(ValueError, match="mine"):
        pause.set()

    assert came == [1]


def test_a_journey_that_fails_never_stops_who_set_its_pause(caplog, monkeypatch):
    from valved.kv import journey

    monkeypatch.setattr(journey, "failed", journey._log)
    pause = Pause()

    async def wait():
        await pause
        raise ValueError("mine")

    start(wait())
    pause.set()

    assert "mine" in caplog.text


@pytest.mark.parametrize("layers", [1, 4])
@pytest.mark.parametrize("remap", WAYS)
def test_what_was_freed_for_a_service_is_never_lent_back(tmp_path, remap, layers):
    memory = MemoryTable(handle_mib=2, remap=remap, headroom_min_mib=8, headroom_max_mib=16)
    world = KvWorld(tmp_path, config=Config(memory=memory), handles=17 * layers)
    offline = world.engine("offline", columns=16, layers=layers)
    offline.shim.has_stepped = False
    world.run(500)
    offline.shim.has_stepped = offline.shim.steps = True
    offline.book["steps"] = 7
    online = world.engine("online", columns=16, layers=layers)
    world.gate.finish(online.shim.client)
    world.run(2000)
    before = len(world.events(EventKind.RECLAIMED))
    real, lent = world.kv.lending.lend, []

    def lend(engine, columns):
        waits = [other for other in world.kv.books.engines_with(Role.ONLINE) if other.going.any()]
        lent.append(bool(waits))
        return real(engine, columns)

    world.kv.lending.lend = lend
    online.want(used=4, wanted=32)
    world.run(3000)

    assert len(online.backed()) >= 32
    assert len(world.events(EventKind.RECLAIMED)) == before + 1
    assert not any(lent)
    world.check()


@pytest.mark.parametrize("remap", [Remap.SPARSE, Remap.HELPER])
def test_orders_of_a_step_that_failed_never_meet_running_kernels(tmp_path, monkeypatch, remap):
    world, _, online = make(tmp_path, remap)
    take = world.kv.moves.take
    under_way = []

    def half(parts, how):
        orders = take(parts, how)
        under_way.extend(orders)
        monkeypatch.undo()
        raise ValueError("after they were sent")

    monkeypatch.setattr(world.kv.moves, "take", half)
    online.want(used=4, wanted=32)
    looks = 0
    for _ in range(10_000):
        if any(not order.settled.is_set for order in under_way):
            looks += 1
            assert any(MEMORY_SERVICE in account.holders for account in world.gating.gpus.values())
        world.run(0.1)

    assert looks
    assert not world.gate.off
    assert len(online.backed()) >= 32
    world.journey_failures.clear()
    world.check()
