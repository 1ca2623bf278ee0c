"""valved goes and comes back, or a process dies, at every step of an order: no handle is lost, none has two owners."""

from __future__ import annotations

import pytest
from fake_daemon import CHANNEL_ADD, KV_HELD, KV_PIN, KV_RANGE, KV_RANGE_DEL, OFFLINE, RUN, STOP, obey, until
from kv_pool import BACK, CREATE, ELASTIC, ENTRIES, MIB, QUARANTINE, TAG, ZERO, Entry, tagged, unpack_entries

H = 2 * MIB


@pytest.fixture
def world(kv_world):
    return kv_world(OFFLINE)


def begin(world, slots=8):
    pool = world.begin(limit=slots)
    engine, client = world.engine()
    address = engine.alloc(slots * H, ELASTIC)
    engine.tag(address, slots * H, TAG)
    return pool, engine, client, world.range_of(pool).range, address


def told(pool, count):
    """Slot to (handle, descriptor) of `count` slots."""
    found = {}
    while len(found) < count:
        message = pool.held.get(timeout=200)
        for (handle, slot, _), fd in zip(unpack_entries(message), message.take_fds(), strict=True):
            found[slot] = (handle, fd)
            pool.fds[-len(pool.fds) - 1] = fd
    return found


def test_a_new_valved_is_told_what_is_mapped_where(world):
    pool, _, client, number, address = begin(world)
    names = sorted(pool.fds)
    pool.order(client, QUARANTINE, number, [Entry(2), Entry(5)])
    world.daemons[-1].close()
    again = world.begin()

    range_told = world.range_of(again)
    held = told(again, 6)

    assert (range_told.range, range_told.base, range_told.slots) == (number, address, 8)
    assert (range_told.held, range_told.flags) == (6, ELASTIC)
    assert {slot: handle for slot, (handle, _) in held.items()} == {
        slot: names[slot] for slot in range(8) if slot not in {2, 5}
    }


def test_what_it_is_told_is_the_memory_itself(world, kv_world):
    pool, engine, _, _, _ = begin(world)
    pool.close()  # as if the descriptors had died with it
    world.daemons[-1].close()
    again = world.begin()
    _, fd = told(again, 8)[3]
    other = kv_world()
    theirs = other.begin(initial=0)
    reader, client = other.engine()
    target = reader.alloc(H, ELASTIC)

    done = theirs.order(client, BACK, other.range_of(theirs).range, [Entry(0, 5, 0, fd)])

    assert done.done == 1
    assert reader.wrong_pages(target, H, TAG) == 0
    assert engine.process.poll() is None


def test_many_slots_are_told_in_packets(world):
    pool, _, _, _, _ = begin(world, ENTRIES + 10)
    pool.daemon.close()
    pool.close()
    again = world.begin()

    assert set(told(again, ENTRIES + 10)) == set(range(ENTRIES + 10))


def test_no_slot_is_kept_from_a_new_valved_for_ever_for_want_of_a_descriptor(world):
    """After the first packet the process has no descriptor at all, and later some."""
    count = ENTRIES + 10
    pool, engine, client, _, address = begin(world, count)
    engine.retain(address)
    client.expect(KV_PIN)
    pool.daemon.close()
    pool.close()
    again = world.begin()
    take = again.take

    def take_once(client, message):
        if message.type == KV_HELD:
            engine.limit_fds(3)
            again.daemon.on_message = take
        return take(client, message)

    again.daemon.on_message = take_once
    found = told(again, 1)
    world.daemons[-1].client().expect(KV_PIN)  # the look at the slots is over
    engine.limit_fds(1024)

    found |= told(again, count - len(found))
    assert set(found) == set(range(count))


def test_no_number_that_a_launch_may_ring_is_ever_free_for_a_file_of_the_application(world):
    """The application has lowered its limit, so the bells of the next valved lie elsewhere."""
    _, engine, _, _, _ = begin(world)
    bells = engine.bells()
    assert len(bells) == 2
    engine.limit_fds(200)
    world.daemons[-1].close()
    again = world.begin()
    told(again, 8)

    engine.limit_fds(1024)

    assert set(bells) <= set(engine.bells())


def test_while_no_valved_is_there_everything_stays(world):
    pool, engine, client, number, address = begin(world)
    pool.order(client, QUARANTINE, number, [Entry(1)])

    world.daemons[-1].close()

    assert tagged(engine, address) == [0, 2, 3, 4, 5, 6, 7]
    assert engine.touch(address, 8 * H) == 0
    assert engine.free(address) == 0


def test_a_new_valved_goes_on_with_the_range(world):
    pool, engine, client, number, address = begin(world)
    pool.order(client, QUARANTINE, number, [Entry(4)])
    pool.close()
    world.daemons[-1].close()
    again = world.begin()
    client = world.daemons[-1].client()
    told(again, 7)

    assert again.order(client, QUARANTINE, number, [Entry(0)]).done == 1
    again.create(client, number, [4], zero=True)

    assert tagged(engine, address) == [1, 2, 3, 5, 6, 7]
    assert engine.touch(address, 8 * H) == 0


def test_pins_are_told_again(world):
    _, engine, client, number, address = begin(world)
    engine.retain(address + 3 * H)
    client.expect(KV_PIN)
    world.daemons[-1].close()
    again = world.begin()

    told(again, 8)

    world.daemons[-1].client().expect(KV_PIN, range=number, offset=3 * H, bytes=H)


