"""vLLM's free block queue, handing out column by column.

Takes the place of `BlockPool.free_block_queue` (same methods, same counts). Which column comes next is the rule of
`valve_hook.handout`: stay in the column of the request's last block, else the column with the most free blocks. Within
a column blocks without cached content go first, then the longest unused, as in vLLM's own queue.

The pool does not say for whom it takes blocks, and wrapping the functions that know would cost every running request in
every step. So the caller's frame is read, only when blocks are really taken; where it cannot be found (another version)
the request counts as new, which costs affinity and nothing else.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from valve_hook.handout import FullestColumn

Block = Any  # vllm's KVCacheBlock


def last_block_of_caller() -> int | None:
    """The last block of the request for which `SingleTypeKVCacheManager.allocate_new_blocks` is running, if it is."""
    frame = sys._getframe(2)
    for _ in range(3):
        if frame.f_code.co_name == "allocate_new_blocks":
            names = frame.f_locals
            blocks = names["self"].req_to_blocks.get(names["request_id"]) if "request_id" in names else None
            return int(blocks[-1].block_id) if blocks else None
        if frame.f_back is None:
            return None
        frame = frame.f_back
    return None


class ColumnQueue:
    """Free blocks in columns."""

    def __init__(self, column_of: Sequence[int], free: Iterable[Block]) -> None:
        self._column_of = list(column_of)
        columns = max(self._column_of, default=0) + 1
        self._fresh: list[dict[int, Block]] = [{} for _ in range(columns)]
        self._cached: list[dict[int, Block]] = [{} for _ in range(columns)]
        sizes = Counter(self._column_of)
        self._order = FullestColumn(columns, max(sizes.values(), default=0))
        self.num_free_blocks = 0
        self.found_owner = 0  # times the asking request was known
        self.append_n(list(free))

    # ---- vLLM's interface ----

    def popleft(self) -> Block:
        if not self.num_free_blocks:
            raise ValueError("No free blocks available")
        return self.popleft_n(1)[0]

    def popleft_n(self, n: int) -> list[Block]:
        assert self.num_free_blocks >= n
        taken: list[Block] = []
        last = last_block_of_caller()
        column = -1
        if last is not None:
            self.found_owner += 1
            column = self._column_of[last]
        while len(taken) < n:
            if column < 0 or not self._count(column):
                column = self._order.find(self._count)
            for pile in (self._fresh[column], self._cached[column]):
                while pile and len(taken) < n:
                    taken.append(pile.pop(next(iter(pile))))
            self._file(column)
        self.num_free_blocks -= n
        return taken

    def remove(self, block: Block) -> None:
        column = self._column_of[block.block_id]
        if self._fresh[column].pop(block.block_id, None) is None:
            del self._cached[column][block.block_id]
        self.num_free_blocks -= 1

    def append(self, block: Block) -> None:
        self.append_n([block])

    def append_n(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            column = self._column_of[block.block_id]
            pile = self._fresh if block.block_hash is None else self._cached
            pile[column][block.block_id] = block
            self._file(column)
        self.num_free_blocks += len(blocks)

    def prepend_n(self, blocks: Sequence[Block]) -> None:
        self.append_n(blocks)

    def get_all_free_blocks(self) -> list[Block]:
        piles = zip(self._fresh, self._cached, strict=True)
        return [block for fresh, cached in piles for pile in (fresh, cached) for block in pile.values()]

    # ---- for the hook ----

    def free_counts(self) -> list[int]:
        return [self._count(column) for column in range(len(self._fresh))]

    def _count(self, column: int) -> int:
        return len(self._fresh[column]) + len(self._cached[column])

    def _file(self, column: int) -> None:
        self._order.file(column, self._count(column))
