"""Orders that fail half way, valved's mistakes, and what must not leak or block then."""

from __future__ import annotations

import os
import struct
import threading
from contextlib import contextmanager

import pytest
from fake_daemon import KV_ORDER, KV_RANGE_DEL, OFFLINE, RUN, STOP, obey, until
from kv_pool import (
    AT_STEP,
    BACK,
    CREATE,
    EIO,
    ELASTIC,
    EMFILE,
    ENOMEM,
    ENTRIES,
    MIB,
    QUARANTINE,
    TAG,
    UNBACK,
    ZERO,
    Entry,
    order_body,
    tagged,
)

H = 2 * MIB
EAGAIN = 11
NO_RANGE = 999_999


@pytest.fixture
def eight(kv_world):
    """An offline engine with eight backed slots, tagged."""
    world = kv_world(OFFLINE)
    pool = world.begin()
    engine, client = world.engine()
    address = engine.alloc(8 * H, ELASTIC)
    engine.tag(address, 8 * H, TAG)
    return pool, engine, client, world.range_of(pool).range, address


@contextmanager
def fault(emulator, *lines):
    emulator.fault(*lines)
    yield
    emulator.clear_faults()


# -- the driver refuses --


@pytest.mark.parametrize("at", [1, 3])
@pytest.mark.parametrize(
    ("event", "status"), [("alloc", ENOMEM), ("map", EIO), ("unmap", None)], ids=["create", "set access", "unmap"]
)
def test_what_the_driver_refuses_half_way_is_put_back(eight, emulated_gpus, event, status, at):
    """Slots 1, 3, 5, 7 apart, so that each has its own calls; the rest must not notice."""
    pool, engine, client, number, address = eight
    before = emulated_gpus.state().used_bytes() - 4 * H
    pool.order(client, QUARANTINE, number, [Entry(slot) for slot in (1, 3, 5, 7)])
    for name in sorted(pool.fds)[1::2]:
        pool.forget(name)
    fds = engine.fds()

    with fault(emulated_gpus, f"on {event} {at}: status 0x51"):
        done = pool.order(client, BACK, number, [Entry(slot, 90 + slot, CREATE) for slot in (1, 3, 5, 7)])

    if status is not None:
        assert (done.done, done.status) == (at - 1, status)
    assert len(done.fds) == done.done
    done.close()
    assert emulated_gpus.wait(lambda state: state.used_bytes() == before + done.done * H, "no more")
    until(lambda: engine.fds() == fds, "its own copies are closed, too")
    assert tagged(engine, address) == [0, 2, 4, 6]
    assert engine.touch(address, 8 * H) == 0


def test_a_slot_that_gave_its_handle_up_never_counts_as_mapped_nor_stays_a_hole(eight, emulated_gpus):
    """Its zero page was refused once: then it shows it; twice: then valved has the handle, and says what is lost."""
    pool, engine, client, number, address = eight
    with fault(emulated_gpus, "on map 2: status 0x51"):
        once = pool.order(client, QUARANTINE, number, [Entry(1), Entry(3)])
    assert (once.done, once.status) == (2, 0)
    assert engine.touch(address, 8 * H) == 0

    with fault(emulated_gpus, "on map 1: status 0x51", "on map 2: status 0x51"):
        twice = pool.order(client, QUARANTINE, number, [Entry(5), Entry(7)])
    assert (twice.done, twice.status) == (1, EIO)
    assert tagged(engine, address, (0, 2, 4, 6, 7)) == [0, 2, 4, 6, 7]


def test_memory_that_runs_out_half_way_says_how_far_it_came(eight, emulated_gpus):
    pool, engine, client, number, address = eight
    before = emulated_gpus.state().used_bytes()
    pool.order(client, UNBACK, number, [Entry(slot) for slot in range(8)])
    pool.close()
    state = emulated_gpus.wait(lambda state: state.used_bytes() == before - 8 * H, "the handles are free")
    total = state.raw["gpus"][0]["total_bytes"]
    hog = engine.alloc(total - state.used_bytes() - 3 * H)

    done = pool.order(client, BACK, number, [Entry(slot, 50 + slot, CREATE | ZERO) for slot in range(8)])

    assert (done.done, done.status, len(done.fds)) == (3, ENOMEM, 3)
    assert engine.touch(address, 3 * H) == 0
    done.close()
    assert engine.free(hog) == 0


