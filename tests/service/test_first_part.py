"""The first part of a reclaim that was worked out at rest: under way before the rest is planned, never wrong."""

from __future__ import annotations

import pytest
from memory_walk import MOMENTS_US, WALKS, Node, beside
from memory_world import ORDERS, KvWorld
from msgspec.structs import replace

from valved.abi.kv_link import KvHow, KvNeed, KvOp, KvSpan
from valved.abi.link import LinkType
from valved.config import MIB, Config, MemoryTable
from valved.kv import orders, reserve
from valved.kv.choice import first
from valved.kv.choice.first import FirstParts
from valved.model.events import EventKind
from valved.model.ids import GpuIndex, Remap, Role
from valved.state.registry import MEMORY_SERVICE

MEMORY = MemoryTable(
    handle_mib=2, remap=Remap.SPARSE, headroom_min_mib=2, headroom_max_mib=8, pool_mib=40, order_s=0.05
)
GPU = GpuIndex(0)
MOST = 56  # blocks: fourteen columns, of which ten must be taken


def node(folder, remap):
    world = KvWorld(folder, config=Config(memory=replace(MEMORY, remap=remap)), handles=20)
    world.gate.stop_ns = 0  # as where the GPU stands while valved waits for a moment
    return world


@pytest.fixture(params=[Remap.SPARSE, Remap.HELPER], ids=lambda remap: remap.value)
def world(request, tmp_path):
    world = node(tmp_path, request.param)
    yield world
    world.run(3000)
    assert not is_held(world)
    world.check()


def rings(online, wanted=MOST):
    online.book["used_blocks"], online.book["wanted_blocks"] = 4, wanted
    online.say(LinkType.KV_NEED, KvNeed(wanted_blocks=wanted))


def told(hook):
    return [body for kind, body, _, _ in hook.shim.connection.sent if kind in ORDERS]


def is_held(world):
    return any(MEMORY_SERVICE in account.holders for account in world.gating.gpus.values())


def engine_of(world, role):
    [engine] = world.kv.books.engines_with(role)
    return engine


def ahead(world):
    """Handles of the last reclaim that were its first part."""
    return world.events(EventKind.RECLAIMED)[-1].detail.get("ahead", 0)


def test_who_waits_for_memory_never_waits_for_a_plan_before_the_first_order(world, monkeypatch):
    offline, online = beside(world)
    done = []
    as_runs, decide = orders._as_runs, reserve.decide
    monkeypatch.setattr(orders, "_as_runs", lambda *arguments: done.append("plan") or as_runs(*arguments))
    monkeypatch.setattr(reserve, "decide", lambda *arguments: done.append("decide") or decide(*arguments))
    on_send = offline.shim.connection.on_send
    offline.shim.connection.on_send = lambda kind, body, *rest: (done.append(body.op), on_send(kind, body, *rest))

    rings(online)

    assert done[0] == KvOp.QUARANTINE
    assert done.index("decide") > 0
    world.run(200)
    assert ahead(world) == 8
    assert len(online.backed()) >= MOST


def test_a_first_part_never_takes_more_than_is_needed(world):
    _, online = beside(world)
    lacking = 3
    free = world.kv.supply.affordable(GPU)
    rings(online, 4 * (engine_of(world, Role.ONLINE).mapped_columns() + free + lacking))
    world.run(200)

    assert ahead(world) == 0
    assert 0 < world.events(EventKind.RECLAIMED)[-1].detail["freed"] < 8


def test_memory_that_became_free_since_is_never_taken_from_offline_work_too(world):
    offline, online = beside(world)
    world.kv.supply._room[GPU] = 20  # the card has room by now, and nobody has looked
    world.kv.books.pool.most += 20
    before = len(told(offline))

    rings(online)

    assert len(told(offline)) == before


def test_what_goes_first_is_what_the_policy_takes_and_no_more(tmp_path, monkeypatch):
    def lost(folder):
        folder.mkdir()
        world = node(folder, Remap.HELPER)
        offline, online = beside(world)
        rings(online)
        world.run(40)
        found = offline.entries.copy() & 1, online.entries.copy() & 1, ahead(world)
        world.run(3000)
        world.check()
        return found

    with_it = lost(tmp_path / "with")
    monkeypatch.setattr(FirstParts, "prepare", lambda *arguments: None)
    without = lost(tmp_path / "without")

    assert (with_it[2], without[2]) == (8, 0)
    assert with_it[0].tolist() == without[0].tolist()
    assert with_it[1].tolist() == without[1].tolist()


def test_what_is_pinned_since_is_never_taken(world):
    offline, online = beside(world)
    column = int(engine_of(world, Role.OFFLINE).queue.columns[0])
    offline.shim.say(LinkType.KV_PIN, KvSpan(range=0, offset=column * 2 * MIB, bytes=2 * MIB))

    rings(online)
    world.run(200)

    assert ahead(world) == 0
    assert column * 4 in offline.backed().tolist()


