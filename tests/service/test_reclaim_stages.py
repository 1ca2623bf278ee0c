"""A reclaim goes in stages: who waits maps one while the next is being taken, and never more than is free.

What an order takes is passed on in the turn of its answer.
"""

from __future__ import annotations

import errno
from dataclasses import replace as replace_plan

import numpy as np
import pytest
from memory_walk import beside
from memory_world import ORDERS, KvWorld, entries_of
from msgspec.structs import replace

from valved.abi.kv_link import KvDone, KvHow, KvNeed, KvOp
from valved.abi.link import LinkType
from valved.config import Config, MemoryTable
from valved.kv.engines import Engine
from valved.kv.moves import CUT_FROM, CUTS, Moves
from valved.kv.slots import NOTHING
from valved.model.events import EventKind
from valved.model.ids import Remap, Role

MEMORY = MemoryTable(
    handle_mib=2, remap=Remap.SPARSE, headroom_min_mib=2, headroom_max_mib=8, tau_s=1.0, tau_min_s=0.2, order_s=0.05
)
WAYS = [Remap.SPARSE, Remap.HELPER]


@pytest.fixture(params=WAYS, ids=lambda remap: remap.value)
def world(request, tmp_path):
    world = KvWorld(tmp_path, config=Config(memory=replace(MEMORY, remap=request.param, pool_mib=40)), handles=20)
    yield world
    world.check()


def planes(folder, remap, count=16):
    """One column of so many handles is what online asks for."""
    memory = replace(MEMORY, remap=remap, headroom_min_mib=1, headroom_max_mib=1, pool_mib=2 * 20 * count)
    world = KvWorld(folder, config=Config(memory=memory), handles=20 * count)
    offline = world.engine("offline", columns=16, layers=count)
    world.run(500)
    offline.hold(0, list(range(4, 60)))
    online = world.engine("online", columns=16, layers=count)
    world.run(500)
    return world, online


def rings(online, wanted=56):
    online.book["used_blocks"], online.book["wanted_blocks"] = 4, wanted
    online.say(LinkType.KV_NEED, KvNeed(wanted_blocks=wanted))


def sent(hook, op, after=0):
    return [body for kind, body, _, _ in hook.shim.connection.sent[after:] if kind in ORDERS and body.op == op]


def bare_handles(engine):
    """That each column lacks."""
    return np.array([sum(engine.lacking(np.array([column])).values()) for column in range(engine.columns)])


def count(bodies):
    return sum(len(entries_of(body)) for body in bodies)


def until(world, condition):
    for _ in range(5000):
        if condition():
            return
        world.run(0.01)
    raise AssertionError("that never came")


def begun(world, offline, online):
    """What is heard of a reclaim whose first stage is free, and whose next is being taken."""
    before = len(offline.shim.connection.sent), len(online.shim.connection.sent)
    rings(online)
    until(world, lambda: sent(online, KvOp.BACK, before[1]))
    taken, given = sent(offline, KvOp.QUARANTINE, before[0]), sent(online, KvOp.BACK, before[1])
    assert count(taken) >= CUT_FROM
    return taken, given


def test_who_waits_never_waits_for_all_where_a_part_is_free(world):
    offline, online = beside(world)
    taken, given = begun(world, offline, online)

    assert len(taken) == len(CUTS[world.config.memory.remap]) + 1
    assert 0 < count(given) < count(taken)
    world.run(100)
    event = world.events(EventKind.RECLAIMED)[-1]
    assert event.detail["freed"] == count(taken)
    assert len(online.backed()) >= 56


def test_a_handle_is_never_given_before_it_was_taken(world):
    """The card would say so of two owners; here of the books, at each step of the clock."""
    _, online = beside(world)
    rings(online)
    for _ in range(3000):
        world.run(0.01)
        world.kv.check_integrity()
    assert len(online.backed()) >= 56


