"""A block that is spoilt is found in the hands of whoever has just taken it, before the index has heard of him."""

from __future__ import annotations

import pytest
from kv_node import KvNode
from toy_engine import ToyScheduler
from toy_world import Reclaimer, close, hooked, prompts, run
from valve_hook.ledger import Ledger


@pytest.mark.parametrize("depth", [2, 3])
@pytest.mark.parametrize("seed", range(6))
def test_a_spoilt_block_that_somebody_has_just_taken_never_makes_the_hook_coarse(tmp_path, monkeypatch, seed, depth):
    """Who left while a step was in flight frees a block that the loss has spoilt; the next request takes it at once."""
    monkeypatch.setenv("VALVE_ROLE", "offline")
    node = KvNode(tmp_path, columns=10)
    scheduler = hooked(node, blocks=40)
    monkeypatch.setattr(Ledger, "tend", lambda *_: False)  # the link's thread never comes to it
    work = prompts(seed, 24)
    try:
        answers = run(scheduler, work, depth=depth, reclaim=Reclaimer(node, scheduler, seed, every=4, most=6))
        assert scheduler._valve.reconciler.receipts.failures == 0
    finally:
        close(scheduler)
        node.stop()
    assert answers == run(ToyScheduler(blocks=200), work, depth=1)