def test_an_engine_that_has_left_is_never_told_of_anything(world):
    offline, online = beside(world)
    offline.shim.die()
    before = len(told(offline))

    rings(online)
    world.run(200)

    assert len(told(offline)) == before
    assert len(online.backed()) >= MOST


def test_an_engine_that_cannot_lose_any_more_never_loses(world):
    offline, online = beside(world)
    offline.book["mode"] = 0
    before = offline.backed().tolist()

    rings(online)
    world.run(100)

    assert offline.backed().tolist() == before
    offline.book["mode"] = offline.mode


def test_an_engine_that_is_asked_between_its_steps_since_is_never_told_at_once(world):
    offline, online = beside(world)
    world.kv.ways.unsafe.add(offline.shim.entry.id)
    before = len(told(offline))

    rings(online)
    world.run(100)

    taking = [body for body in told(offline)[before:] if body.op == KvOp.QUARANTINE]
    assert {body.how for body in taking} == {KvHow.AT_STEP}


def test_a_brake_never_lets_a_first_part_begin(world):
    offline, online = beside(world)
    world.kv.allow(False)
    before = len(told(offline))

    rings(online)

    assert len(told(offline)) == before
    world.kv.allow(True)


def test_nothing_is_ever_told_where_the_gpu_does_not_stand(world):
    offline, online = beside(world)
    world.gate.deaf.add(GPU)
    before = len(told(offline)), offline.table["epoch"][0]

    rings(online)
    world.run(1500)

    assert (len(told(offline)), offline.table["epoch"][0]) == before
    world.gate.deaf.clear()


@pytest.mark.parametrize("step", ["decide", "plan", "send"])
def test_a_step_that_fails_never_opens_the_gpu_before_its_orders_are_back(world, monkeypatch, step):
    """Behind the first part, or in the middle of it."""
    offline, online = beside(world)

    def fail(*arguments, **more):
        raise RuntimeError("a step of it")

    where = {
        "decide": (reserve, "decide"),
        "plan": (world.kv.reclaimer, "_plan"),
        "send": (world.kv.moves, "take"),
    }[step]
    with monkeypatch.context() as patched:
        patched.setattr(*where, fail)
        patched.setattr("valved.kv.journey.failed", lambda error: None)
        try:
            rings(online)
        except RuntimeError:
            assert step != "plan"
        under_way = world.kv.books.orders.leaving(frozenset({offline.shim.client}))
        assert is_held(world) or not under_way
        assert under_way or step == "send"
    world.run(300)

    engine = engine_of(world, Role.OFFLINE)
    assert not engine.going.any()
    assert not is_held(world)


@pytest.mark.parametrize("who", ["offline", "online"])
@pytest.mark.parametrize("moment_us", [0, *MOMENTS_US])
def test_nobody_who_dies_at_any_moment_of_it_takes_memory_along(world, who, moment_us):
    offline, online = beside(world)
    rings(online)
    world.clock.advance(moment_us * 1000)

    {"offline": offline, "online": online}[who].shim.die()
    world.run(4000)

    books = world.kv.books
    alive = {"offline": online, "online": offline}[who]
    assert len(alive.backed()) >= MOST
    assert not any(engine.going.any() for engine in books.engines.values())


def test_an_order_of_it_that_hangs_is_never_forgotten(world):
    offline, online = beside(world)
    offline.shim.answers = False
    rings(online)
    world.run(40)
    assert is_held(world) or world.config.memory.remap is Remap.SPARSE
    world.run(2000)
    assert not is_held(world)

    offline.shim.catch_up()
    world.run(3000)


def test_who_rings_again_and_again_never_has_two_parts_under_way(world, monkeypatch):
    _, online = beside(world)
    begun = []
    begin = FirstParts.begin
    monkeypatch.setattr(FirstParts, "begin", lambda parts, *rest: begun.append(parts.begun) or begin(parts, *rest))

    for wanted in (MOST, 64, MOST, 64) * 8:
        rings(online, wanted)
    lost = 16 - int(engine_of(world, Role.OFFLINE).standing_count())

    assert begun == [None] * len(begun)
    assert lost <= 12
    world.run(300)


def test_at_rest_it_is_never_worked_out_again_where_nothing_has_changed(world, monkeypatch):
    beside(world)
    made = []
    choose = first.choose
    monkeypatch.setattr(first, "choose", lambda *arguments: made.append("choose") or choose(*arguments))

    world.run(5000)

    assert made == []


class FirstPartWalk(Node):
    """As the other walks, where GPUs stand at once."""

    config = Config(memory=replace(MEMORY, remap=Remap.HELPER, pool_mib=0))
    layers = 2

    def __init__(self):
        super().__init__()
        self.world.gate.stop_ns = 0


FirstPartWalk.TestCase.settings = WALKS
TestFirstPartWalk = FirstPartWalk.TestCase