@pytest.mark.parametrize("remap", WAYS)
def test_a_column_of_many_planes_never_comes_later_than_its_first_handles(tmp_path, remap):
    world, online = planes(tmp_path, remap)
    before = len(online.shim.connection.sent)

    rings(online, wanted=16)
    until(world, lambda: sent(online, KvOp.BACK, before))
    first = count(sent(online, KvOp.BACK, before))

    world.run(100)
    assert 0 < first < count(sent(online, KvOp.BACK, before))
    assert len(online.backed()) >= 16
    world.check()


def test_a_stage_that_was_planned_by_older_books_is_never_given(world):
    beside(world)
    [engine] = world.kv.books.engines_with(Role.ONLINE)
    moves, columns = world.kv.moves, engine.bare_columns()[:4]
    plan = moves.plan_giving(engine, columns, [NOTHING, NOTHING])
    moves.give(engine.cells(columns[:1], backed=False))

    assert moves.give_ahead(plan) == ([], plan)

    world.run(100)
    orders, left = moves.give_ahead(moves.plan_giving(engine, columns, [NOTHING, NOTHING]))
    assert orders
    assert len(left.stages) == 1
    world.run(100)


def test_a_need_for_more_than_there_is_gets_all_that_there_is(world):
    offline, online = beside(world)
    rings(online, wanted=64)
    world.run(3000)

    assert world.events(EventKind.RECLAIMED)[-1].detail["freed"] >= CUT_FROM
    assert not any(event.detail["late"] for event in world.events(EventKind.RECLAIMED))
    assert len(online.backed()) + len(offline.backed()) == 80


def test_offline_dies_between_two_stages_and_online_gets_its_memory(world):
    offline, online = beside(world)
    begun(world, offline, online)

    offline.shim.die()
    world.run(3000)

    assert len(online.backed()) >= 56
    assert not world.gate.off


def test_online_dies_between_two_stages_and_offline_gets_its_memory_back(world):
    offline, online = beside(world)
    begun(world, offline, online)

    online.shim.die()
    world.run(3000)

    assert len(offline.backed()) == 64
    assert not world.gate.off


def test_a_link_that_breaks_between_two_stages_keeps_the_next_from_everybody(world):
    offline, online = beside(world)
    begun(world, offline, online)

    offline.shim.hang_up()
    world.run(2000)

    held = {physical for slots in offline.shim.ranges.values() for _, physical in slots.values()}
    elsewhere = {physical for slots in online.shim.ranges.values() for _, physical in slots.values()}
    assert elsewhere
    assert held.isdisjoint(elsewhere)
    offline.shim.die()
    world.run(3000)


def hung_at_the_last_stage(folder):
    """One growth under way that asks twice: what was late is asked of offline work again. And what it got before."""
    world = KvWorld(folder, config=Config(memory=replace(MEMORY, remap=Remap.HELPER, pool_mib=40)), handles=20)
    offline, online = beside(world)
    world.before = len(world.events(EventKind.RECLAIMED)), world.kv.log.counters.reclaims
    _, given = begun(world, offline, online)
    offline.shim.answers = False
    for body in list(offline.shim.coming):
        offline.shim.coming.remove(body)
        offline.shim.held_back.append((LinkType.KV_RUNS, body, ()))
    return world, given


def test_a_stage_that_never_comes_leaves_who_waits_with_whole_columns(tmp_path):
    world, given = hung_at_the_last_stage(tmp_path)
    offline, online = world.hooks
    world.run(240)

    assert world.kv.ways.unsafe == {offline.shim.client}
    [engine] = world.kv.books.engines_with(Role.ONLINE)
    assert not len(engine.partial_columns())
    assert len(engine.backed_columns().nonzero()[0]) >= count(given)
    offline.shim.catch_up()
    world.run(3000)
    assert len(online.backed()) >= 56
    world.check()


def test_one_need_is_never_told_as_several_reclaims(tmp_path):
    world, _ = hung_at_the_last_stage(tmp_path)
    world.run(200)
    world.hooks[0].shim.catch_up()
    world.run(500)

    [event] = world.events(EventKind.RECLAIMED)[world.before[0] :]
    assert world.kv.log.counters.reclaims == world.before[1] + 1
    assert event.detail["late"]
    facts = world.kv.report.explain_reclaim(event.seq).facts
    assert [fact.rpartition("way: ")[2] for fact in facts if "way: " in fact] == ["helper", "cooperative"]
    world.check()


