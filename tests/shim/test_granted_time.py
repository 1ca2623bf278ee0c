"""Offline work whose granted time is over stops itself should valved not do it, and goes back to valved's hand."""

from __future__ import annotations

import os
import socket
import struct
import time
from itertools import count

import pytest
from fake_daemon import CHANNEL_ADD, OFFLINE, SCHEDULE_WAIT, until
from rmkit import GR0, Process, call, end_now

FIRST, SECOND = 0x5C000008, 0x5C00000A
SECOND_NS = 1_000_000_000
FAR = 3600 * SECOND_NS


def is_left_on(world, process, channel):
    """What the process makes now is valved's to stop."""
    process.channel(process.device, channel, engine=GR0)
    before = len(world.gate_calls())
    process.register(channel)
    return len(world.gate_calls()) == before


def begun(world):
    puppet, client = world.offline(world.daemon(OFFLINE))
    process = Process.begin(puppet)
    process.channel(process.device, FIRST, engine=GR0)
    process.register(FIRST)
    client.expect(CHANNEL_ADD, h_channel=FIRST)
    client.control.online_registered = 1
    return puppet, process, client


@pytest.fixture
def offline(world):
    return begun(world)


def test_granted_time_that_valved_does_not_end_is_ended_by_the_process_itself(world, offline):
    _, process, client = offline

    end_ns = end_now(client, "run_until_3")

    until(lambda: client.region.until_done == end_ns, "it stopped itself")
    assert world.gate_calls() == [call(process, "disable", FIRST)]
    assert client.region.until_claim == end_ns
    assert client.region.self_stops == 1
    assert time.monotonic_ns() > end_ns + 5_000_000  # valved had its time


def test_a_valved_that_dies_in_granted_time_leaves_nothing_running_after_it(world, offline):
    """Long before its lease ends: its lease is an hour here."""
    _, process, client = offline
    client.control.lease_ns = FAR
    client.control.run_until_0 = time.monotonic_ns() + 300_000_000
    os.eventfd_write(client.order_bell, 1)

    world.daemons[0].close()

    stop = call(process, "disable", FIRST)  # twice where the machine let the time end before valved
    until(lambda: set(world.gate_calls()) == {stop}, "it stopped itself")
    heir = world.daemon(OFFLINE).client()
    heir.expect(CHANNEL_ADD, h_channel=FIRST)
    assert world.gate_calls()[-1] == call(process, "enable", FIRST), "the next valved has it as it has any other"


def test_an_enable_that_comes_out_after_our_stop_is_stopped_when_valved_is_gone(world, offline):
    """It had begun before the end, and valved died before it could stop it."""
    _, process, client = offline
    end_ns = end_now(client)
    until(lambda: client.region.until_done == end_ns, "it stopped itself")

    world.daemons[0].close()

    until(lambda: world.gate_calls() == 2 * [call(process, "disable", FIRST)], "and once more")


def test_a_living_link_is_never_dropped_and_valveds_late_stop_takes_over(world, offline):
    _, process, client = offline
    end_ns = end_now(client)
    until(lambda: client.region.until_done == end_ns, "it stopped itself")
    process.channel(process.device, SECOND, engine=GR0)
    process.register(SECOND)
    assert world.gate_calls()[-1] == call(process, "disable", FIRST, SECOND)
    client.expect(CHANNEL_ADD, h_channel=SECOND)  # on the same link

    client.control.run_until_0 = 0  # valved has stopped all of it
    calls = len(world.gate_calls())
    thirds = count(0x5C000778)
    until(lambda: is_left_on(world, process, next(thirds)), "its own stop is dropped")
    enabled = [line.split() for line in world.gate_calls()[calls:] if line.startswith("enable")]
    assert not [line for line in enabled if {f"{FIRST:x}", f"{SECOND:x}"} & set(line)]
    # A third that valved had not answered for by then is no part of its stop. Valved is asked first.
    assert not enabled or client.has_said(SCHEDULE_WAIT)
    assert not world.daemons[0].has_another()


