"""vLLM's manager of the blocks of each request, as far as the hook reads it, for toy engines and unit tests."""

from __future__ import annotations

from collections import defaultdict
from typing import Any


def cdiv(a: int, b: int) -> int:
    return -(a // -b)


class BlockManager:
    """`allocate_new_blocks` is, but for its types, the function of vLLM 0.32 (Apache 2.0): the hook follows it where it
    reads like that.
    """

    def __init__(self, block_pool: Any, block_size: int) -> None:
        self.block_pool, self.block_size = block_pool, block_size
        self.req_to_blocks: defaultdict[str, list[Any]] = defaultdict(list)
        self._partial_hit_reqs: dict[str, tuple[int, Any]] = {}
        self._record_new_block_ids = False
        self.new_block_ids: list[int] = []
        self.copies: list[tuple[int, int]] = []

    def _apply_cow(self, request_id: str, block_idx: int, source_block: Any, cow_block: Any) -> None:
        self.req_to_blocks[request_id][block_idx] = cow_block
        self.copies.append((source_block.block_id, cow_block.block_id))

    def allocate_new_blocks(self, request_id: str, num_tokens: int, num_tokens_main_model: int) -> list[Any]:
        cow_blocks: list[Any] = []
        if request_id in self._partial_hit_reqs:
            block_idx, source_block = self._partial_hit_reqs.pop(request_id)
            cow_block = self.block_pool.get_new_blocks(1)[0]
            self._apply_cow(request_id, block_idx, source_block, cow_block)
            self.new_block_ids.append(cow_block.block_id)
            cow_blocks.append(cow_block)

        req_blocks = self.req_to_blocks[request_id]
        num_required_blocks = cdiv(num_tokens, self.block_size)
        num_new_blocks = num_required_blocks - len(req_blocks)
        if num_new_blocks <= 0:
            return cow_blocks
        else:
            new_blocks = self.block_pool.get_new_blocks(num_new_blocks)
            req_blocks.extend(new_blocks)
            if self._record_new_block_ids:
                self.new_block_ids.extend(b.block_id for b in new_blocks)
            return cow_blocks + new_blocks