@pytest.mark.parametrize("end", ["die", "hang_up"])
def test_no_reclaim_goes_untold_because_who_asked_has_left(tmp_path, end):
    world, _ = hung_at_the_last_stage(tmp_path)
    getattr(world.hooks[1].shim, end)()
    world.run(500)

    assert len(world.events(EventKind.RECLAIMED)) == world.before[0] + 1
    world.hooks[0].shim.catch_up()
    world.run(3000)


@pytest.mark.parametrize("remap", WAYS)
def test_of_a_column_that_came_in_part_never_more_is_asked_for_than_it_lacks(tmp_path, remap):
    world, online = planes(tmp_path, remap)
    online.shim.fails.append((2, errno.EIO))  # of the first handles

    rings(online, wanted=8)
    world.run(3000)

    moved = [event.detail["freed"] for event in world.events(EventKind.RECLAIMED)]
    assert moved
    [engine] = world.kv.books.engines_with(Role.ONLINE)
    assert np.array_equal(bare_handles(engine) > 0, ~engine.backed_columns())
    world.check()


def test_an_older_need_never_loses_its_first_stage_to_a_younger_one(world):
    offline, online = beside(world)
    younger = world.engine("online", columns=16, name="other")
    world.run(500)
    before = len(younger.shim.connection.sent)
    _, given = begun(world, offline, online)
    rings(younger, wanted=12)
    world.run(0.05)

    assert given
    assert not sent(younger, KvOp.BACK, before)
    world.run(3000)


def test_between_two_steps_nothing_is_ever_given_in_stages(tmp_path):
    """Nobody maps while offline work may run again."""
    world = KvWorld(tmp_path, config=Config(memory=replace(MEMORY, remap=Remap.COOPERATIVE, pool_mib=40)), handles=20)
    offline = world.engine("offline", columns=16)
    offline.shim.has_stepped = False
    world.run(500)
    offline.hold(0, list(range(4, 60)))
    offline.shim.steps = True
    online = world.engine("online", columns=16)
    world.run(500)
    before = len(offline.shim.connection.sent), len(online.shim.connection.sent)
    rings(online)
    for _ in range(3000):
        world.run(0.1)
        if sent(online, KvOp.BACK, before[1]):
            break

    assert sent(online, KvOp.BACK, before[1])
    assert {body.how for body in sent(offline, KvOp.QUARANTINE, before[0])} == {KvHow.AT_STEP}
    assert not world.kv.books.orders.under_way(offline.shim.client)
    world.run(3000)
    world.check()


@pytest.mark.parametrize("remap", WAYS)
def test_a_column_never_stays_backed_in_part_where_a_later_stage_never_comes(tmp_path, remap):
    """Its handles would serve nobody: an engine hears of whole columns."""
    world, online = planes(tmp_path, remap)
    offline = world.hooks[0]
    [engine] = world.kv.books.engines_with(Role.ONLINE)
    rings(online, wanted=16)
    world.run(2000)
    rings(online, wanted=20)
    until(world, lambda: len(np.flatnonzero(bare_handles(engine) % 16)) > 0)  # the first handles are on their way
    offline.shim.hang_up()
    online.book["wanted_blocks"] = 4
    world.run(5000)

    assert not engine.partial_columns().tolist()
    offline.shim.die()
    world.run(3000)
    world.check()


def test_an_order_for_the_place_between_two_steps_is_never_cut(tmp_path):
    """What is given after all of it costs a packet and an answer more for each stage, and may miss the step."""
    world, online = planes(tmp_path, Remap.HELPER)
    offline = world.hooks[0]
    world.kv.ways.unsafe.add(offline.shim.client)
    offline.shim.steps = True
    before = len(offline.shim.connection.sent)
    rings(online, wanted=24)
    until(world, lambda: world.events(EventKind.RECLAIMED)[-1].detail["how"] == "cooperative")

    taken = sent(offline, KvOp.QUARANTINE, before)
    assert {body.how for body in taken} == {KvHow.AT_STEP}
    assert len(taken) == 1
    assert count(taken) >= CUT_FROM
    world.check()