def test_an_end_that_is_cleared_in_time_stops_nothing(world, offline):
    _, process, client = offline
    for _ in range(5):
        client.control.run_until_0 = time.monotonic_ns() + FAR
        os.eventfd_write(client.order_bell, 1)
        client.control.run_until_0 = 0
    end_ns = end_now(client, "run_until_3")

    until(lambda: client.region.until_done == end_ns, "the one that stood")

    assert world.gate_calls() == [call(process, "disable", FIRST)]
    assert client.region.self_stops == 1


def test_a_draining_valved_leaves_everything_on_whatever_the_end(world, offline):
    _, process, client = offline
    client.control.draining = 1
    end_now(client)
    world.daemons[0].close()

    until(lambda: call(process, "enable", FIRST) in world.gate_calls(), "let go")
    heir = world.daemon(OFFLINE).client()
    heir.expect(CHANNEL_ADD, h_channel=FIRST)
    assert not [line for line in world.gate_calls() if line.startswith("disable")]


def test_no_channel_is_stopped_for_ever_because_a_stop_of_its_own_failed(world):
    """valved has ended that grant: what comes now is its own to stop."""
    puppet, client = world.offline(world.daemon(OFFLINE), FAKERM_GATE_STATUS="27")
    process = Process.begin(puppet)
    process.channel(process.device, FIRST, engine=GR0)
    process.register(FIRST)
    client.expect(CHANNEL_ADD, h_channel=FIRST)
    client.control.online_registered = 1
    end_ns = end_now(client)
    until(lambda: client.region.until_done == end_ns, "it tried")

    client.control.run_until_0 = 0
    thirds = count(0x5C000778)
    until(lambda: is_left_on(world, process, next(thirds)), "no stop of its own is left")


def end_beside_a_slow_successor(world):
    """A process whose granted time ends while it asks a valved that never answers: how long until it stops itself.
    None: it was not asking yet."""
    puppet, process, client = begun(world)
    daemon, stops = world.daemons[-1], len(world.gate_calls())
    client.control.lease_ns = FAR
    daemon.close()
    slow = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    slow.bind(str(daemon.path))
    slow.listen(16)  # and nobody accepts
    end_ns = time.monotonic_ns() + 230_000_000  # it first asks after 200 ms
    client.control.run_until_0 = end_ns
    stop = call(process, "disable", FIRST)  # twice where the machine let the time end before valved, as it seems to it
    until(lambda: set(world.gate_calls()[stops:]) == {stop}, "it stopped itself")
    late_ns = time.monotonic_ns() - end_ns
    puppet.process.kill()
    puppet.process.wait()
    slow.setblocking(False)
    try:
        asked, _ = slow.accept()
        (asked_ns,) = struct.unpack_from("<Q", asked.recv(4096), 16)  # sent_ns of its HELLO
        asked.close()
    except BlockingIOError:
        asked_ns = end_ns
    slow.close()
    daemon.path.unlink()
    return late_ns if asked_ns < end_ns else None


def test_a_successor_that_takes_time_to_answer_never_delays_the_end_of_granted_time(world):
    """Who asks waits for 500 ms: had it done so, no try would be in time. A busy machine may be late."""
    until(lambda: (late_ns := end_beside_a_slow_successor(world)) and late_ns < 250_000_000, "it did not wait")


def test_a_driver_that_refuses_leaves_the_rest_to_the_lease(world):
    daemon = world.daemon(OFFLINE)
    puppet, client = world.offline(daemon, FAKERM_GATE_STATUS="27")
    process = Process.begin(puppet)
    process.channel(process.device, FIRST, engine=GR0)
    process.register(FIRST)
    puppet.launch(1)
    client.control.online_registered = 1
    end_ns = end_now(client)
    until(lambda: client.region.until_done == end_ns, "it tried")

    daemon.end_lease(client)

    until(lambda: [puppet.launch_in_background(1), puppet.threads() >= 3][1], "a launch is held")
