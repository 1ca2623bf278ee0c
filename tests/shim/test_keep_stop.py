"""A process that stopped itself keeps its stop over a new link, until the new daemon lets it run."""

from __future__ import annotations

import os
import socket
import struct
import threading
import time

import pytest
from fake_daemon import (
    ACK,
    CHANNEL_ADD,
    FEATURE_KEEP_STOP,
    HOLD,
    OFFLINE,
    RUN,
    SCHEDULE_DONE,
    SCHEDULE_WAIT,
    until,
)
from rmkit import GR0, Process
from valve_abi import LINK_HANDED as HANDED

FIRST, SECOND = 0x5C000008, 0x5C00000A


def call(process, word, *handles):
    listed = "".join(f" {handle:x}" for handle in handles)
    return f"{word} client={process.client:x} object={process.subdevice:x} n={len(handles)}{listed}"


class Gate:
    """Holds back the answer to SCHEDULE_WAIT, as a valved does while the GPU is gated."""

    def __init__(self):
        self.asked = []

    def __call__(self, client, message):
        if message.type != SCHEDULE_WAIT:
            return False
        self.asked.append((client, message))
        return True

    def answer(self, status=0):
        client, message = self.asked[-1]
        client.ack(message, status=status)


@pytest.fixture
def orphan(world):
    """An offline process that stopped itself when its daemon died beside online work."""
    puppet, client = world.offline(world.daemon(OFFLINE))
    process = Process.begin(puppet)
    process.channel(process.device, FIRST, engine=GR0)
    process.register(FIRST)
    client.expect(CHANNEL_ADD, h_channel=FIRST)
    client.control.online_registered = 1
    world.daemons[0].end_lease(client)
    until(lambda: world.gate_calls() == [call(process, "disable", FIRST)], "it stopped itself")
    return process


def heir(world, **words):
    gate = Gate()
    daemon = world.daemon(OFFLINE, more=FEATURE_KEEP_STOP, on_message=gate, **words)
    client = daemon.client()
    client.expect(CHANNEL_ADD, h_channel=FIRST)
    until(lambda: gate.asked, "it asks whether it may run")
    return client, gate


def test_a_process_that_stopped_itself_never_runs_before_a_new_daemon_lets_it(world, orphan):
    client, gate = heir(world)

    gate.answer(status=11)  # EAGAIN: gated still
    until(lambda: len(gate.asked) == 2, "it asks again")
    assert not any(line.startswith("enable") for line in world.gate_calls())
    gate.answer()

    client.expect(SCHEDULE_DONE, h_client=0)
    assert world.gate_calls()[-1] == call(orphan, "enable", FIRST)


@pytest.mark.parametrize("order", [HOLD, RUN], ids=["hold", "no order any more"])
def test_an_order_never_ends_a_stop_of_its_own_beside_a_busy_service(world, orphan, order):
    """valved orders a hold where the driver refuses it the channels, and takes it back once they are off."""
    client, gate = heir(world)

    seq = client.give_order(order)

    until(lambda: client.region.order_done == seq, "it has read the order")
    assert {*world.gate_calls()} == {call(orphan, "disable", FIRST)}
    gate.answer()
    client.expect(SCHEDULE_DONE, h_client=0)
    assert world.gate_calls()[-1] == call(orphan, "enable", FIRST)


def test_what_is_handed_to_valved_is_never_enabled_here(world, orphan):
    """A stop of its may have come before this thread read the answer."""
    client, gate = heir(world)

    gate.answer(status=HANDED)

    client.expect(SCHEDULE_DONE, h_client=0)
    orphan.channel(orphan.device, SECOND, engine=GR0)
    orphan.register(SECOND)
    client.expect(CHANNEL_ADD, h_channel=SECOND)
    assert {*world.gate_calls()} == {call(orphan, "disable", FIRST)}


def test_what_valved_has_not_taken_is_enabled_here_though_the_rest_is_handed_over(world, orphan):
    gate = Gate()

    def refuses(client, message):
        if message.type != CHANNEL_ADD:
            return gate(client, message)
        client.ack(message, status=95)
        return True

    client = world.daemon(OFFLINE, more=FEATURE_KEEP_STOP, on_message=refuses).client()
    until(lambda: gate.asked, "it asks whether it may run")
    gate.answer(status=HANDED)

    client.expect(SCHEDULE_DONE, h_client=0)
    assert world.gate_calls()[-1] == call(orphan, "enable", FIRST)