def test_a_descriptor_that_is_no_handle_is_refused_where_it_stands(eight):
    pool, engine, client, number, address = eight
    names = sorted(pool.fds)
    pool.order(client, QUARANTINE, number, [Entry(0), Entry(1)])
    stranger = os.memfd_create("stranger")
    entries = [Entry(0, names[0], 0, pool.fds[names[0]]), Entry(1, 99, 0, stranger)]

    done = pool.order(client, BACK, number, entries)
    os.close(stranger)

    assert (done.done, done.status) == (1, EIO)
    assert done.cu_result != 0
    assert tagged(engine, address) == [0, 2, 3, 4, 5, 6, 7]
    assert engine.touch(address, 8 * H) == 0


def test_a_process_without_room_for_descriptors_says_so_and_keeps_its_link(eight):
    pool, engine, client, number, address = eight
    names = sorted(pool.fds)
    pool.order(client, QUARANTINE, number, [Entry(slot) for slot in range(8)])
    engine.limit_fds(len(engine.fds()))  # three of them are the shim's and lie high: as much room below

    done = pool.order(client, BACK, number, [Entry(slot, names[slot], 0, pool.fds[names[slot]]) for slot in range(8)])

    assert (done.done, done.status) == (0, EMFILE)
    done = pool.order(client, BACK, number, [Entry(0, names[0], 0, pool.fds[names[0]])])
    assert (done.done, done.status) == (1, 0)
    assert tagged(engine, address) == [0]


# -- valved makes no sense --

ORDER_BYTES = 1048


def raw(number=1, op=QUARANTINE, range_id=1, how=0, count=1, entry=(0, 0, 0)):
    body = struct.pack("<QIHHII", number, range_id, op, how, count, 0) + struct.pack("<QII", *entry)
    return body.ljust(ORDER_BYTES, b"\0")


@pytest.mark.parametrize(
    "body",
    [
        raw(op=0),
        raw(op=5),
        raw(how=3),
        raw(op=4, count=1),
        raw(op=4, how=1, count=0),
        raw(op=3, how=2),
        raw(count=ENTRIES + 1),
        raw(count=0xFFFFFFFF),
        raw(op=BACK, entry=(1, 0, 4)),
        raw(op=QUARANTINE, entry=(1, 0, ZERO)),
        raw(op=BACK, entry=(1, 0, 0)),
        raw()[:-1],
        raw() + b"x",
        b"",
    ],
    ids=[
        "op 0",
        "op 5",
        "how",
        "slots to try",
        "try at a step",
        "unback outside",
        "count",
        "wild count",
        "flag",
        "zero what",
        "no fd",
        "short",
        "long",
        "empty",
    ],
)
def test_a_malformed_order_ends_the_link_and_nothing_else(eight, body):
    pool, engine, client, number, address = eight

    client.send(KV_ORDER, 0, body)

    again = pool.daemon.client()  # it comes back, and tells what it holds
    assert again is not client
    held = pool.held.get(timeout=200)
    assert (held.range, held.count) == (number, 8)
    assert len(tagged(engine, address)) == 8
    held.close()


def test_descriptors_that_nobody_announced_end_the_link_and_do_not_leak(eight):
    pool, engine, client, number, _ = eight
    before = engine.fds()
    extra = os.memfd_create("extra")

    client.send(KV_ORDER, 0, order_body(1, QUARANTINE, number, [Entry(0)]), [extra] * 5)

    pool.daemon.client()
    pool.held.get(timeout=200).close()
    until(lambda: len(engine.fds()) <= len(before), "closed")
    os.close(extra)