def test_a_stage_never_waits_because_the_one_before_was_answered(tmp_path):
    """As it is where mapping is quicker than taking, or the stage before has several packets, as here."""
    memory = replace(MEMORY, remap=Remap.HELPER, pool_mib=600, headroom_max_mib=2)
    world = KvWorld(tmp_path, config=Config(memory=memory), handles=300)
    offline = world.engine("offline", columns=296)
    world.run(500)
    offline.hold(0, list(range(4, 250)))
    online = world.engine("online", columns=296)
    world.run(500)
    before = len(offline.shim.connection.sent), len(online.shim.connection.sent)
    rings(online, wanted=1040)
    until(world, lambda: len(world.kv.books.orders.under_way(offline.shim.client)) == len(CUTS[Remap.HELPER]) + 1)
    taken = count(sent(offline, KvOp.QUARANTINE, before[0]))
    until(world, lambda: len(world.kv.books.orders.under_way(offline.shim.client)) == 1)  # the last

    given = sent(online, KvOp.BACK, before[1])
    assert len(given) > len(world.kv.books.orders.under_way(online.shim.client))
    assert count(given) >= taken * CUTS[Remap.HELPER][-1] - 1
    world.run(100)
    world.check()


def test_a_stage_never_counts_one_free_handle_for_two_of_its_parts(world):
    """Handles would be made for it while those that come are of no use."""
    beside(world)
    [engine] = world.kv.books.engines_with(Role.ONLINE)
    pool, moves, columns = world.kv.books.pool, world.kv.moves, engine.bare_columns()
    pool.trim(0, 1)
    world.kv.supply.see_cards({})  # there is room for one
    free = pool.free_handles(0)
    assert world.kv.supply.affordable(0) == free + 1
    plan = moves.plan_giving(engine, columns[: free + 1], [NOTHING, NOTHING])
    [stage], [rest] = plan.stages
    whole = replace_plan(plan, stages=[[stage, rest], []])

    assert moves.give_ahead(whole) == ([], whole)
    assert pool.free_handles(0) == free


def test_who_gives_the_last_stage_never_looks_at_every_cell_again(world, monkeypatch):
    """The first stage has changed the books, and the cells of an engine are many: a plan knows its own."""
    offline, online = beside(world)
    begun(world, offline, online)
    before = len(online.shim.connection.sent)
    looks = []

    def look(engine, found=Engine.bare_handles):
        looks.append(count(sent(online, KvOp.BACK, before)))
        return found(engine)

    monkeypatch.setattr(Engine, "bare_handles", look)
    world.run(100)

    assert looks
    assert all(looks)


@pytest.fixture
def passed(monkeypatch):
    """Parts of plans that were to be passed on, and whether they were."""
    found = []

    def pass_on(moves, engine, part, *rest, then=Moves._pass_on):
        then(moves, engine, part, *rest)
        found.append(bool(part.given))

    monkeypatch.setattr(Moves, "_pass_on", pass_on)
    return found


def helper(folder):
    world = KvWorld(folder, config=Config(memory=replace(MEMORY, remap=Remap.HELPER, pool_mib=40)), handles=20)
    return world, *beside(world)


def deletes_its_ranges(engine):
    """And does no order that it has."""
    engine.shim.coming.clear()
    for number in list(engine.shim.ranges):
        engine.shim.free_range(number)


def says_all_done(world, engine, orders):
    """Whether it is or not."""
    for order in orders:
        done = KvDone(order=order.number, done=len(order.slots), status=0, cu_result=0)
        engine.shim.say(LinkType.KV_DONE, done)
        world.kv.check_integrity()


def test_a_stage_never_waits_for_the_books_of_what_was_taken(world, passed):
    _, online = beside(world)
    rings(online)
    world.run(100)

    assert passed
    assert all(passed)
    assert len(online.backed()) >= 56


