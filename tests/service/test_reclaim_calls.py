"""How much valved does while a service waits for memory, counted in calls: that is the same on every machine."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import pytest
from memory_world import ORDERS, KvWorld

import valved
from valved.abi.kv_link import KvNeed
from valved.abi.link import LinkType
from valved.config import Config, MemoryTable
from valved.model.ids import Remap

PRODUCT = str(Path(valved.__file__).parent)
COLUMNS = 32
WANTED = 100  # blocks, four in a column
TO_TAKE = {Remap.HELPER: 110, Remap.SPARSE: 125}
"""Calls from KV_NEED to the first order: 106 and 121."""
TO_GIVE = 108  # from the last answer of the offline process to the order that gives it: 104


class Calls:
    """Counts the product's functions and what they call: not what that calls in turn, which differs by version."""

    def __init__(self):
        self.count = 0

    def start(self):
        gc.collect()
        gc.disable()
        sys.setprofile(self._note)

    def stop(self):
        sys.setprofile(None)
        gc.enable()

    def _note(self, frame, event, arg):
        code, caller = frame.f_code, frame.f_back
        if event == "call":
            self.count += is_product(code) or (caller is not None and is_product(caller.f_code))
        elif event == "c_call":
            self.count += is_product(code)


@pytest.fixture
def calls():
    counted = Calls()
    yield counted
    counted.stop()  # nothing is counted, and the garbage of other tests is collected again


def is_product(code):
    return code.co_filename.startswith(PRODUCT)


def beside(folder, remap, planes):
    """All memory is lent, and the card stands already: the service is at work when it needs more."""
    memory = MemoryTable(
        handle_mib=2,
        remap=remap,
        headroom_min_mib=2 * planes,
        headroom_max_mib=2 * planes,
        pool_mib=2 * planes * (COLUMNS + 1),
    )
    world = KvWorld(folder, config=Config(memory=memory), handles=planes * (COLUMNS + 1))
    offline = world.engine("offline", columns=COLUMNS, layers=planes)
    world.run(500)
    offline.hold(0, list(range(4, 4 * COLUMNS - 4)))
    online = world.engine("online", columns=COLUMNS, layers=planes)
    world.run(3000)
    world.gate.launch(online.shim.client)
    world.run(50)
    return world, offline, online


def ends_at_first_order(calls, hook):
    connection, hear = hook.shim.connection, hook.shim.connection.on_send

    def on_send(kind, *rest):
        if kind in ORDERS:
            calls.stop()
        return hear(kind, *rest)

    connection.on_send = on_send


def rings(online):
    online.book["used_blocks"], online.book["wanted_blocks"] = 4, WANTED
    online.say(LinkType.KV_NEED, KvNeed(wanted_blocks=WANTED))


@pytest.mark.parametrize("planes", [1, 16])
@pytest.mark.parametrize("remap", list(TO_TAKE), ids=lambda remap: remap.value)
def test_a_need_never_costs_more_calls_than_these_before_the_first_order(tmp_path, calls, remap, planes):
    world, offline, online = beside(tmp_path, remap, planes)
    ends_at_first_order(calls, offline)

    calls.start()
    rings(online)
    assert sys.getprofile() is None, "no order went out in the turn of the need"

    assert 50 < calls.count <= TO_TAKE[remap]
    world.run(100)
    assert len(online.backed()) >= WANTED
    world.check()


@pytest.mark.parametrize("planes", [1, 16])
def test_what_was_taken_never_costs_more_calls_than_these_before_it_is_given(tmp_path, calls, planes):
    world, offline, online = beside(tmp_path, Remap.HELPER, planes)
    handle = world.register.handle
    ends_at_first_order(calls, online)

    def counted(client, packet, fds):
        if client == offline.shim.client and packet.type == LinkType.KV_DONE and is_last(world, client):
            calls.start()
        handle(client, packet, fds)

    world.register.handle = counted
    rings(online)
    world.run(100)

    assert 50 < calls.count <= TO_GIVE
    assert len(online.backed()) >= WANTED
    world.check()


@pytest.mark.parametrize("planes", [1, 16])
def test_the_first_order_never_waits_until_the_stop_is_booked(tmp_path, planes):
    """The native side says that the card stands, and that alone counts. What else follows from the stop can wait."""
    world, offline, online = beside(tmp_path, Remap.HELPER, planes)
    gate, is_stopped, hear = world.gate, world.gate.is_stopped, offline.shim.connection.on_send
    unread = []

    def stops_now(gpu):
        gate.is_stopped = is_stopped
        gate.come_back(gpu)  # while the reclaim was planned
        return is_stopped(gpu)

    def on_send(kind, *rest):
        if kind in ORDERS and not unread:
            unread.append(len(gate.stamps))
        return hear(kind, *rest)

    gate.is_stopped, offline.shim.connection.on_send = stops_now, on_send
    rings(online)
    assert unread == [1]

    world.run(100)
    assert gate.stamps == []
    assert len(online.backed()) >= WANTED
    world.check()


def is_last(world, client):
    return len(world.kv.books.orders.under_way(client)) == 1
