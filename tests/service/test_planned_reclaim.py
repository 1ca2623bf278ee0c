"""What a reclaim will say is put together while the driver is busy: nobody hears of it early, no book knows of it."""

from __future__ import annotations

import numpy as np
import pytest
from lent_fds import lend
from memory_walk import beside
from memory_world import ORDERS, KvWorld, entries_of
from msgspec.structs import replace

from valved.abi.kv_link import KvHow, KvNeed, KvOp, KvSpan
from valved.abi.link import LinkType
from valved.config import MIB, Config, MemoryTable
from valved.kv.moves import MovePlan
from valved.kv.pool import Place, PlannedRows
from valved.kv.slots import NO_HANDLE, NOTHING, KvRangeBook, RangeKey, RangeSlots
from valved.model.events import EventKind
from valved.model.ids import GpuIndex, Remap, Role

MEMORY = MemoryTable(handle_mib=2, remap=Remap.SPARSE, headroom_min_mib=2, headroom_max_mib=8, pool_mib=40)
GPU = GpuIndex(0)


def node(folder, remap=Remap.SPARSE):
    return KvWorld(folder, config=Config(memory=replace(MEMORY, remap=remap)), handles=20)


@pytest.fixture(params=[Remap.SPARSE, Remap.HELPER], ids=lambda remap: remap.value)
def world(request, tmp_path):
    world = node(tmp_path, request.param)
    yield world
    world.check()


def rings(online, wanted=40):
    online.book["used_blocks"], online.book["wanted_blocks"] = 4, wanted
    online.say(LinkType.KV_NEED, KvNeed(wanted_blocks=wanted))


def told(hook):
    return [body for kind, body, _, _ in hook.shim.connection.sent if kind in ORDERS]


def books_of(world):
    pool, given = world.kv.books.pool, world.kv.books.orders
    engines = world.kv.books.engines.values()
    return (
        pool._place.tolist(),
        {place: list(rows) for place, rows in pool._free.items()},
        pool._next_name,
        given._next,
        list(given._under_way),
        [(engine.changes, engine.table.epoch, engine.going.tolist()) for engine in engines],
        [book.at.tolist() for book in pool.ranges.values()],
    )


def test_planning_never_changes_the_books(world):
    beside(world)
    [offline] = world.kv.books.engines_with(Role.OFFLINE)
    [online] = world.kv.books.engines_with(Role.ONLINE)
    columns = np.flatnonzero(offline.takeable())[:4]
    before = books_of(world)

    taking = world.kv.moves.plan_taking(offline, columns, KvHow.AT_ONCE)
    coming = np.concatenate([part.slots.standing() for stage in taking.stages for part in stage])
    giving = world.kv.moves.plan_giving(online, online.bare_columns()[:4], [coming])

    stages = [*taking.stages, *giving.stages]
    assert sum(len(draft.raw) for stage in stages for part in stage for draft in part.drafts)
    assert books_of(world) == before


def test_who_waits_for_memory_never_waits_for_a_packet_to_be_put_together(world, monkeypatch):
    offline, online = beside(world)
    made = []
    runs, ranges = RangeSlots.runs, world.kv.books.pool.ranges

    def runs_noted(slots, *arguments):
        if ranges.get(slots.owner.key) is slots.owner:  # not of a world that is being dropped
            made.append("made")
        return runs(slots, *arguments)

    monkeypatch.setattr(RangeSlots, "runs", runs_noted)
    for engine in world.kv.books.engines.values():
        for part in engine.parts:
            take = part.runs.take
            part.runs.take = lambda *arguments, take=take: made.append("made") or take(*arguments)
    for hook in offline, online:
        on_send = hook.shim.connection.on_send
        hook.shim.connection.on_send = lambda kind, body, *rest, on_send=on_send: (
            made.append(getattr(body, "op", None)),
            on_send(kind, body, *rest),
        )

    rings(online)
    assert made == ["made"]  # for all stages at once
    world.run(100)

    assert world.events(EventKind.RECLAIMED)[-1].detail["freed"]
    stages = made.count(KvOp.QUARANTINE)
    assert made[1 : 1 + 2 * stages] == [KvOp.QUARANTINE] * stages + ["made"] * stages
    last = len(made) - made[::-1].index(KvOp.BACK)  # behind it a look foresees the next one
    assert set(made[1 + 2 * stages : last]) == {KvOp.BACK}


def test_nobody_ever_hears_of_a_plan_before_the_driver_has_stopped_the_gpu(world):
    offline, online = beside(world)
    world.gate.deaf.add(GPU)
    before = told(offline), told(online), offline.table["epoch"][0]

    rings(online)
    world.run(500)
    assert (told(offline), told(online), offline.table["epoch"][0]) == before

    world.gate.deaf.clear()