def test_a_process_never_asks_to_run_while_a_thread_has_chosen_what_to_tell_and_not_told_it(world, orphan):
    """valved would let it run: it knows of no channel of which it has not heard."""
    gate, told = Gate(), []

    def keep(client, message):
        if message.type == CHANNEL_ADD and message.h_channel == SECOND:
            told.append((client, message))
            return True
        return gate(client, message)

    client = world.daemon(OFFLINE, more=FEATURE_KEEP_STOP, on_message=keep).client()
    until(lambda: gate.asked, "it asks whether it may run")
    orphan.channel(orphan.device, SECOND, engine=GR0)
    teller = threading.Thread(target=orphan.register, args=(SECOND,))
    teller.start()
    until(lambda: told, "it tells, and waits for the answer")
    gate.answer(status=11)  # EAGAIN: gated still
    before = len(gate.asked)
    client.control.order_seq += 1
    os.eventfd_write(client.order_bell, 1)
    until(lambda: client.region.order_done == client.control.order_seq, "its session has had a turn")

    assert len(gate.asked) == before
    told[0][0].ack(told[0][1])
    teller.join()
    until(lambda: len(gate.asked) > before, "it asks again")


def test_what_a_stopped_process_makes_before_it_may_run_is_stopped_too(world, orphan):
    client, gate = heir(world)

    orphan.channel(orphan.device, SECOND, engine=GR0)
    orphan.register(SECOND)
    client.expect(CHANNEL_ADD, h_channel=SECOND)
    until(lambda: call(orphan, "disable", FIRST, SECOND) in world.gate_calls(), "both are off")
    gate.answer()

    client.expect(SCHEDULE_DONE, h_client=0)
    assert world.gate_calls()[-1] == call(orphan, "enable", FIRST, SECOND)


def test_a_daemon_that_dies_before_it_lets_a_stopped_process_run_leaves_it_stopped(world, orphan):
    heir(world, online_registered=1, lease_ns=50_000_000)
    world.daemons[-1].close()

    second, gate = heir(world)
    assert not any(line.startswith("enable") for line in world.gate_calls())
    gate.answer()

    second.expect(SCHEDULE_DONE, h_client=0)
    assert world.gate_calls()[-1] == call(orphan, "enable", FIRST)


def test_an_answer_without_a_number_answers_nobody(world, orphan):
    """It would let everybody go on who waits."""
    client, gate = heir(world)

    client.send(ACK, 0, struct.pack("<II", 0, 0))
    second, again = heir_of_same(world, gate)

    assert second is not client
    assert not any(line.startswith("enable") for line in world.gate_calls())
    again.answer()
    second.expect(SCHEDULE_DONE, h_client=0)


def heir_of_same(world, gate):
    """The same daemon's next client."""
    before = len(gate.asked)
    client = world.daemons[-1].client()
    until(lambda: len(gate.asked) > before, "it asks anew")
    return client, gate


@pytest.fixture
def granted(world):
    """An offline process that stopped itself because its granted time is over, under a valved that lives."""
    gate = Gate()
    puppet, client = world.offline(world.daemon(OFFLINE, more=FEATURE_KEEP_STOP, on_message=gate))
    process = Process.begin(puppet)
    process.channel(process.device, FIRST, engine=GR0)
    process.register(FIRST)
    client.expect(CHANNEL_ADD, h_channel=FIRST)
    client.control.online_registered = 1
    end_ns = time.monotonic_ns() + 1_000_000
    client.control.run_until_0 = end_ns
    os.eventfd_write(client.order_bell, 1)
    until(lambda: client.region.until_done == end_ns, "it stopped itself")
    return process, client, gate


def test_who_stopped_itself_at_the_end_of_granted_time_never_asks_a_valved_that_has_not_ended_it(world, granted):
    """The gate counts the GPU as granted: it would let it run."""
    process, client, gate = granted

    process.channel(process.device, SECOND, engine=GR0)
    process.register(SECOND)
    client.expect(CHANNEL_ADD, h_channel=SECOND)  # some turns later

    assert not gate.asked
    assert client.region.self_stops == 1
    assert not any(line.startswith("enable") for line in world.gate_calls())


def test_who_stopped_itself_at_the_end_of_granted_time_asks_the_next_valved(world, granted):
    process, _, _ = granted
    world.daemons[0].close()

    client, gate = heir(world)
    assert not any(line.startswith("enable") for line in world.gate_calls())
    gate.answer()

    client.expect(SCHEDULE_DONE, h_client=0)
    assert world.gate_calls()[-1] == call(process, "enable", FIRST)


def test_no_process_runs_on_after_granted_time_because_it_had_stopped_itself_before(world, orphan):
    """Its channels are in the new valved's plan, which enables them for a grant. Its question is not answered yet."""
    client, _ = heir(world, online_registered=1)
    before = len(world.gate_calls())
    end_ns = time.monotonic_ns() + 1_000_000

    client.control.run_until_0 = end_ns
    os.eventfd_write(client.order_bell, 1)

    until(lambda: client.region.until_done == end_ns, "it stopped itself")
    assert world.gate_calls()[before:] == [call(orphan, "disable", FIRST)]


