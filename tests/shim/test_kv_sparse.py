"""Memory that valved makes sparse from outside: the trial before it, the books after it, and who may die in between."""

from __future__ import annotations

import errno

import pytest
from fake_daemon import KV_PIN, KV_RANGE_DEL, LONG_S, OFFLINE, ONLINE, RUN, STOP, obey, until
from kv_outside import Outside, attempt
from kv_pool import (
    AT_ONCE,
    AT_STEP,
    BACK,
    ELASTIC,
    MIB,
    OUTSIDE,
    QUARANTINE,
    TAG,
    TRY,
    Entry,
    order_body,
    tagged,
    unpack_entries,
)

H = 2 * MIB


@pytest.fixture
def world(kv_world):
    return kv_world(OFFLINE)


@pytest.fixture
def begun(world, emulated_gpus):
    """An engine with eight tagged slots, and somebody outside who was passed its descriptor."""
    pool = world.begin(sparse=True)
    engine, client = world.engine()
    address = engine.alloc(8 * H, ELASTIC)
    engine.tag(address, 8 * H, TAG)
    scratch = pool.scratch.get(timeout=LONG_S)
    outside = Outside(emulated_gpus, scratch)
    yield pool, engine, client, world.range_of(pool).range, address, outside, scratch
    outside.process.kill()


def take(begun, slots, *, heard=True):
    """As valved does it: told first, then done."""
    pool, _, client, number, address, outside, _ = begun
    pool.send(client, QUARANTINE, number, [Entry(slot) for slot in slots], OUTSIDE)
    for slot in slots:
        outside.sparse(address + slot * H, H)
    if heard:
        answer = pool.answer()
        assert (answer.done, answer.status) == (len(slots), 0)


def held_slots(pool, count):
    found = []
    while len(found) < count:
        message = pool.held.get(timeout=LONG_S)
        found += [slot for _, slot, _ in unpack_entries(message)]
        message.close()
    return found


def test_a_trial_sees_zeros_and_then_its_own_bytes_again(begun):
    pool, engine, client, _, address, outside, scratch = begun
    outside.sparse(scratch.base, scratch.bytes)

    statuses = [attempt(pool, client, scratch)]
    outside.sparse(scratch.base, scratch.bytes)
    statuses.append(attempt(pool, client, scratch))

    assert statuses == [0, 0]
    assert tagged(engine, address) == list(range(8))


def test_a_trial_of_what_was_not_made_sparse_fails(begun):
    pool, _, client, _, _, outside, scratch = begun

    assert attempt(pool, client, scratch) == errno.ENODATA
    outside.sparse(scratch.base, scratch.bytes)
    assert attempt(pool, client, scratch) == 0


def test_a_trial_of_the_helper_thread_uses_the_public_calls(begun):
    pool, _, client, _, _, _, scratch = begun

    assert attempt(pool, client, scratch, AT_ONCE) == 0


def test_a_trial_waits_for_channels_that_are_on_and_holds_no_order_up(begun):
    pool, engine, client, number, address, outside, scratch = begun
    obey(client, STOP)
    outside.sparse(scratch.base, scratch.bytes)
    order = pool.number()
    client.send(20, 0, order_body(order, TRY, scratch.place, [], OUTSIDE))

    assert pool.order(client, QUARANTINE, number, [Entry(1)]).done == 1
    obey(client, RUN)

    assert (pool.answer().order, pool.done.empty()) == (order, True)
    assert tagged(engine, address) == [0, 2, 3, 4, 5, 6, 7]


def test_a_trial_in_a_place_that_is_not_there_is_answered(begun):
    pool, _, client, *_ = begun
    client.send(20, 0, order_body(99, TRY, 1 << 20, [], OUTSIDE))

    assert pool.answer().status == errno.ESTALE


@pytest.mark.parametrize("role", [OFFLINE, ONLINE])
def test_nobody_passes_a_descriptor_who_is_not_asked(kv_world, role):
    made = kv_world(role)
    pool = made.begin(sparse=role == ONLINE)
    engine, client = made.engine()
    address = engine.alloc(2 * H, ELASTIC)

    assert engine.free(address) == 0
    if role == OFFLINE:  # an online process may have given up on a slow valved, and is asked for nothing either way
        client.expect(KV_RANGE_DEL)
    assert pool.scratch.empty()


def test_what_was_taken_from_outside_reads_zero_and_takes_writes_without_harm(begun):
    _, engine, _, _, address, *_ = begun
    take(begun, [1, 2])

    assert engine.touch(address, 8 * H) == 0
    assert tagged(engine, address) == [0, 3, 4, 5, 6, 7]
    assert engine.read(address + H, 64) == "00" * 64
    assert engine.address_range(address + H) == [0, address, 8 * H]


def test_memory_comes_back_with_its_bytes(begun):
    pool, engine, client, number, address, *_ = begun
    names = list(pool.fds)
    take(begun, [1, 2])
    engine.touch(address, 8 * H)

    done = pool.give(client, number, {1: names[1], 2: names[2]}, zero=False)

    assert (done.done, done.status) == (2, 0)
    assert tagged(engine, address) == list(range(8))


def test_backing_lets_go_of_the_old_handle(begun, emulated_gpus):
    """libcuda held it through its stale mapping; then nobody does but the pool."""
    pool, _, client, number, _, *_ = begun
    names, used = list(pool.fds), emulated_gpus.state().used_bytes()
    take(begun, [1])
    pool.create(client, number, [1])
    pool.forget(names[1])

    assert emulated_gpus.wait(lambda state: state.used_bytes() == used, "one came and one went")