def test_a_plan_for_a_stop_that_fails_is_never_carried_out(world):
    offline, online = beside(world)
    world.gate.deaf.add(GPU)
    backed, told_before = offline.backed().tolist(), told(offline)

    rings(online)
    world.run(1500)

    assert world.events(EventKind.RECLAIMED)[-1].reason == "the GPU could not be stopped"
    assert offline.backed().tolist() == backed
    assert told(offline) == told_before
    [engine] = world.kv.books.engines_with(Role.OFFLINE)
    assert not engine.going.any()
    world.gate.deaf.clear()
    world.run(3000)


def test_what_is_pinned_after_it_was_planned_is_never_taken(world):
    offline, online = beside(world)
    rings(online)
    [engine] = world.kv.books.engines_with(Role.OFFLINE)
    first = int(engine.queue.columns[0])
    offline.shim.say(LinkType.KV_PIN, KvSpan(range=0, offset=first * 2 * MIB, bytes=2 * MIB))
    world.run(200)

    assert world.events(EventKind.RECLAIMED)[-1].detail["freed"]
    assert first * 4 in offline.backed().tolist()


def test_handles_that_come_otherwise_than_expected_never_spoil_what_is_given(world, monkeypatch):
    """Somebody else's memory is freed while the victims' is being taken."""
    _, online = beside(world)
    pool = world.kv.books.pool
    expected = []
    pick = PlannedRows.pick

    def guessed(planned, *arguments):
        """None of what is free by then."""
        rows = pick(planned, *arguments)
        expected.append(rows)
        return np.flatnonzero(pool._place == Place.MAPPED)[-len(rows) :]

    monkeypatch.setattr(PlannedRows, "pick", guessed)
    rings(online)
    world.run(200)

    assert expected
    assert len(online.backed()) >= 40


@pytest.mark.parametrize("order", [1, -1], ids=["as planned", "the other way round"])
def test_a_plan_is_never_thrown_away_because_its_handles_are_free_in_another_order(tmp_path, monkeypatch, order):
    """All stages at once: the pool gives what became free last, so the first stage would get the last one's handles."""
    world = node(tmp_path)
    beside(world)
    [offline], [online] = (world.kv.books.engines_with(role) for role in (Role.OFFLINE, Role.ONLINE))
    pool, moves = world.kv.books.pool, world.kv.moves
    [slots] = offline.cells(np.flatnonzero(offline.takeable())[:4], backed=True)
    rows, half = slots.standing(), len(slots) // 2
    plan = moves.plan_giving(online, online.bare_columns()[:4], [rows[:half], rows[half:]])
    planned = [draft for stage in plan.stages for part in stage for draft in part.drafts]
    pool.lift(slots[::order])
    monkeypatch.setattr(RangeSlots, "runs", lambda *_: pytest.fail("a packet was made anew"))

    ahead, left = moves.give_ahead(plan)
    given = [*ahead, *moves.give_columns(online, left.columns, left)]

    assert len(ahead) == len(plan.stages) - 1 > 0
    assert [order.names.tolist() for order in given] == [draft.names.tolist() for draft in planned]
    assert all(np.array_equal(order.names, pool.names(order.rows)) for order in given)
    pool.check_integrity()


def test_no_packet_ever_names_a_handle_whose_place_in_the_pool_is_another_ones_by_now(world):
    """A free one went back to the driver after it was put together, and another came."""
    beside(world)
    [engine] = world.kv.books.engines_with(Role.ONLINE)
    pool, moves, columns = world.kv.books.pool, world.kv.moves, engine.bare_columns()[:1]
    plan = moves.plan_giving(engine, columns, [NOTHING])
    another_comes(pool, engine.places[0], pool.trim(GPU, 1))

    orders = moves.give_columns(engine, columns, plan)

    assert sum(len(order.rows) for order in orders) == 1
    assert all(np.array_equal(order.names, pool.names(order.rows)) for order in orders)


def another_comes(pool, beside_book, count):
    """Made, and free again: its range is gone."""
    book = KvRangeBook(
        key=RangeKey(beside_book.key.client, 99),
        gpu=GPU,
        domain=beside_book.domain,
        base=0,
        handle_bytes=pool.handle_bytes,
        is_elastic=False,
        at=np.full(count, NO_HANDLE, np.int64),
    )
    pool.add_range(book)
    pool.create(pool.name(count), [lend() for _ in range(count)], RangeSlots.of_range(book, np.arange(count)))
    pool.drop_range(book.key)


@pytest.mark.parametrize("remap", [Remap.SPARSE, Remap.HELPER])
def test_a_plan_never_says_anything_else_than_what_would_be_worked_out_afterwards(tmp_path, monkeypatch, remap):
    def said(folder):
        folder.mkdir()
        world = node(folder, remap)
        offline, online = beside(world)
        for wanted in (24, 40, 56):
            rings(online, wanted)
            world.run(300)
        world.check()
        return [
            [(body.order, body.op, body.how, [entry[1:] for entry in entries_of(body)]) for body in told(hook)]
            for hook in (offline, online)
        ]

    planned = said(tmp_path / "planned")
    monkeypatch.setattr(MovePlan, "takes", lambda plan, columns: False)
    monkeypatch.setattr(MovePlan, "gives", False)

    assert planned == said(tmp_path / "afterwards")
