"""Which driver calls a process makes to stop and run its own channels, and whom it asks before: over a driver that
answers as it is told.
"""

from __future__ import annotations

import time

import pytest
from fake_daemon import (
    CHANNEL_ADD,
    FEATURE_KEEP_STOP,
    OFFLINE,
    RUN,
    SCHEDULE_DONE,
    SCHEDULE_WAIT,
    STOP,
    until,
)
from rmkit import GR0, Process, call, end_now

FIRST, SECOND = 0x5C000008, 0x5C00000A
REFUSED, STALE, OUT_OF_REACH = "27", "87", "64"


def with_a_channel(world, more=0, on_message=None, **environment):
    puppet, client = world.offline(world.daemon(OFFLINE, more=more, on_message=on_message), **environment)
    process = Process.begin(puppet)
    process.channel(process.device, FIRST, engine=GR0)
    process.register(FIRST)
    client.expect(CHANNEL_ADD, h_channel=FIRST)
    return process, client


def order(client, what):
    seq = client.give_order(what)
    until(lambda: client.region.order_done == seq, "carried out")
    return client.region.order_status


def test_a_channel_that_has_ended_unseen_is_never_talked_of_without_end(world):
    """The driver knows it by no name: there is nothing to stop, to run, or to ask for."""
    process, client = with_a_channel(world, FEATURE_KEEP_STOP, FAKERM_GATE_STATUS=STALE, FAKERM_QUERY_STATUS=STALE)

    assert order(client, STOP) == 0
    assert order(client, RUN) == 0
    assert world.gate_calls() == [call(process, "disable", FIRST)]
    assert client.none_of(SCHEDULE_WAIT)


def test_a_channel_that_the_driver_still_knows_is_never_believed_to_have_ended(world):
    process, client = with_a_channel(world, FAKERM_GATE_STATUS=STALE)

    assert order(client, STOP) == int(STALE)
    until(lambda: world.gate_calls().count(call(process, "disable", FIRST)) > 3, "it is tried again and again")


def test_a_channel_is_never_believed_to_have_ended_because_its_subdevice_has(world):
    """The driver says "no such object" of the subdevice that both questions name."""
    process, client = with_a_channel(
        world, FAKERM_GATE_STATUS=STALE, FAKERM_QUERY_STATUS=STALE, FAKERM_GID_STATUS=STALE
    )

    assert order(client, STOP) == int(STALE)
    until(lambda: world.gate_calls().count(call(process, "disable", FIRST)) > 3, "it is tried again and again")


def test_a_stop_is_never_told_as_done_of_a_device_whose_subdevice_the_application_freed(world):
    process, client = with_a_channel(world)
    process.free(process.subdevice)

    assert order(client, STOP) == int(OUT_OF_REACH)
    assert world.gate_calls() == []


def test_an_application_that_calls_its_driver_never_repeats_a_stop_that_was_refused(world):
    """It is tried again, by the session's clock and not by the application's."""
    process, client = with_a_channel(world, FAKERM_GATE_STATUS=REFUSED)
    assert order(client, STOP) == int(REFUSED)

    began, before = time.monotonic(), len(world.gate_calls())
    for _ in range(400):
        process.control(process.subdevice, 0x20800000, "00")
    tries_most = 16 + (time.monotonic() - began) / 0.128  # so many by the clock, were it the fastest

    assert len(world.gate_calls()) - before < tries_most


def test_a_channel_that_valved_never_heard_of_is_never_left_off_when_valved_takes_a_stop_over(world):
    process, client = with_a_channel(world)
    process.channel(process.device, SECOND, engine=GR0)  # it may not run yet, so nobody is told
    client.control.online_registered = 1
    end_ns = end_now(client)
    until(lambda: client.region.until_done == end_ns, "it stopped itself")
    assert world.gate_calls() == [call(process, "disable", FIRST, SECOND)]

    client.control.run_until_0 = 0

    client.expect(SCHEDULE_WAIT, h_client=0)
    until(lambda: world.gate_calls()[1:] == [call(process, "enable", SECOND)], "FIRST is valved's to enable")


@pytest.mark.parametrize("status", [95, None], ids=["refused", "not answered"])
def test_a_channel_that_valved_has_not_taken_is_never_left_off_when_valved_takes_a_stop_over(world, status):
    """It stands in no plan of valved's."""

    def answer(client, message):
        if message.type != CHANNEL_ADD:
            return False
        if status is not None:
            client.ack(message, status=status)
        return True

    process, client = with_a_channel(world, on_message=answer)
    client.control.online_registered = 1
    end_ns = end_now(client)
    until(lambda: client.region.until_done == end_ns, "it stopped itself")
    assert world.gate_calls() == [call(process, "disable", FIRST)]

    client.control.run_until_0 = 0

    until(lambda: world.gate_calls()[1:] == [call(process, "enable", FIRST)], "it asks, and runs it itself")


def test_an_old_valved_always_hears_which_channels_ran_after_its_answer(world):
    """It knows no word about the whole process."""
    process, client = with_a_channel(world)
    process.channel(process.device, SECOND, engine=GR0)
    client.control.online_registered = 1
    end_ns = end_now(client)
    until(lambda: client.region.until_done == end_ns, "it stopped itself")
    client.control.run_until_0 = 0

    client.expect(SCHEDULE_WAIT, h_client=0)
    assert client.expect(SCHEDULE_DONE).h_client == process.client
