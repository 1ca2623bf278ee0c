"""A stand-in for vLLM's manager of the blocks of each request, as far as the hook reads it, for toy engines."""

from __future__ import annotations

import inspect
from collections import defaultdict
from typing import Any


class BlockManager:
    """`allocate_new_blocks` answers as vLLM's does, in other words."""

    def __init__(self, block_pool: Any, block_size: int) -> None:
        self.block_pool, self.block_size = block_pool, block_size
        self.req_to_blocks: defaultdict[str, list[Any]] = defaultdict(list)
        self._partial_hit_reqs: dict[str, tuple[int, Any]] = {}
        self.copies: list[tuple[int, int]] = []

    def _apply_cow(self, request_id: str, block_idx: int, source_block: Any, cow_block: Any) -> None:
        self.req_to_blocks[request_id][block_idx] = cow_block
        self.copies.append((source_block.block_id, cow_block.block_id))

    def allocate_new_blocks(self, request_id: str, num_tokens: int, num_tokens_main_model: int) -> list[Any]:
        """First a block of its own for one that it shares, then as many as its tokens need."""
        taken: list[Any] = []
        if (shared := self._partial_hit_reqs.pop(request_id, None)) is not None:
            taken.extend(self.block_pool.get_new_blocks(1))
            self._apply_cow(request_id, *shared, taken[0])
        table = self.req_to_blocks[request_id]
        lacks = blocks_of(num_tokens, self.block_size) - len(table)
        if lacks > 0:
            more = self.block_pool.get_new_blocks(lacks)
            table.extend(more)
            taken.extend(more)
        return taken


def blocks_of(tokens: int, block_tokens: int) -> int:
    return -(-tokens // block_tokens)


def let_follow() -> None:
    """The hook follows a function that reads as known. From now on this one does."""
    from valve_hook.vllm import asking

    asking.KNOWN.add(asking.digest(inspect.getsource(BlockManager.allocate_new_blocks)))
