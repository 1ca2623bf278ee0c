"""A block that is spoilt is found in the hands of whoever has just taken it, before the index has heard of him."""

from __future__ import annotations

import pytest
from kv_node import KvNode
from toy_engine import ToyScheduler
from toy_world import Reclaimer, close, hooked, prompts, run


@pytest.mark.parametrize("depth", [2, 3])
@pytest.mark.parametrize("seed", range(6))
def test_a_spoilt_block_that_somebody_has_just_taken_never_makes_the_hook_coarse(tmp_path, seed, depth):
    """Who left while a step was in flight frees a block that the loss has spoilt; the next request takes it at once."""
    node = KvNode(tmp_path, columns=10)
    scheduler = hooked(node, blocks=40)
    grown: dict[int, str] = {}
    scheduler._valve.ledger.grown = grown
    grow = scheduler._grow

    def told(request, count):
        """As vLLM's manager tells of blocks (valve_hook.vllm.asking); the link's thread never comes to them."""
        had = bool(scheduler.req_to_blocks.get(request.request_id))
        new = grow(request, count)
        if new and had:
            grown.update((block.block_id, request.request_id) for block in new)
        return new

    scheduler._grow = told
    work = prompts(seed, 24)
    try:
        answers = run(scheduler, work, depth=depth, reclaim=Reclaimer(node, scheduler, seed, every=4, most=6))
        assert scheduler._valve.reconciler.receipts.failures == 0
    finally:
        close(scheduler)
        node.stop()
    assert answers == run(ToyScheduler(blocks=200), work, depth=1)
