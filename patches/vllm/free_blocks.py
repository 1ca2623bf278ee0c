"""vLLM's free block queue, handing out column by column.

Takes the place of `BlockPool.free_block_queue` (same methods, same counts) in an offline engine. Blocks without cached
content go first, wherever they are, as in vLLM's own queue. Among them `valve_hook.handout` rules: stay in the column
of the request's last block, else the column with the most. Only when there are none left, cached content is given up:
column by column, the one whose free cached blocks were used the longest ago in the mean, and of it what is older than
the mean of all. So the prefix cache keeps nearly what vLLM would keep (test_hit_rate.py). What is kept for a request
that was sent back (prefixes.py) is free like the rest, so nobody waits or is preempted for it; but it goes last of all.

The pool does not say for whom it takes blocks, and wrapping the functions that know would cost every running request in
every step. So the caller's frame is read, only when blocks are really taken; where it cannot be found (another version)
the request counts as new, which costs affinity and nothing else.
"""

from __future__ import annotations

import heapq
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

import numpy as np
from valve_hook.handout import FullestColumn

Block = Any  # vllm's KVCacheBlock


def last_block_of_caller() -> int | None:
    """The last block of the request for which `SingleTypeKVCacheManager.allocate_new_blocks` is running, if it is.
    Mostly it has looked up the request's blocks before.
    """
    frame = sys._getframe(2)
    for _ in range(3):
        if frame.f_code.co_name == "allocate_new_blocks":
            names = frame.f_locals
            blocks = names.get("req_blocks")
            if blocks is None and "request_id" in names:
                blocks = names["self"].req_to_blocks.get(names["request_id"])
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
        self._sizes = [sizes[column] for column in range(columns)]
        self._order = FullestColumn(columns, max(sizes.values(), default=0))
        self._fresh_blocks = self._cached_blocks = 0
        self._clock = 0
        self._freed_at = [0] * len(self._column_of)
        self._age_sum, self._age_count = np.zeros(columns), np.zeros(columns)  # of free cached blocks
        self._emptied = self._emptied_at = 0  # the column whose cached blocks are being given up, and up to what age
        self.whole: set[int] = set()  # columns all of whose blocks are free, and kept for nobody
        self._whole_order: list[int] = []  # a heap of their negatives, with some that are whole no more
        self._in_order: set[int] = set()
        self._kept: dict[int, int] = {}  # block: for how many
        self._kept_free: dict[int, Block] = {}
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
        last = last_block_of_caller() if self._fresh_blocks else None
        column = -1
        if last is not None:
            self.found_owner += 1
            column = self._column_of[last]
            if n == 1 and (pile := self._fresh[column]):  # a request that decodes: mostly this
                self._fresh_blocks -= 1
                self.num_free_blocks -= 1
                self.whole.discard(column)
                return [pile.popitem()[1]]  # freed last: it may still be in the processor's caches
        taken: list[Block] = []
        while len(taken) < n:
            if not self._fresh_blocks:
                give_up = self._give_up if self._cached_blocks else self._give_up_kept
                taken += give_up(n - len(taken))
                continue
            if column < 0 or not self._fresh[column]:
                column = self._order.find(self._count_fresh)
            pile = self._fresh[column]
            before = len(pile)
            while pile and len(taken) < n:
                taken.append(pile.pop(next(iter(pile))))
            self._fresh_blocks -= before - len(pile)
            self.whole.discard(column)
        self.num_free_blocks -= n
        return taken

    def remove(self, block: Block) -> None:
        column = self._column_of[block.block_id]
        if self._fresh[column].pop(block.block_id, None) is not None:
            self._fresh_blocks -= 1
        elif self._kept_free.pop(block.block_id, None) is None:
            del self._cached[column][block.block_id]
            self._forget_age(column, block)
        self.whole.discard(column)
        self.num_free_blocks -= 1

    def append(self, block: Block) -> None:
        self.append_n([block])

    def append_n(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            self._put(block)
        self.num_free_blocks += len(blocks)

    def prepend_n(self, blocks: Sequence[Block]) -> None:
        self.append_n(blocks)

    def get_all_free_blocks(self) -> list[Block]:
        piles = zip(self._fresh, self._cached, strict=True)
        found = [block for fresh, cached in piles for pile in (fresh, cached) for block in pile.values()]
        return [*found, *self._kept_free.values()]

    # ---- for the hook ----

    def keep(self, blocks: Iterable[Block]) -> None:
        """Somebody comes back for what they hold: as long as anything else is free, it is not given up."""
        for block in blocks:
            self._kept[block.block_id] = self._kept.get(block.block_id, 0) + 1
            column = self._column_of[block.block_id]
            if self._cached[column].pop(block.block_id, None) is not None:
                self._forget_age(column, block)
                self._kept_free[block.block_id] = block
                self.whole.discard(column)

    def let_go(self, blocks: Iterable[Block]) -> None:
        """`keep`, undone: what is free was used just now."""
        for block in blocks:
            left = self._kept.pop(block.block_id, 1) - 1
            if left > 0:
                self._kept[block.block_id] = left
            elif self._kept_free.pop(block.block_id, None) is not None:
                self._put(block)

    def last_whole(self, blocks: int) -> list[int]:
        """Columns all of whose blocks are free, from the last on, of so many blocks together: one at least."""
        order, found = self._whole_order, list[int]()
        while order and blocks > 0:
            column = -heapq.heappop(order)
            self._in_order.discard(column)
            if column in self.whole:
                found.append(column)
                blocks -= self._sizes[column]
        for column in found:  # until their blocks are taken
            self._note_whole(column)
        return found

    # ---- parts ----

    def _put(self, block: Block) -> None:
        number = block.block_id
        column = self._column_of[number]
        if block.block_hash is None:
            self._fresh[column][number] = block
            self._fresh_blocks += 1
        elif number in self._kept:
            self._kept_free[number] = block
            return
        else:
            self._cached[column][number] = block
            self._cached_blocks += 1
            self._clock += 1
            self._freed_at[number] = self._clock
            self._age_sum[column] += self._clock
            self._age_count[column] += 1
        self._file(column)

    def _note_whole(self, column: int) -> None:
        self.whole.add(column)
        if column not in self._in_order:
            self._in_order.add(column)
            heapq.heappush(self._whole_order, -column)

    def _give_up_kept(self, most: int) -> list[Block]:
        """What was kept first; who comes back for it computes it again."""
        taken = [self._kept_free.pop(number) for number in list(islice(self._kept_free, most))]
        for block in taken:
            self._kept.pop(block.block_id, None)
        return taken

    def _give_up(self, most: int) -> list[Block]:
        if not self._has_old():
            ages = np.full(len(self._age_sum), np.inf)
            np.divide(self._age_sum, self._age_count, out=ages, where=self._age_count > 0)
            self._emptied = int(ages.argmin())
            self._emptied_at = int(self._age_sum.sum() / self._age_count.sum())
        pile = self._cached[self._emptied]
        taken: list[Block] = []
        while len(taken) < most and self._has_old():
            block = pile.pop(next(iter(pile)))
            self._forget_age(self._emptied, block)
            taken.append(block)
        self.whole.discard(self._emptied)
        return taken

    def _has_old(self) -> bool:
        """Of what is older than the mean of all: the rest of the column, and what comes back to it, is worth more."""
        oldest = next(iter(self._cached[self._emptied]), None)
        return oldest is not None and self._freed_at[oldest] <= self._emptied_at

    def _forget_age(self, column: int, block: Block) -> None:
        self._age_sum[column] -= self._freed_at[block.block_id]
        self._age_count[column] -= 1
        self._cached_blocks -= 1

    def _count_fresh(self, column: int) -> int:
        return len(self._fresh[column])

    def _file(self, column: int) -> None:
        fresh = len(self._fresh[column])
        self._order.file(column, fresh)
        if fresh + len(self._cached[column]) == self._sizes[column]:
            self._note_whole(column)
        else:
            self.whole.discard(column)