def test_who_waited_for_the_gate_before_a_grant_never_runs_because_that_has_ended(world, orphan):
    client, gate = heir(world, online_registered=1)
    client.control.run_until_0 = end_ns = time.monotonic_ns() + 1_000_000
    os.eventfd_write(client.order_bell, 1)
    until(lambda: client.region.until_done == end_ns, "it stopped itself")

    client.control.run_until_0 = 0
    time.sleep(0.2)  # longer than it rests before it looks again
    orphan.channel(orphan.device, SECOND, engine=GR0)
    orphan.register(SECOND)

    until(lambda: call(orphan, "disable", FIRST, SECOND) in world.gate_calls(), "its own stop goes on")
    assert not any(line.startswith("enable") for line in world.gate_calls())
    gate.answer()
    client.expect(SCHEDULE_DONE, h_client=0)
    assert world.gate_calls()[-1] == call(orphan, "enable", FIRST, SECOND)


def test_an_answer_never_lets_a_process_run_whose_granted_time_is_over(world, orphan):
    """The gate counts the GPU as granted until valved has ended it."""
    client, gate = heir(world, online_registered=1)
    client.control.run_until_0 = end_ns = time.monotonic_ns() + 1_000_000
    os.eventfd_write(client.order_bell, 1)
    until(lambda: client.region.until_done == end_ns, "it stopped itself")

    gate.answer()
    orphan.channel(orphan.device, SECOND, engine=GR0)
    orphan.register(SECOND)
    client.expect(CHANNEL_ADD, h_channel=SECOND)  # some turns later
    assert not any(line.startswith("enable") for line in world.gate_calls())

    client.control.run_until_0 = 0
    until(lambda: len(gate.asked) == 2, "it asks again")
    gate.answer()
    client.expect(SCHEDULE_DONE, h_client=0)


@pytest.fixture
def held(world):
    """An offline process whose launches wait by order of its valved, and the gate of that one."""
    gate = Gate()
    puppet, client = world.offline(world.daemon(OFFLINE, more=FEATURE_KEEP_STOP, on_message=gate))
    process = Process.begin(puppet)
    process.channel(process.device, FIRST, engine=GR0)
    process.register(FIRST)
    client.expect(CHANNEL_ADD, h_channel=FIRST)
    puppet.launch(1)
    client.control.order = HOLD
    client.gate(1)
    puppet.launch_in_background(1)
    until(lambda: client.submitted() == 2, "the launch is on its way")
    return puppet, client, gate


def rest(puppet):
    """Some turns of everybody who might let the launch go: each new launch of a held process waits, too."""
    time.sleep(0.25)
    return puppet.stub("launches")


def test_a_launch_that_waits_never_goes_on_because_its_process_has_a_new_link(world, held):
    puppet, _, _ = held
    world.daemons[0].close()

    client, gate = heir(world)
    assert rest(puppet) == 1
    gate.answer(status=11)  # gated still
    until(lambda: len(gate.asked) == 2, "it asks again")
    assert rest(puppet) == 1
    gate.answer()

    until(lambda: puppet.stub("launches") == 2, "the launch went through")
    client.expect(SCHEDULE_DONE, h_client=0)


def test_a_launch_that_waits_never_goes_on_because_its_valved_has_lost_the_link(world, held):
    puppet, client, gate = held
    client.link.shutdown(socket.SHUT_RDWR)

    _, again = heir_of_same(world, gate)
    client.control.order = RUN  # who is gone has nothing to wait for
    client.gate(2)
    assert rest(puppet) == 1
    again.answer()

    until(lambda: puppet.stub("launches") == 2, "the launch went through")


def test_launches_that_a_new_valved_let_go_wait_at_its_next_order(world, held):
    puppet, _, _ = held
    world.daemons[0].close()
    client, gate = heir(world)
    gate.answer()
    until(lambda: puppet.stub("launches") == 2, "the launch went through")

    client.control.order = HOLD
    client.gate(1)
    puppet.launch_in_background(1)
    until(lambda: client.submitted() == 3, "the launch is on its way")
    assert rest(puppet) == 2
    client.control.order = RUN

    until(lambda: puppet.stub("launches") == 3, "the launch went through")


def test_launches_wait_for_the_second_successor_when_the_first_died_without_a_word(world, held):
    puppet, _, _ = held
    world.daemons[0].close()
    heir(world)
    world.daemons[-1].close()

    _, gate = heir(world)
    assert rest(puppet) == 1
    gate.answer()

    until(lambda: puppet.stub("launches") == 2, "the launch went through")
