"""Each function of the hook fails, once or for ever, while memory comes and goes: no answer is ever wrong."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from faults import Fault, cases
from kv_node import restart
from toy_engine import ToyScheduler
from toy_world import Reclaimer, close, hooked, prompts, run
from valve_hook.ledger import Ledger
from valve_hook.reconciler import Reconciler
from valve_hook.shared import Book, Table
from valve_hook.vllm.calls import VllmHook
from valve_hook.vllm.engine import VllmEngine
from valve_hook.vllm.free_blocks import ColumnQueue
from valve_hook.vllm.prefixes import Prefixes
from valve_hook.vllm.progress import Progress
from valve_hook.wire import Mode

CALLED = {
    VllmHook: [
        *("before_schedule", "after_schedule", "before_update", "is_quiet", "_look_whole", "_note_idle", "_dropped")
    ],
    Reconciler: ["sync", "publish", "_heed", "_adopt", "_safely", "_try", "_act", "_discard", "_unoffer", "_offer"],
    Ledger: [
        *("admit", "note", "_take_in", "tend", "retain", "dismiss", "launch", "believe", "judge", "holders"),
        "first_written",
    ],
    VllmEngine: ["discard", "forget", "withhold", "release", "reset", "arrange", "gauges", "free_columns", "record"],
    Prefixes: ["use", "keep", "drop", "end", "resume", "clear"],
    ColumnQueue: ["keep", "let_go", "last_whole"],
    Table: ["begin", "read", "accept"],
    Book: ["open_row", "extend_row", "close_row", "write_gauges", "write_receipts", "acknowledge", "offer"],
    Progress: ["after_schedule", "count"],
}
PLACES = [(owner, name) for owner, names in CALLED.items() for name in names]
ARMED_AT, RESTARTED_AT = 14, 26


@functools.cache
def undisturbed(seed):
    return run(ToyScheduler(blocks=400), prompts(seed, 24), depth=2)


@pytest.mark.parametrize(
    ("owner", "name", "is_late", "is_lasting"),
    cases(PLACES, ("before its work", "after its work"), ("once", "for ever")),
)
def test_no_answer_is_wrong_when_a_function_of_the_hook_fails(node, monkeypatch, owner, name, is_late, is_lasting):
    """Requests may end with an error; those that end with tokens end with the right ones, and the engine goes on."""
    scheduler = hooked(node, blocks=60)
    fault, reclaimer = Fault(is_late=is_late, is_lasting=is_lasting), Reclaimer(node, scheduler, 2, every=2)
    fault.put(monkeypatch, owner, name)

    def between(step):
        if step == ARMED_AT:
            fault.is_armed = True
            node.aim(40)
        elif step == RESTARTED_AT:
            restart(node, scheduler)
        elif step % 9 == 4:
            node.aim(60 - step % 40)

    done = run(scheduler, prompts(2, 24), depth=2, reclaim=reclaimer, between=between)
    expected = undisturbed(2)
    close(scheduler)

    assert {request: done[request] for request in done} == {request: expected[request] for request in done}
    assert done.keys() | scheduler.failed == expected.keys()
    assert scheduler._valve.reconciler.told_mode is not Mode.FULL or not fault.raised


@pytest.mark.parametrize("way", ["reset", "abandon"])
def test_what_is_cached_again_after_a_look_that_failed_is_never_left_in_the_cache(node, way):
    """Blocks that a look has forgotten are not evicted a second time when it withholds them; in that look alone."""
    scheduler = hooked(node, blocks=40)
    engine, pool = scheduler._valve.engine, scheduler.pool
    engine.forget(np.array([5], dtype=np.uint32))
    getattr(engine, way)()
    block = pool.blocks[5]
    pool.touch([block])
    block.block_hash = "cached again"
    pool.free_blocks([block])
    engine.withhold(np.array([5], dtype=np.uint32))

    assert block.block_hash is None
    close(scheduler)