def test_more_orders_than_fit_are_refused_by_name(eight, emulated_gpus):
    pool, _, client, number, _ = eight
    count = 1100

    with fault(emulated_gpus, "on unmap 1: hold"):
        first = pool.send(client, QUARANTINE, number, [Entry(0)])
        emulated_gpus.wait_held()
        sent = [pool.send(client, QUARANTINE, number, [Entry(1)]) for _ in range(count)]
        refused = pool.answer()
        emulated_gpus.release()

    assert refused.status == EAGAIN
    answers = {refused.order: refused.status}
    while len(answers) < count + 1:
        message = pool.answer()
        answers[message.order] = message.status
    assert answers[first] == 0
    assert set(answers) == {first, *sent}
    assert 0 < sum(status == EAGAIN for status in answers.values()) < 200


# -- free while an order is carried out --


def test_a_free_waits_for_the_order_in_progress(eight, emulated_gpus):
    pool, engine, client, number, address = eight
    with fault(emulated_gpus, "on unmap 1: hold"):
        pool.send(client, QUARANTINE, number, [Entry(0), Entry(1)])
        emulated_gpus.wait_held()
        engine.begin("free", address)

        assert not engine.has_ended("free")
        emulated_gpus.release()

        assert engine.end("free") == 0
    assert pool.answer().done == 2
    client.expect(KV_RANGE_DEL, range=number)


def test_a_free_waits_for_zeroing(eight):
    pool, engine, client, number, address = eight
    pool.order(client, QUARANTINE, number, [Entry(0)])
    obey(client, STOP)
    pool.send(client, BACK, number, [Entry(0, 77, CREATE | ZERO)])

    engine.begin("free", address)
    assert not engine.has_ended("free")
    obey(client, RUN)

    assert engine.end("free") == 0
    pool.answer().close()
    client.expect(KV_RANGE_DEL, range=number)


def test_a_free_never_waits_for_a_valved_that_does_not_read(eight):
    """Its socket is full of answers, and the memory thread cannot tell of the zeroing that the free waits for."""
    pool, engine, client, number, address = eight
    pool.order(client, QUARANTINE, number, [Entry(0)])
    obey(client, STOP)
    pool.send(client, BACK, number, [Entry(0, 77, CREATE | ZERO)])
    goes_on, answer = threading.Event(), pool.daemon.on_message
    pool.daemon.on_message = lambda *heard: goes_on.wait() and answer(*heard)
    for _ in range(900):
        pool.send(client, QUARANTINE, NO_RANGE, [Entry(0)])

    engine.begin("free", address)
    obey(client, RUN)

    assert engine.end("free") == 0
    goes_on.set()


def test_a_context_that_goes_waits_for_zeroing_in_it(eight):
    pool, engine, client, number, _ = eight
    pool.order(client, QUARANTINE, number, [Entry(0)])
    obey(client, STOP)
    pool.send(client, BACK, number, [Entry(0, 77, CREATE | ZERO)])

    engine.begin("reset_context")
    assert not engine.has_ended("reset_context")
    obey(client, RUN)

    assert engine.end("reset_context") == 0
    pool.answer().close()
    client.expect(KV_RANGE_DEL, range=number)


# -- gated --


def test_a_stopped_client_quarantines(eight):
    pool, engine, client, number, address = eight
    obey(client, STOP)

    done = pool.order(client, QUARANTINE, number, [Entry(2)])

    assert (done.done, done.status) == (1, 0)
    obey(client, RUN)
    assert tagged(engine, address) == [0, 1, 3, 4, 5, 6, 7]


def test_zeroing_that_waits_for_the_gate_does_not_hold_up_a_quarantine(eight):
    pool, engine, client, number, address = eight
    name = sorted(pool.fds)[0]
    pool.order(client, QUARANTINE, number, [Entry(0)])
    obey(client, STOP)
    zeroing = pool.send(client, BACK, number, [Entry(0, name, ZERO, pool.fds[name])])

    done = pool.order(client, QUARANTINE, number, [Entry(5)])
    assert (done.done, done.status) == (1, 0)
    assert pool.done.empty()

    obey(client, RUN)
    assert pool.answer().order == zeroing
    assert tagged(engine, address) == [1, 2, 3, 4, 6, 7]
    assert engine.read(address, 64) == "00" * 64


