"""Who says things about KV memory without end: how much of the loop that costs, and who waits for it."""

from __future__ import annotations

import contextlib
import errno
import os
import threading

import pytest
from link_peers import say
from memory_world import Hook, kv_world

from valved.abi.kv_link import KvDone, KvEntries, KvHow, KvOp, KvRuns, KvStep
from valved.abi.link import LinkType, Schedule
from valved.clients.complaints import AT_ONCE
from valved.clients.connection import YOUNG_NS
from valved.clients.server import AWAITED_AT_ONCE, PACKETS_AT_ONCE
from valved.clients.turns import BURST_NS
from valved.config import Config, MemoryTable
from valved.machine.processes import LinuxProcesses
from valved.model.events import EventKind
from valved.model.ids import ClientId, Remap, Role

COST_NS = 10_000 * BURST_NS  # whoever owes this is not read while a test runs
PASSES = 20
DRIVER_S = 0.02
FLOOD = 3 * PACKETS_AT_ONCE
STEP = LinkType.KV_STEP, KvStep(range=1)
CALL = LinkType.SCHEDULE_DONE, Schedule(h_client=1, h_object=1)
DONE = LinkType.KV_DONE, KvDone(order=1, done=0, status=0, cu_result=0)
HELD = LinkType.KV_HELD, KvEntries(order=0, range=1, op=0, how=0, raw=b"")
ORDER = LinkType.KV_RUNS, KvRuns(order=1, op=KvOp.BACK, how=KvHow.AT_ONCE, raw=b"")
world = kv_world(Config(memory=MemoryTable(handle_mib=2, remap=Remap.HELPER)))


@pytest.fixture
def handled(server, own_time):
    """The types of what was handled. Each message costs far more than its sender may have."""
    kinds, turns = [], server.link._turns
    turns._each.most_owed_ns = turns._awaited.most_owed_ns = float("inf")  # however slow the test is

    def costly(_client, packet, _fds):
        own_time.spend(COST_NS)
        kinds.append(packet.type)

    server.world.register.handle = costly
    return kinds


class Flooder:
    def __init__(self, server):
        self.server = server
        self.sock, welcome, self.fds = server.welcome()
        self.client = ClientId(welcome.client)
        server.rest()  # a thread may have sent that

    def says(self, what, times=1):
        self.sock.setblocking(False)
        with contextlib.suppress(BlockingIOError):  # no more fits into a link that is not read
            for _ in range(times):
                say(self.sock, *what)
        for _ in range(PASSES):  # the loop meets all that it reads
            self.server.call(lambda: None)

    def gets_order(self):
        self.server.call(lambda: self.server.world.register.send(self.client, *ORDER, 0))

    @property
    def is_welcome(self):
        return self.client in self.server.world.books.clients

    def close(self):
        self.sock.close()
        for fd in self.fds:
            os.close(fd)


@pytest.fixture
def flooder(server, handled):
    flooder = Flooder(server)
    yield flooder
    flooder.close()


def test_kv_messages_without_end_never_have_more_of_the_loop_than_one_process_may(flooder, handled):
    """They were charged to nobody: one process had nine tenths of it."""
    flooder.says(STEP, FLOOD)

    assert 1 <= len(handled) <= PACKETS_AT_ONCE
    assert flooder.is_welcome, "it waits, and is not dropped"


def test_a_process_of_a_service_never_floods_valved_either(server, handled):
    pid = os.getpid()
    start_time = LinuxProcesses().start_time(pid)
    server.call(lambda: server.world.node.launch(pid, start_time, Role.ONLINE, "chat"))
    flooder = Flooder(server)
    assert server.call(lambda: server.world.register.is_online(flooder.client))

    flooder.says(STEP, FLOOD)

    assert 1 <= len(handled) <= PACKETS_AT_ONCE
    flooder.close()


