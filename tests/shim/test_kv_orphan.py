"""A valved that is gone for good: who waits for it with KV memory goes on where nothing is missing, or ends by name."""

from __future__ import annotations

import errno

import pytest
from fake_daemon import HOLD, OFFLINE, until
from kv_pool import AT_STEP, ELASTIC, MIB, QUARANTINE, Entry
from kv_steps import Asked

H = 2 * MIB
EX_UNAVAILABLE = 69


@pytest.fixture
def world(kv_world, monkeypatch):
    monkeypatch.setenv("VALVE_ORPHAN_S", "1")
    return kv_world(OFFLINE)


def begin(world):
    pool = world.begin()
    asked = Asked(pool, errno.EAGAIN)
    engine, client = world.engine()
    engine.alloc(8 * H, ELASTIC)
    return pool, asked, engine, client, world.range_of(pool).range


def hold(client):
    client.control.order = HOLD
    client.gate(1)


def leave_for_good(world, client):
    """The lease ends only once nobody is there to be reached: a process that found one would ask it."""
    world.daemons[-1].close()
    client.control.lease_ns = 50_000_000


def ended_by_name(engine):
    code = engine.process.wait(timeout=200)
    assert (code, "holes" in engine.errors.read_text()) == (EX_UNAVAILABLE, True)


def test_launches_never_wait_for_good_while_nothing_is_missing(world):
    _, _, engine, client, _ = begin(world)
    hold(client)
    engine.begin("launch_spin", 1)
    until(client.submitted, "the launch is on its way")
    assert not engine.has_ended("launch_spin")

    leave_for_good(world, client)

    until(lambda: engine.has_ended("launch_spin"), "the launch went through")
    engine.end("launch_spin")
    assert engine.process.poll() is None


def test_launches_never_wait_for_good_because_of_an_order_that_waits_for_a_step(world, monkeypatch):
    monkeypatch.setenv("VALVE_ORPHAN_S", "600")
    pool, _, engine, client, number = begin(world)
    pool.send(client, QUARANTINE, number, [Entry(2)], AT_STEP)
    hold(client)
    engine.begin("launch_spin", 1)
    until(client.submitted, "the launch is on its way")

    leave_for_good(world, client)

    until(lambda: engine.has_ended("launch_spin"), "the launch went through")
    engine.end("launch_spin")


def test_a_process_that_waits_before_a_hole_never_waits_for_good(world):
    pool, _, engine, client, number = begin(world)
    pool.order(client, QUARANTINE, number, [Entry(2)])
    hold(client)

    leave_for_good(world, client)

    ended_by_name(engine)


def test_a_step_over_whole_memory_never_waits_for_a_valved_that_is_gone(world):
    _, _, engine, client, _ = begin(world)
    leave_for_good(world, client)

    engine.begin("step")

    until(lambda: engine.has_ended("step"), "the step began")
    engine.end("step")


def test_a_step_before_a_hole_never_waits_for_good(world):
    pool, _, engine, client, number = begin(world)
    pool.order(client, QUARANTINE, number, [Entry(2)])
    leave_for_good(world, client)

    engine.begin("step")

    ended_by_name(engine)


def test_a_valved_that_comes_in_time_finds_who_waits_before_a_hole(world, monkeypatch):
    monkeypatch.setenv("VALVE_ORPHAN_S", "600")
    pool, _, engine, client, number = begin(world)
    pool.order(client, QUARANTINE, number, [Entry(2)])
    hold(client)
    leave_for_good(world, client)
    engine.begin("launch_spin", 1)

    again = world.begin()

    assert world.range_of(again).range == number
    until(lambda: engine.has_ended("launch_spin"), "the launch went through")
    engine.end("launch_spin")
