"""What a client may say again and again never costs others more than once in a while."""

from __future__ import annotations

import pytest
from memory_world import BASE, Hook, KvWorld

from valved.abi.link import LinkType, Note, NoteMessage
from valved.config import MIB, Config, MemoryTable
from valved.kv.outside import RETRY_NS, TRIALS_AT_ONCE
from valved.model.events import EventKind
from valved.model.ids import Remap
from valved.model.memory import KvTensor

SECONDS = 10


@pytest.fixture
def world(tmp_path):
    config = Config(ring_events=100, memory=MemoryTable(handle_mib=2, remap=Remap.SPARSE))
    world = KvWorld(tmp_path, config=config, handles=20)
    yield world
    world.check()


def test_a_process_that_offers_scratch_memory_in_a_loop_never_stops_the_gpu_each_time(world):
    """Each trial stops the GPU for all jobs, calls the driver, and is told of."""
    hostile = world.shim("offline", gpus=(0,))
    world.journal.emit(EventKind.PAUSED, reason="by alice")

    for _ in range(100 * SECONDS):
        hostile.offer_scratch(0)
        world.run(10)

    tried = [event for event in world.events(EventKind.NOTED) if "taken from outside" in event.reason]
    assert len(tried) <= TRIALS_AT_ONCE + 1 + SECONDS * 10**9 // RETRY_NS
    assert world.events(EventKind.PAUSED)
    world.run(RETRY_NS // 1_000_000)
    [trial] = world.node.status().memory.trials
    assert trial.outcome == "passed"  # the last one counts


def test_a_process_that_connects_anew_never_has_its_trials_anew(world):
    """Regression: each link had as many at once."""
    pid = 5000
    for _ in range(4 * TRIALS_AT_ONCE):
        hostile = world.shim("offline", gpus=(0,), pid=pid)
        hostile.offer_scratch(0)
        world.run(10)
        world.register.leave(hostile.client, "its end")

    tried = [event for event in world.events(EventKind.NOTED) if "taken from outside" in event.reason]
    assert TRIALS_AT_ONCE <= len(tried) <= TRIALS_AT_ONCE + 1


@pytest.mark.parametrize("role", ["online", "offline"])
def test_an_engine_that_attaches_in_a_loop_never_leaves_the_operator_without_what_else_happened(world, role):
    """Each time is up to four events, and the kept ones were its alone after seconds."""
    world.journal.emit(EventKind.PAUSED, reason="by alice")
    hook = world.engine(role)

    for _ in range(100):
        world.register.leave(hook.client, "link closed")
        hook = Hook(hook.shim, hook.blocks)
        assert hook.register([KvTensor(base_addr=BASE, block_stride_bytes=MIB // 2, block_bytes=MIB // 2)]) == 0
        hook.attach()  # an offline one soon too often
        world.run(10)

    assert len(world.events(EventKind.JOINED)) > 20
    assert world.events(EventKind.PAUSED)


def test_a_process_that_is_refused_in_a_loop_never_leaves_the_operator_without_what_else_happened(world):
    """Each time for another reason and by another user: all of these are told."""
    world.journal.emit(EventKind.PAUSED, reason="by alice")
    pid = world.processes.add(4000)

    for version in range(200):
        assert world.hello(pid, uid=1000 + version, abi=(1000 + version, 2000)).client is None

    assert len(world.events(EventKind.REFUSED)) == 100
    assert world.events(EventKind.PAUSED)


def test_a_process_that_comes_with_other_notes_each_time_never_leaves_the_operator_without_what_else_happened(world):
    world.journal.emit(EventKind.PAUSED, reason="by alice")
    pid = world.processes.add(4000)

    for number in range(200):
        client = world.hello(pid).client
        note = NoteMessage(code=Note.UNKNOWN_SUBMIT, h_client=0, h_channel=0, text=f"cuLaunch{number}")
        world.register.handle(client, world.packet(LinkType.NOTE, note), [])
        assert world.books.clients[client].notes
        world.register.leave(client, "its end")

    assert 0 < len(world.events(EventKind.NOTED)) < 100
    assert world.events(EventKind.PAUSED)
