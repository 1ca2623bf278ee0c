"""KV ranges and orders on the emulated GPU: what is mapped where, and whose bytes are read there."""

from __future__ import annotations

import pytest
from fake_daemon import KV_RANGE_DEL, OFFLINE, RUN, STOP, until
from kv_pool import BACK, CREATE, EEXIST, EINVAL, ELASTIC, ESTALE, MIB, QUARANTINE, UNBACK, ZERO, Entry

H = 2 * MIB  # a handle


@pytest.fixture
def four(kv_world):
    """An engine with a range of four backed slots, each page tagged with 7."""
    made = kv_world(OFFLINE)
    pool = made.begin()
    engine, client = made.engine()
    address = engine.alloc(4 * H, ELASTIC)
    engine.tag(address, 4 * H, 7)
    return pool, engine, client, made.range_of(pool).range, address


def tagged(engine, address, slots, value=7):
    """Which of the slots carry the tag in all their pages."""
    return [slot for slot in slots if engine.wrong_pages(address + slot * H, H, value) == 0]


def test_an_allocation_in_a_bracket_is_a_range_that_valved_backs(kv_world):
    made = kv_world()
    pool = made.begin()
    engine, _ = made.engine()

    address = engine.alloc(3 * H + 1, 0)

    told = made.range_of(pool)
    assert (told.base, told.slots, told.handle_bytes, told.flags, told.held) == (address, 4, H, 0, 0)
    assert any(told.gpu_uuid)
    assert engine.touch(address, 4 * H) == 0
    assert len(pool.fds) == 4


def test_quarantined_slots_read_as_zero_and_can_be_written_without_harm(four):
    pool, engine, client, number, address = four

    done = pool.order(client, QUARANTINE, number, [Entry(1), Entry(2)])

    assert (done.done, done.status) == (2, 0)
    assert tagged(engine, address, range(4)) == [0, 3]
    assert engine.read(address + H, 64) == "00" * 64
    assert engine.touch(address, 4 * H) == 0


def test_a_handle_that_comes_back_without_zeroing_has_its_bytes(four):
    pool, engine, client, number, address = four
    names = list(pool.fds)
    pool.order(client, QUARANTINE, number, [Entry(1), Entry(2)])

    pool.give(client, number, {1: names[2], 2: names[1]}, zero=False)

    assert tagged(engine, address, range(4)) == [0, 1, 2, 3]


@pytest.mark.parametrize(("fills", "byte"), [("works", "00"), ("silent", "ff")])
def test_what_new_memory_held_is_seen_by_nobody(kv_world, fills, byte):
    """The card hands out NaN, which would spoil every request that shares a block with it. A card that fills nothing
    shows that it is our zeroing, of handles and of the page behind lost slots, that keeps it away.
    """
    made = kv_world(OFFLINE)
    pool = made.begin()
    made.emulator.set(poison="255", fills=fills)
    try:
        engine, client = made.engine()
        address = engine.alloc(4 * H, ELASTIC)
        number = made.range_of(pool).range
        pool.order(client, QUARANTINE, number, [Entry(0), Entry(1), Entry(3)])
        pool.create(client, number, [0, 3], zero=True)
    finally:
        made.emulator.set(poison="0", fills="works")

    assert {engine.read(address + slot * H + at, 64) for slot in (0, 1, 3) for at in (0, H - 64)} == {byte * 64}


def test_a_handle_is_zeroed_before_its_new_owner_is_told(four):
    pool, engine, client, number, address = four
    names = list(pool.fds)
    pool.order(client, QUARANTINE, number, [Entry(1)])

    done = pool.give(client, number, {1: names[1]}, zero=True)

    assert (done.done, done.status) == (1, 0)
    assert engine.read(address + H, H) == "00" * H