@pytest.mark.parametrize("remap", WAYS)
def test_a_column_of_many_planes_is_never_passed_on_twice(tmp_path, passed, remap):
    world, online = planes(tmp_path, remap)
    before = len(online.shim.connection.sent)
    rings(online, wanted=24)
    for _ in range(300):
        world.run(0.1)
        world.kv.check_integrity()

    assert any(passed)
    given = [entry[1:3] for body in sent(online, KvOp.BACK, before) for entry in entries_of(body)]
    assert len(given) == len(set(given))
    assert len(online.backed()) >= 24
    world.check()


@pytest.mark.parametrize("done", [0, 1])
def test_what_an_order_did_not_take_never_goes_on(tmp_path, passed, done):
    world, offline, online = helper(tmp_path)
    begun(world, offline, online)
    passed.clear()
    offline.shim.fails.append((done, errno.EIO))
    until(world, lambda: world.kv.books.orders.under_way(offline.shim.client) == [])

    world.run(3000)
    world.check()
    assert len(online.backed()) + len(offline.backed()) <= 80


def test_what_stood_in_a_range_that_was_deleted_is_never_passed_on(tmp_path, passed):
    world, offline, online = helper(tmp_path)
    begun(world, offline, online)
    passed.clear()

    orders = world.kv.books.orders.under_way(offline.shim.client)
    deletes_its_ranges(offline)
    says_all_done(world, offline, orders)

    assert passed
    assert not any(passed)
    world.run(3000)
    world.check()


def test_a_handle_that_stands_elsewhere_by_now_is_never_passed_on(tmp_path, passed):
    """Its range was deleted, and who waits has got it already, for another column."""
    world, offline, online = helper(tmp_path)
    rings(online, wanted=32)
    books, [engine] = world.kv.books, world.kv.books.engines_with(Role.ONLINE)
    until(world, lambda: any(order._passes for order in books.orders.under_way(offline.shim.client)))
    orders = books.orders.under_way(offline.shim.client)
    [(_, part, *_)] = [passing.args for order in orders[-1:] for passing in order._passes]
    deletes_its_ranges(offline)
    [elsewhere] = engine.cells(engine.bare_columns()[-len(part.rows) :], backed=False)
    assert books.pool.take_planned(part.rows, part.names)
    books.orders.back(elsewhere, part.rows)
    until(world, lambda: not books.orders.under_way(online.shim.client))

    says_all_done(world, offline, orders)

    assert passed
    assert not any(passed)
    world.run(3000)
    world.check()


def test_nothing_is_ever_passed_on_to_an_engine_that_has_left(tmp_path, passed):
    world, offline, online = helper(tmp_path)
    begun(world, offline, online)
    passed.clear()
    [engine] = world.kv.books.engines_with(Role.ONLINE)

    world.kv.books.engines.pop(engine.service)
    until(world, lambda: passed)
    assert not any(passed)

    world.kv.books.engines[engine.service] = engine
    world.run(3000)
    world.check()


def test_of_two_needs_never_the_younger_is_passed_on_to_first(world, passed):
    """Both plan with the same handles."""
    offline, first = beside(world)
    second = world.engine("online", columns=16, name="other")
    world.run(500)
    before = len(first.shim.connection.sent), len(second.shim.connection.sent)
    offline.shim.at_step.clear()
    rings(first, wanted=24)
    rings(second, wanted=24)
    for _ in range(3000):
        world.run(0.01)
        world.kv.check_integrity()
        younger, older = sent(second, KvOp.BACK, before[1]), sent(first, KvOp.BACK, before[0])
        assert not younger or older

    assert min(len(first.backed()), len(second.backed())) >= 24
    assert count(sent(second, KvOp.BACK, before[1]))


def test_who_is_late_never_passes_anything_on(tmp_path, passed):
    """The engine that waited has gone on without, and what comes then is free for all."""
    world, _ = hung_at_the_last_stage(tmp_path)
    world.run(200)
    passed.clear()
    world.hooks[0].shim.catch_up()
    world.run(1)

    assert passed
    assert not any(passed)
    world.run(3000)
    world.check()
