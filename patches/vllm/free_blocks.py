"""vLLM's free block queue, handing out column by column.

Takes the place of `BlockPool.free_block_queue` (same methods, same counts) in an offline engine. Blocks without cached
content go first, wherever they are, as in vLLM's own queue. Among them `valve_hook.handout` rules: stay in the column
of the request's last block, else the column with the most. Only when there are none left, cached content is given up:
column by column, the one whose free cached blocks were used the longest ago in the mean, and of it what is older than
the mean of all. So the prefix cache keeps nearly what vLLM would keep (test_hit_rate.py). What is kept for a request
that was sent back (prefixes.py) is free like the rest, so nobody waits or is preempted for it; but it goes last of all.

The pool does not say for whom it takes blocks. Where the engine tells (asking.py), `asker` is the list of blocks of
that request. Else the caller's frame is read; where that cannot be found either (another version) the request counts as
new, which costs affinity and nothing else.
"""

from __future__ import annotations

import heapq
import sys
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import islice, takewhile
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
    """Free blocks in columns. For one block that a request takes, its last block's pile and a count are looked at; all
    else is put right when it is asked for.
    """

    def __init__(self, column_of: Sequence[int], free: Iterable[Block]) -> None:
        columns = max(column_of, default=0) + 1
        shared = list(range(columns))  # one number for all blocks of a column: fewer things to fetch from memory
        self._column_of = [shared[column] for column in column_of]
        self._fresh: list[dict[int, Block]] = [{} for _ in range(columns)]
        self._cached: list[dict[int, Block]] = [{} for _ in range(columns)]
        self._home = [self._fresh[column] for column in column_of]  # by block
        sizes = Counter(column_of)
        self._sizes = [sizes[column] for column in range(columns)]
        self._order = FullestColumn(columns, max(sizes.values(), default=0))
        self._cached_blocks = 0
        self._clock = 0
        self._freed_at = [0] * len(self._column_of)
        self._age_sum, self._age_count = (array("q", bytes(8 * columns)) for _ in range(2))  # of free cached blocks
        self._emptied = self._emptied_at = 0  # the column whose cached blocks are being given up, and up to what age
        self._whole_order: list[int] = []  # a heap of the negatives of whole columns, with some that are whole no more
        self._in_order: set[int] = set()
        self._kept: dict[int, int] = {}  # block: for how many
        self._kept_free: dict[int, Block] = {}
        self.num_free_blocks = 0
        self.is_told = False  # which request asks
        self.asker: Sequence[Block] | None = None  # the blocks of the request for which blocks are being taken
        self.found_owner = 0  # times the asking request was known from a frame
        self.append_n(list(free))

    # ---- vLLM's interface ----

    def popleft(self) -> Block:
        if not self.num_free_blocks:
            raise ValueError("No free blocks available")
        return self.popleft_n(1)[0]

    def popleft_n(self, n: int) -> list[Block]:
        asker = self.asker
        if n == 1 and asker and (pile := self._home[asker[-1].block_id]):  # a request that decodes: mostly this
            self.num_free_blocks -= 1
            return [pile.popitem()[1]]  # freed last: it may still be in the processor's caches
        assert self.num_free_blocks >= n
        last = asker[-1].block_id if asker else None
        if not self.is_told and self._fresh_blocks and (last := last_block_of_caller()) is not None:
            self.found_owner += 1
            if n == 1 and (pile := self._home[last]):
                self.num_free_blocks -= 1
                return [pile.popitem()[1]]
        return self._take(n, self._home[last] if last is not None else {})

    def remove(self, block: Block) -> None:
        self.remove_all((block,))

    def append(self, block: Block) -> None:
        self.append_n([block])

    def append_n(self, blocks: Sequence[Block]) -> None:
        self._put(blocks)
        self.num_free_blocks += len(blocks)

    def prepend_n(self, blocks: Sequence[Block]) -> None:
        self.append_n(blocks)

    def get_all_free_blocks(self) -> list[Block]:
        piles = zip(self._fresh, self._cached, strict=True)
        found = [block for fresh, cached in piles for pile in (fresh, cached) for block in pile.values()]
        return [*found, *self._kept_free.values()]

    # ---- for the hook ----

    def remove_all(self, blocks: Sequence[Block]) -> None:
        """No request may have them."""
        column_of, freed_at, at, gone, ages = self._column_of, self._freed_at, -1, 0, 0
        fresh, cached = dict[int, Block](), dict[int, Block]()
        try:
            for block in blocks:
                number = block.block_id
                if (column := column_of[number]) != at:
                    self._forget_ages(at, gone, ages)
                    at, gone, ages, fresh, cached = column, 0, 0, self._fresh[column], self._cached[column]
                if cached.pop(number, None) is not None:
                    gone += 1
                    ages += freed_at[number]
                elif fresh.pop(number, None) is None:
                    del self._kept_free[number]
                self.num_free_blocks -= 1
        finally:
            self._forget_ages(at, gone, ages)

    def _forget_ages(self, column: int, cached: int, ages: int) -> None:
        if cached:
            self._cached_blocks -= cached
            self._age_count[column] -= cached
            self._age_sum[column] -= ages

    def keep(self, blocks: Iterable[Block]) -> None:
        """Somebody comes back for what they hold: as long as anything else is free, it is not given up."""
        free = dict[int, Block]()
        for block in blocks:
            number = block.block_id
            self._kept[number] = self._kept.get(number, 0) + 1
            if number in self._cached[self._column_of[number]]:
                free[number] = block
        self.remove_all(list(free.values()))
        self.num_free_blocks += len(free)
        self._kept_free |= free

    def let_go(self, blocks: Iterable[Block]) -> None:
        """`keep`, undone: what is free was used just now."""
        free = []
        for block in blocks:
            left = self._kept.pop(block.block_id, 1) - 1
            if left > 0:
                self._kept[block.block_id] = left
            elif self._kept_free.pop(block.block_id, None) is not None:
                free.append(block)
        self._put(free)

    @property
    def whole(self) -> set[int]:
        """Columns all of whose blocks are free, and kept for no request."""
        return {column for column in self._in_order if self._is_whole(column)}

    def last_whole(self, blocks: int) -> list[int]:
        """Columns all of whose blocks are free, from the last on, of so many blocks together: one at least."""
        order, found = self._whole_order, list[int]()
        while order and blocks > 0:
            column = -heapq.heappop(order)
            self._in_order.discard(column)
            if self._is_whole(column):
                found.append(column)
                blocks -= self._sizes[column]
        for column in found:  # until their blocks are taken
            self._note_whole(column)
        return found

    # ---- parts ----

    @property
    def _fresh_blocks(self) -> int:
        return self.num_free_blocks - self._cached_blocks - len(self._kept_free)

    def _is_whole(self, column: int) -> bool:
        return len(self._fresh[column]) + len(self._cached[column]) == self._sizes[column]

    def _take(self, n: int, pile: dict[int, Block]) -> list[Block]:
        """As long as there are any, from this pile of fresh blocks."""
        taken: list[Block] = []
        while len(taken) < n:
            wanted = n - len(taken)
            if not pile and self._fresh_blocks:
                pile = self._fresh[self._order.find(self._count_fresh)]
            if pile:
                some = [pile.pop(number) for number in list(islice(pile, wanted))]
            else:
                some = self._give_up(wanted) if self._cached_blocks else self._give_up_kept(wanted)
            self.num_free_blocks -= len(some)
            taken += some
        return taken

    def _put(self, blocks: Sequence[Block]) -> None:
        """The blocks of a request come mostly column by column, so what is said of a column is said once for a run."""
        column_of, kept, freed_at, clock = self._column_of, self._kept, self._freed_at, self._clock
        at, before, ages, fresh, cached = -1, 0, 0, dict[int, Block](), dict[int, Block]()
        for block in blocks:
            number = block.block_id
            if (column := column_of[number]) != at:
                if at >= 0:
                    self._file(at, len(cached) - before, ages)
                at, fresh, cached = column, self._fresh[column], self._cached[column]
                before, ages = len(cached), 0
            if block.block_hash is None:
                fresh[number] = block
            elif number in kept:
                self._kept_free[number] = block
            else:
                cached[number] = block
                clock += 1
                freed_at[number] = clock
                ages += clock
        self._clock = clock
        if at >= 0:
            self._file(at, len(cached) - before, ages)

    def _file(self, column: int, cached: int, ages: int) -> None:
        """So many cached blocks have come to it, with this sum of ages, and any number of fresh ones."""
        self._cached_blocks += cached
        self._age_count[column] += cached
        self._age_sum[column] += ages
        self._order.file(column, len(self._fresh[column]))
        if self._is_whole(column):
            self._note_whole(column)

    def _note_whole(self, column: int) -> None:
        if column not in self._in_order:
            self._in_order.add(column)
            heapq.heappush(self._whole_order, -column)

    def _give_up_kept(self, most: int) -> list[Block]:
        """What was kept first; the request that comes back for it computes it again."""
        taken = [self._kept_free.pop(number) for number in list(islice(self._kept_free, most))]
        for block in taken:
            self._kept.pop(block.block_id, None)
        return taken

    def _give_up(self, most: int) -> list[Block]:
        """Of what is older than the mean of all: the rest of a column, and what comes back to it, is worth more."""
        old = self._old(most)
        if not old:
            sums, counts = (np.frombuffer(each, dtype=np.int64) for each in (self._age_sum, self._age_count))
            ages = np.full(len(sums), np.inf)
            np.divide(sums, counts, out=ages, where=counts > 0)
            self._emptied = int(ages.argmin())
            self._emptied_at = int(sums.sum() / counts.sum())
            old = self._old(most)
        taken = [self._cached[self._emptied][number] for number in old]
        self.remove_all(taken)
        self.num_free_blocks += len(taken)
        return taken

    def _old(self, most: int) -> list[int]:
        freed_at, limit = self._freed_at, self._emptied_at
        first = islice(self._cached[self._emptied], most)
        return list(takewhile(lambda number: freed_at[number] <= limit, first))

    def _count_fresh(self, column: int) -> int:
        return len(self._fresh[column])
