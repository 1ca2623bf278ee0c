"""Before an engine step over elastic memory the shim asks valved: no step begins unawares on a hole."""

from __future__ import annotations

import errno
import socket

import pytest
from fake_daemon import FEATURE_KEEP_STOP, HOLD, KV_RANGE, KV_STEP, OFFLINE, ONLINE, SCHEDULE_WAIT, until
from kv_pool import ELASTIC, MIB
from kv_steps import Asked

H = 2 * MIB


def begin(world, status=0):
    pool = world.begin()
    pool.initial = 2
    return pool, Asked(pool, status)


@pytest.fixture
def world(kv_world):
    return kv_world(OFFLINE)


def test_a_step_over_holes_never_begins_without_asking(world):
    pool, asked = begin(world, errno.EAGAIN)
    engine, _ = world.engine()
    engine.step()
    assert asked.seen.empty()  # there is no elastic memory
    engine.alloc(8 * H, ELASTIC)
    number = world.range_of(pool).range

    engine.step()
    assert asked.seen.get(timeout=200) == number
    engine.step()
    assert asked.seen.get(timeout=200) == number  # until it is told that all is well
    asked.status = 0
    engine.step()
    asked.seen.get(timeout=200)
    engine.step()

    assert asked.seen.empty()


def test_a_younger_range_is_asked_for_again(world):
    pool, asked = begin(world)
    engine, _ = world.engine()
    engine.alloc(8 * H, ELASTIC)
    engine.step()
    asked.seen.get(timeout=200)
    world.range_of(pool)

    engine.alloc(8 * H, ELASTIC)
    engine.step()

    assert asked.seen.get(timeout=200) == world.range_of(pool).range


def test_plain_memory_is_never_asked_for(world):
    pool, asked = begin(world)
    engine, _ = world.engine()
    engine.alloc(8 * H, 0)

    engine.step()

    assert asked.seen.empty()
    world.range_of(pool)


def test_a_valved_that_does_not_know_the_question_is_never_asked(world):
    pool = world.begin()
    engine, client = world.engine()
    engine.alloc(8 * H, ELASTIC)

    engine.step()

    assert client.none_of(KV_STEP)
    world.range_of(pool)


def test_what_was_heeded_is_said_to_the_next_valved_and_never_asked_again(world):
    pool, asked = begin(world)
    engine, _ = world.engine()
    engine.alloc(8 * H, ELASTIC)
    assert world.range_of(pool).flags == ELASTIC
    engine.step()
    asked.seen.get(timeout=200)
    world.daemons[-1].close()
    again, anew = begin(world)

    assert world.range_of(again).flags == ELASTIC | 2
    engine.step()

    assert anew.seen.empty()


def test_a_step_over_holes_never_begins_while_there_is_no_valved(world):
    pool, _ = begin(world, errno.EAGAIN)
    engine, _ = world.engine()
    engine.alloc(8 * H, ELASTIC)
    world.range_of(pool)
    engine.step()
    world.daemons[-1].close()
    engine.begin("step")
    again, anew = begin(world, errno.EAGAIN)

    assert anew.seen.get(timeout=200) == world.range_of(again).range
    engine.end("step")


def test_an_online_process_never_waits_for_an_answer(kv_world):
    world = kv_world(ONLINE)
    pool, asked = begin(world)
    engine, _ = world.engine()
    engine.alloc(8 * H, ELASTIC)

    engine.step()

    assert asked.seen.empty()
    world.range_of(pool)


def test_launches_of_a_step_that_was_held_never_go_on_before_the_next_valved_hears_of_it(world):
    pool, asked = begin(world, errno.EAGAIN)
    pool.daemon.features |= FEATURE_KEEP_STOP
    engine, client = world.engine()
    engine.alloc(8 * H, ELASTIC)
    world.range_of(pool)
    engine.step()
    asked.seen.get(timeout=200)
    client.control.order = HOLD
    client.gate(1)
    engine.begin("launch_spin", 1)
    until(client.submitted, "the launch is on its way")

    client.link.shutdown(socket.SHUT_RDWR)
    client = pool.daemon.client()
    client.expect(SCHEDULE_WAIT, h_client=0)

    kinds = [message.type for message in client.seen]
    assert [kind for kind in kinds if kind in {KV_RANGE, KV_STEP, SCHEDULE_WAIT}] == [KV_RANGE, KV_STEP, SCHEDULE_WAIT]
    until(lambda: engine.has_ended("launch_spin"), "the launch went through")
    engine.end("launch_spin")
