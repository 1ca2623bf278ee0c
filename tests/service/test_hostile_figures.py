"""A client's number never breaks what others may ask, now or after a restart: pages of all ones, then the status."""

from __future__ import annotations

from dataclasses import make_dataclass

import numpy as np
from memory_world import KvWorld
from valve.v1 import node_pb2
from valved.native._gate import ffi

from valved.config import Config, MemoryTable
from valved.gate import readings
from valved.model.events import EventKind
from valved.model.figures import LARGEST, LARGEST_SUM
from valved.model.ids import Remap
from valved.rpc import convert
from valved.state import saved as state

CONFIG = Config(memory=MemoryTable(handle_mib=2, remap=Remap.HELPER, headroom_min_mib=2, headroom_max_mib=8))


def fill_with_ones(hook):
    hook.book.view(np.uint8)[64:] = 255
    hook.heads.view(np.uint8)[:] = 255
    hook.cells.view(np.uint8)[:] = 255
    hook.offered[:] = 255


def ask(world):
    return convert.fill(node_pb2.Status(), world.node.status())


def test_status_never_fails_for_what_a_hook_wrote(tmp_path):
    world = KvWorld(tmp_path, config=CONFIG, handles=20)
    for role in ("offline", "online", "offline"):
        hook = world.engine(role, columns=2)
        fill_with_ones(hook)
        world.run(200)
        status = ask(world)
        assert max(engine.lost_tokens for engine in status.memory.engines) <= LARGEST
        world.register.leave(hook.client, "link closed")
        ask(world)
    world.kv.log.counters.lost_tokens = LARGEST_SUM
    hook = world.engine("offline", columns=2)
    fill_with_ones(hook)
    hook.shim.die()
    world.run(200)

    assert ask(world).memory.lost_tokens == LARGEST_SUM
    assert not world.events(EventKind.KILLED)


def test_a_page_of_all_ones_never_becomes_a_number_that_does_not_fit():
    page = ffi.new("struct valve_view *")
    ffi.memmove(page, b"\xff" * ffi.sizeof("struct valve_view"), ffi.sizeof("struct valve_view"))
    page.gap_count = 0

    view = readings.view(page)

    assert view.open_requests * 4095 < 1 << 32
    assert max(view.useful_tokens, view.requests_started, view.requests_ended, view.rings) <= LARGEST


def test_a_number_that_was_saved_by_an_older_valved_never_breaks_the_next(tmp_path):
    world = KvWorld(tmp_path, config=CONFIG)
    saved = world.kv.report.saved()
    broken = state.SavedMemory(
        counters={**saved.counters, "lost_tokens": 1 << 65}, phases=saved.phases, reservations=saved.reservations
    )

    world.kv.report.restore(broken)

    assert ask(world).memory.lost_tokens == LARGEST


def test_a_field_that_does_not_fit_never_fails_the_whole_answer():
    figures = make_dataclass("Figures", ["open_requests", "useful_tokens", "preemptions"])

    status = convert.fill(node_pb2.Service(), figures(1 << 40, 1 << 70, -5))

    assert status.open_requests == 2**32 - 1
    assert status.useful_tokens == 2**64 - 1
    assert status.preemptions == 0


def test_a_count_in_a_map_that_does_not_fit_never_fails_the_whole_answer(tmp_path):
    """A predecessor's file may hold any number."""
    world = KvWorld(tmp_path, config=CONFIG, handles=20)
    world.gating.counters.refusals = {"quota": 1 << 200, "role": -1}

    assert ask(world).counters.refusals == {"quota": 2**64 - 1, "role": 0}