def test_a_valved_without_memory_hears_nothing(world):
    _, engine, _, _, address = begin(world)
    world.daemons[-1].close()
    again = world.begin()
    again.daemon.features &= ~64

    client = world.daemons[-1].client()
    client.expect(CHANNEL_ADD)

    assert client.none_of(KV_RANGE)
    assert engine.free(address) == 0
    assert client.none_of(KV_RANGE_DEL)


@pytest.mark.parametrize("event", ["alloc", "map", "unmap"])
def test_a_valved_that_dies_in_the_middle_of_an_order_leaves_no_handle_behind(world, emulated_gpus, event):
    """The order is finished, nobody hears of it; what it made is told to the next valved, or is gone."""
    pool, engine, client, number, address = begin(world)
    pool.order(client, QUARANTINE, number, [Entry(1), Entry(2)])
    emulated_gpus.fault(f"on {event} 1: hold")
    pool.send(client, BACK, number, [Entry(1, 91, CREATE), Entry(2, 92, CREATE)])
    emulated_gpus.wait_held()

    pool.close()
    world.daemons[-1].close()
    emulated_gpus.release()
    again = world.begin()
    emulated_gpus.clear_faults()
    held = told(again, 8)

    assert held[1][0] == 91
    again.close()
    used = emulated_gpus.state().used_bytes()
    assert engine.free(address) == 0
    assert emulated_gpus.wait(lambda state: state.used_bytes() == used - 8 * H, "the mappings were the last owners")


def test_orders_of_a_dead_valved_are_forgotten(world, emulated_gpus):
    pool, engine, client, number, address = begin(world)
    emulated_gpus.fault("on unmap 1: hold")
    pool.send(client, QUARANTINE, number, [Entry(0)])
    emulated_gpus.wait_held()
    pool.send(client, QUARANTINE, number, [Entry(1)])
    pool.send(client, BACK, number, [Entry(0, 99, CREATE)])

    world.daemons[-1].close()
    again = world.begin()
    world.daemons[-1].client()  # from here on the shim knows that the other has gone
    emulated_gpus.release()
    emulated_gpus.clear_faults()

    assert set(told(again, 7)) == {1, 2, 3, 4, 5, 6, 7}
    assert tagged(engine, address) == [1, 2, 3, 4, 5, 6, 7]


def test_memory_still_being_zeroed_for_a_dead_valved_is_given_up(world, emulated_gpus):
    pool, engine, client, number, address = begin(world)
    pool.order(client, QUARANTINE, number, [Entry(0)])
    pool.close()
    obey(client, STOP)
    pool.send(client, BACK, number, [Entry(0, 99, CREATE | ZERO)])
    until(lambda: emulated_gpus.state().used_bytes() == 9 * H, "made")  # seven, the zero page and this one

    world.daemons[-1].close()
    again = world.begin()
    client = world.daemons[-1].client()
    held = told(again, 7)
    obey(client, STOP)
    obey(client, RUN)

    assert set(held) == {1, 2, 3, 4, 5, 6, 7}
    assert emulated_gpus.wait(lambda state: state.used_bytes() == 8 * H, "given up")
    assert engine.touch(address, 8 * H) == 0
    assert pool.done.empty()
    assert again.done.empty()


def test_an_order_for_a_step_of_a_dead_valved_holds_nobody_up(world):
    pool, engine, client, number, address = begin(world)
    pool.send(client, QUARANTINE, number, [Entry(0)], 1)
    world.daemons[-1].close()
    again = world.begin()
    client = world.daemons[-1].client()
    told(again, 8)

    engine.step()

    assert again.order(client, QUARANTINE, number, [Entry(1)]).done == 1
    assert tagged(engine, address) == [0, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize(
    ("event", "op"),
    [("alloc", BACK), ("map", BACK), ("unmap", BACK), ("unmap", QUARANTINE), ("map", QUARANTINE)],
    ids=["creating", "mapping", "uncovering", "unmapping", "covering"],
)
def test_a_process_killed_in_the_middle_of_an_order_leaves_nothing(world, emulated_gpus, event, op):
    pool, engine, client, number, _ = begin(world)
    if op == BACK:
        pool.order(client, QUARANTINE, number, [Entry(1), Entry(2)])
    emulated_gpus.fault(f"on {event} 1: hold")
    pool.send(client, op, number, [Entry(slot, 90 + slot, CREATE if op == BACK else 0) for slot in (1, 2)])
    emulated_gpus.wait_held()

    engine.kill()
    emulated_gpus.release()
    emulated_gpus.clear_faults()

    until(client.gone.is_set, "gone")
    assert emulated_gpus.wait(lambda state: state.used_bytes() == 8 * H, "only the pool holds memory")
    pool.close()
    assert emulated_gpus.wait(lambda state: state.used_bytes() == 0, "all of it is free")


def test_restart_after_restart_nothing_grows(world, emulated_gpus):
    pool, engine, client, number, address = begin(world)
    pool.order(client, QUARANTINE, number, [Entry(6)])
    pool.close()
    before = len(engine.fds())
    for _ in range(4):
        world.daemons[-1].close()
        again = world.begin()
        world.daemons[-1].client()
        told(again, 7)
        again.close()
        until(lambda: len(engine.fds()) <= before, "what was sent along is closed, and nothing else is open")

    assert emulated_gpus.wait(lambda state: state.used_bytes() == 8 * H, "seven and the zero page")
    assert tagged(engine, address) == [0, 1, 2, 3, 4, 5, 7]