def test_an_order_for_a_slot_that_is_being_zeroed_waits_for_that(eight):
    pool, engine, client, number, _ = eight
    name = sorted(pool.fds)[0]
    pool.order(client, QUARANTINE, number, [Entry(0)])
    obey(client, STOP)
    first = pool.send(client, BACK, number, [Entry(0, name, ZERO, pool.fds[name])])
    second = pool.send(client, QUARANTINE, number, [Entry(0)])

    obey(client, RUN)

    assert [pool.answer().order, pool.answer().order] == [first, second]
    assert engine.touch(engine.alloc(H), H) == 0


def test_an_unmap_that_waits_for_a_stopped_context_leaves_the_keeper_free(kv_world):
    """The deadlock that remapping in process may meet on a card: the gate must still open."""
    world = kv_world(OFFLINE)
    pool = world.begin()
    engine, client = world.engine(cuda="unmap_waits=1")
    address = engine.alloc(4 * H, ELASTIC)
    number = world.range_of(pool).range
    obey(client, STOP)
    engine.launch_spin(100)

    pool.send(client, QUARANTINE, number, [Entry(1)])
    until(lambda: engine.process.poll() is None, "alive")
    obey(client, STOP)  # still obeyed
    assert pool.done.empty()
    obey(client, RUN)

    assert pool.answer().done == 1
    assert engine.touch(address, 4 * H) == 0


# -- between steps --


def test_an_order_for_a_step_waits_for_one_with_the_context_drained(eight):
    pool, engine, client, number, address = eight
    sent = pool.send(client, QUARANTINE, number, [Entry(1)], AT_STEP)
    behind = pool.send(client, QUARANTINE, number, [Entry(2)])
    engine.launch_spin(3000)
    assert len(tagged(engine, address)) == 8
    assert pool.done.empty()

    until(lambda: (engine.step(), not pool.done.empty())[1], "carried out")

    assert [pool.answer().order, pool.answer().order] == [sent, behind]
    assert tagged(engine, address) == [0, 3, 4, 5, 6, 7]


def test_a_step_returns_after_the_zeroing_that_it_began(eight):
    pool, engine, client, number, address = eight
    name = sorted(pool.fds)[3]
    pool.order(client, QUARANTINE, number, [Entry(3)])
    pool.send(client, BACK, number, [Entry(3, name, ZERO, pool.fds[name])], AT_STEP)

    until(lambda: (engine.step(), not pool.done.empty())[1], "carried out")

    assert pool.answer().done == 1
    assert engine.read(address + 3 * H, H) == "00" * H


def test_a_step_in_a_capture_leaves_orders_for_the_next_one(eight):
    pool, engine, client, number, _ = eight
    stream = engine.begin_capture()
    pool.send(client, QUARANTINE, number, [Entry(1)], AT_STEP)
    for _ in range(50):
        engine.step()

    assert pool.done.empty()
    assert engine.end_capture(stream) == 0
    until(lambda: (engine.step(), not pool.done.empty())[1], "carried out")


def test_a_step_with_nothing_to_do_is_nothing(eight):
    _, engine, _, _, _ = eight

    engine.step()

    assert engine.synchronize() == 0


# -- beside the application's own captures --


def test_an_order_neither_fails_in_a_capture_nor_breaks_it(eight):
    pool, engine, client, number, _ = eight
    stream = engine.begin_capture()

    done = pool.order(client, QUARANTINE, number, [Entry(0)])
    back = pool.order(client, BACK, number, [Entry(0, 80, CREATE | ZERO)])

    assert (done.done, back.done) == (1, 1)
    assert engine.end_capture(stream) == 0
    back.close()