@pytest.mark.usefixtures("own_time")
def test_a_service_never_owes_for_a_driver_that_is_busy(server):
    """Regression: it paid for what the loop waited, for a driver or a core. Its needs for memory wait while it owes."""
    pid, heard = os.getpid(), []
    server.call(lambda: server.world.node.launch(pid, LinuxProcesses().start_time(pid), Role.ONLINE, "chat"))
    flooder = Flooder(server)

    def handle(_client, packet, _fds):
        threading.Event().wait(DRIVER_S)
        heard.append(packet.type)

    server.world.register.handle = handle
    flooder.says(CALL)

    server.until(lambda: heard == [LinkType.SCHEDULE_DONE])
    buckets = server.link._turns._services.of.values()
    assert server.call(lambda: all(bucket.left_ns == bucket.burst_ns for bucket in buckets))
    flooder.close()


def test_an_answer_that_valved_awaits_never_waits_for_what_its_process_owes(server, flooder, handled):
    flooder.says(STEP)
    flooder.says(DONE)
    assert handled == [LinkType.KV_STEP]

    flooder.gets_order()  # while its link rests

    server.until(lambda: handled == [LinkType.KV_STEP, LinkType.KV_DONE])


def test_an_answer_that_valved_awaits_never_waits_for_what_others_owe(server, flooder, handled):
    server.call(lambda: server.link._turns.took("others", COST_NS, 1 << 62))
    flooder.says(DONE)
    assert not handled

    flooder.gets_order()

    server.until(lambda: handled == [LinkType.KV_DONE])


def test_whoever_answers_orders_never_owes_for_it(server, flooder, handled):
    for count in range(1, 6):
        flooder.gets_order()
        flooder.says(DONE)
        server.until(lambda count=count: len(handled) == count)

    buckets = server.link._turns._each.of.values()
    assert server.call(lambda: all(bucket.left_ns == bucket.burst_ns for bucket in buckets))


@pytest.mark.parametrize("is_young", [True, False])
def test_what_is_told_again_after_a_restart_never_waits_but_is_no_way_to_flood(server, flooder, handled, is_young):
    server.link.born_ns += 1_000_000 * YOUNG_NS if is_young else -YOUNG_NS  # however slow the test is

    for _ in range(FLOOD):
        flooder.says(HELD)

    assert (len(handled) > PACKETS_AT_ONCE) == is_young


def test_whoever_owes_an_answer_never_floods_valved(flooder, handled):
    flooder.gets_order()

    flooder.says(STEP, FLOOD)

    assert 1 <= len(handled) <= PACKETS_AT_ONCE


def test_whoever_owes_an_answer_never_keeps_others_that_owe_one_waiting_for_many_messages(server, flooder, handled):
    """They have their turns one after the other, and a service may wait for what the last of them has to say."""
    flooder.says(STEP)
    flooder.says(STEP, FLOOD)

    flooder.gets_order()  # while its link rests

    server.until(lambda: len(handled) > 1)
    flooder.says(STEP)
    assert len(handled) == 1 + AWAITED_AT_ONCE


def test_whoever_answers_first_and_floods_then_never_floods_for_each_order(server, flooder, handled):
    """Regression: what came behind an answer was charged as if nobody had let it in for that. Each order that a process
    causes was worth 32 messages to it."""
    flooder.says(STEP)
    for _ in range(2):
        flooder.says(DONE)
        flooder.says(STEP)
        flooder.gets_order()  # while its link rests
        server.until(lambda: len(handled) >= 3)
        flooder.says(STEP)

    assert handled == [LinkType.KV_STEP, LinkType.KV_DONE, LinkType.KV_STEP]


def test_what_valved_refuses_an_account_never_fills_the_journal(world):
    hook = Hook(world.shim("offline", uid=1000), blocks=0, rows=1, row_blocks=1)
    for _ in range(10 * AT_ONCE):
        assert hook.attach() == errno.EINVAL

    assert len(world.events(EventKind.NOTED)) == AT_ONCE
    for role, uid in (("online", 1000), ("offline", 1001)):
        told = Hook(world.shim(role, uid=uid), blocks=0, rows=1, row_blocks=1)
        assert told.attach() == errno.EINVAL
        assert world.events(EventKind.NOTED)[-1].client == told.client