def test_memory_goes_from_one_process_to_another_by_its_descriptor(four, kv_world):
    pool, engine, client, number, address = four
    other = kv_world()
    theirs = other.begin(initial=0)
    online, reader = other.engine()
    target = online.alloc(H, ELASTIC)
    name = next(iter(pool.fds))
    pool.order(client, QUARANTINE, number, [Entry(0)])

    theirs.fds[name] = pool.fds.pop(name)
    done = theirs.give(reader, other.range_of(theirs).range, {0: name}, zero=False)

    assert (done.done, done.status) == (1, 0)
    assert tagged(online, target, [0]) == [0]
    assert tagged(engine, address, [0]) == []


def test_an_elastic_range_has_no_hole_where_it_is_not_backed(kv_world):
    made = kv_world(OFFLINE)
    pool = made.begin(initial=1)
    engine, _ = made.engine()

    address = engine.alloc(5 * H, ELASTIC)

    assert engine.clear(address, 5 * H) == 0
    assert len(pool.fds) == 1


def test_unbacked_slots_are_holes(four):
    pool, engine, client, number, address = four

    done = pool.order(client, UNBACK, number, [Entry(2), Entry(3)])

    assert (done.done, done.status) == (2, 0)
    assert tagged(engine, address, [0, 1]) == [0, 1]
    assert engine.touch(address + 2 * H, H) == 700


def test_slots_that_were_holes_are_backed_again(four):
    pool, engine, client, number, address = four
    pool.order(client, UNBACK, number, [Entry(2), Entry(3)])

    pool.create(client, number, [3, 2], zero=True)

    assert engine.touch(address, 4 * H) == 0


def test_memory_is_physically_gone_when_pool_and_process_let_go(four, emulated_gpus):
    pool, _, client, number, _ = four
    before = emulated_gpus.state().used_bytes()

    pool.order(client, QUARANTINE, number, [Entry(1), Entry(2)])
    for name in list(pool.fds)[1:3]:
        pool.forget(name)

    assert emulated_gpus.wait(lambda state: state.used_bytes() == before - 2 * H, "two handles are free")


@pytest.mark.parametrize(
    ("op", "entries", "done", "status"),
    [
        (QUARANTINE, [Entry(0), Entry(4)], 1, EINVAL),
        (BACK, [Entry(0, 99, CREATE)], 0, EEXIST),
        (UNBACK, [Entry(1 << 31)], 0, EINVAL),
        (QUARANTINE, [], 0, 0),
        (QUARANTINE, [Entry(1), Entry(1)], 2, 0),
    ],
    ids=["beyond the end", "backed already", "far beyond", "nothing", "twice"],
)
def test_an_order_says_how_far_it_came_and_why_no_further(four, op, entries, done, status):
    pool, engine, client, number, address = four

    answer = pool.order(client, op, number, entries)

    assert (answer.done, answer.status, answer.fds) == (done, status, ())
    assert tagged(engine, address, [2, 3]) == [2, 3]


def test_an_order_for_a_range_that_is_gone_is_stale(four):
    pool, engine, client, number, address = four
    assert engine.free(address) == 0

    done = pool.order(client, BACK, number, [Entry(0, 5, CREATE | ZERO)])

    assert (done.done, done.status, done.fds) == (0, ESTALE, ())
    client.expect(KV_RANGE_DEL, range=number)


def test_the_mapping_of_many_ranges_ends_while_the_channels_are_off(kv_world):
    """Memory is lent to all layers of an engine while it stands: zeroing waits, mapping does not."""
    made = kv_world(OFFLINE)
    pool = made.begin(limit=40, initial=0)
    engine, client = made.engine()
    for _ in range(33):
        engine.alloc(H, ELASTIC)
    numbers = [made.range_of(pool).range for _ in range(33)]
    stop = client.give_order(STOP)
    until(lambda: client.region.order_done == stop, "stopped")

    orders = [pool.send(client, BACK, number, [Entry(0, 500 + number, CREATE | ZERO)]) for number in numbers]
    fence = pool.send(client, BACK, numbers[0], [])

    assert pool.answer().order == fence
    client.give_order(RUN)
    answers = [pool.answer() for _ in orders]
    assert {answer.order for answer in answers} == set(orders)
    for answer in answers:
        answer.close()
