"""What the hook's calls take beside a stand-in for vLLM's scheduler, where vLLM is not to be had: one JSON object.

Decode steps of 1,024 requests, told by the fields that the hook reads. The stand-in does no work, so caches are warm:
the figures are lower than beside a real scheduler (scheduler_cost.py).
"""

from __future__ import annotations

import json
from time import thread_time_ns
from types import SimpleNamespace
from typing import Any

from block_manager import BlockManager, let_follow
from scheduler_rig import RigDesk
from valve_hook.vllm import calls
from valve_hook.wire import Mode

REQUESTS, BLOCKS_EACH, COLUMN, STEPS = 1024, 100, 64, 200


class ToyPool:
    """Blocks that are handed out in order and never come back."""

    def __init__(self, count: int) -> None:
        self.num_gpu_blocks = count
        self.blocks = [
            SimpleNamespace(block_id=number, ref_cnt=0, block_hash=None, is_null=number == 0) for number in range(count)
        ]
        self.null_block = self.blocks[0]
        free = self.blocks[1:]
        self.free_block_queue = SimpleNamespace(get_all_free_blocks=lambda: free)

    def get_num_free_blocks(self) -> int:
        return int(self.free_block_queue.num_free_blocks)

    def get_new_blocks(self, count: int) -> list[Any]:
        taken: list[Any] = self.free_block_queue.popleft_n(count)
        for block in taken:
            block.ref_cnt = 1
        return taken

    def touch(self, blocks: list[Any]) -> None:
        for block in blocks:
            self.free_block_queue.remove(block)
            block.ref_cnt += 1

    def reset_prefix_cache(self) -> bool:
        return True


class KnownWeakly(SimpleNamespace):
    """The link knows an engine without keeping it."""


def scheduler_of(pool: ToyPool, blocks: BlockManager) -> Any:
    manager = SimpleNamespace(
        block_pool=pool,
        coordinator=SimpleNamespace(single_type_managers=[blocks]),
        evict_blocks=lambda blocks: None,
    )
    return KnownWeakly(
        kv_cache_manager=manager,
        block_size=16,
        max_num_running_reqs=REQUESTS,
        max_model_len=4096,
        vllm_config=SimpleNamespace(parallel_config=SimpleNamespace(world_size=1)),
        requests={},
        running=[],
        waiting=[],
    )


def step_of(blocks: BlockManager, *, is_first: bool) -> tuple[Any, Any]:
    """One request in sixteen takes a block."""
    tables = blocks.req_to_blocks
    for name in [] if is_first else list(tables)[::16]:
        tokens = 16 * len(tables[name]) + 1
        blocks.allocate_new_blocks(name, tokens, tokens)
    new = [SimpleNamespace(req_id=name, num_computed_tokens=0) for name in tables] if is_first else []
    names = [] if is_first else list(tables)
    output = SimpleNamespace(
        scheduled_new_reqs=new,
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=names, resumed_req_ids=set(), num_computed_tokens=[1600] * len(names)
        ),
        num_scheduled_tokens=dict.fromkeys(tables, 1),
        finished_req_ids=set(),
        preempted_req_ids=None,
        kv_cache_block_copies=None,
        scheduled_spec_decode_tokens={},
    )
    return output, SimpleNamespace(sampled_token_ids=[[7] for _ in tables], req_id_to_index={}, pooler_output=None)


def main() -> None:
    let_follow()
    pool = ToyPool(REQUESTS * (BLOCKS_EACH + 30))
    blocks = BlockManager(pool, 16)
    desk = RigDesk()
    desk.begin([block // COLUMN for block in range(pool.num_gpu_blocks)], 2 * REQUESTS, 257)
    scheduler = scheduler_of(pool, blocks)
    hook = scheduler._valve = calls.VllmHook(scheduler, desk, Mode.FULL, "toy rig")  # type: ignore[arg-type]
    hook.before_schedule()
    for number in range(REQUESTS):
        blocks.allocate_new_blocks(f"request-{number}", 16 * BLOCKS_EACH, 16 * BLOCKS_EACH)
        scheduler.requests[f"request-{number}"] = SimpleNamespace(resumable=False)
    took = []
    for number in range(STEPS + 1):
        output, result = step_of(blocks, is_first=number == 0)
        began = thread_time_ns()
        calls.before_schedule(scheduler)
        calls.after_schedule(scheduler, output)
        calls.before_update(scheduler, output, result)
        took.append((thread_time_ns() - began) / 1e3)
    print(json.dumps({"decode": {"own_us": took[1:]}, "failures": hook.reconciler.receipts.failures}))


if __name__ == "__main__":
    main()