def test_a_quarantine_the_usual_way_ends_what_is_sparse(begun):
    """What valved falls back to when the driver refused it: nothing was made sparse, although it was told."""
    pool, engine, client, number, address, *_ = begun
    pool.send(client, QUARANTINE, number, [Entry(3)], OUTSIDE)

    assert pool.answer().done == 1
    assert tagged(engine, address) == list(range(8))
    assert pool.order(client, QUARANTINE, number, [Entry(3)]).done == 1
    assert tagged(engine, address) == [0, 1, 2, 4, 5, 6, 7]


def test_a_range_with_sparse_slots_can_be_freed(begun):
    _, engine, _, _, address, *_ = begun
    take(begun, [0, 4, 7])

    assert engine.free(address) == 0


def test_a_process_whose_memory_was_taken_can_die(begun, emulated_gpus):
    pool, engine, _, _, _, outside, scratch = begun
    take(begun, [0, 4, 7])
    engine.kill()
    scratch.close()
    outside.process.call("close", fd=outside.fd)

    pool.close()

    assert emulated_gpus.wait(lambda state: state.used_bytes() == 0, "all of it is free")


def test_the_books_change_although_valved_died_before_anybody_read_its_word(begun, world):
    """The order is still in the socket when the link breaks: the next valved must not be told that memory is there."""
    pool, engine, client, number, address, *_ = begun
    pool.send(client, QUARANTINE, number, [Entry(0)], AT_STEP)  # an order in front that waits for ever
    take(begun, [2, 5], heard=False)
    world.daemons[-1].close()
    again = world.begin(sparse=True)

    told = world.range_of(again)

    assert told.held == 6
    assert set(held_slots(again, 6)) == {0, 1, 3, 4, 6, 7}
    assert tagged(engine, address) == [0, 1, 3, 4, 6, 7]


def test_after_a_restart_the_next_step_lets_go_of_what_a_dead_valved_took(begun, world, emulated_gpus):
    pool, engine, _, _, address, *_ = begun
    take(begun, [2, 5])
    used = emulated_gpus.state().used_bytes()
    pool.close()
    world.daemons[-1].close()
    again = world.begin(sparse=True)
    held_slots(again, 6)
    world.daemons[-1].client()
    assert emulated_gpus.state().used_bytes() == used  # held by libcuda, for nobody

    until(lambda: engine.step() or emulated_gpus.state().used_bytes() == used - 2 * H, "two handles are free")

    assert engine.touch(address, 8 * H) == 0
    again.create(world.daemons[-1].alive[-1], world.pools[-1].ranges[-1].range, [2, 5], zero=True)


def test_the_scratch_is_told_to_every_valved_that_asks(begun, world):
    world.daemons[-1].close()
    again = world.begin(sparse=True)

    message = again.scratch.get(timeout=LONG_S)

    assert len(message.fds) == 1
    message.close()


def test_what_leaves_the_process_asks_first(begun):
    """A pin that crosses with an order would come too late."""
    pool, engine, _, _, address, *_ = begun
    asked = []

    def take_pin(who, message):
        if message.type == KV_PIN and message.seq:
            asked.append(message.offset)
            who.ack(message, errno.EBUSY if message.offset == H else 0)
            return True
        return pool.take(who, message)

    pool.daemon.on_message = take_pin

    codes = [engine.retain(address + H), engine.retain(address + 2 * H)]

    assert codes == [801, 0]
    assert asked[:2] == [H, 2 * H]


def test_memory_that_was_taken_does_not_leave(begun):
    _, engine, _, _, address, *_ = begun
    take(begun, [1])

    assert engine.retain(address + H) == 801
    assert engine.export_range(address, 4 * H)[0] == 801


def test_an_order_that_no_valved_would_send_ends_the_link(begun):
    _, engine, client, number, address, *_ = begun
    client.send(20, 0, order_body(1, BACK, number, [Entry(0)], OUTSIDE))

    until(client.gone.is_set, "gone")
    assert tagged(engine, address) == list(range(8))


def test_a_trial_that_harms_the_memory_beside_it_fails(begun):
    pool, engine, client, _, address, outside, scratch = begun
    outside.sparse(scratch.base, scratch.bytes + H)

    assert attempt(pool, client, scratch) == errno.EFAULT
    assert tagged(engine, address) == list(range(8))


def test_a_trial_that_is_refused_halfway_costs_nothing_but_the_trial(begun, emulated_gpus):
    """Nothing else of the process changes, it goes on by the other way, and leaves nothing behind."""
    pool, engine, client, number, address, outside, scratch = begun
    used = emulated_gpus.state().used_bytes()
    outside.sparse(scratch.base, scratch.bytes)
    emulated_gpus.fault("on map 1: status 0x1f")

    assert attempt(pool, client, scratch) == errno.EIO
    emulated_gpus.clear_faults()
    assert tagged(engine, address) == list(range(8))
    assert emulated_gpus.state().used_bytes() == used
    assert pool.order(client, QUARANTINE, number, [Entry(1)]).done == 1
    assert tagged(engine, address) == [0, 2, 3, 4, 5, 6, 7]
    engine.kill()
    scratch.close()
    outside.process.call("close", fd=outside.fd)
    pool.close()
    assert emulated_gpus.wait(lambda state: state.used_bytes() == 0, "all of it is free")
