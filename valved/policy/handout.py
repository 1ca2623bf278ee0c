"""In which order an engine's free KV blocks are handed out: column by column.

A request that fills one column before it takes another can be evicted without its neighbours; with the stock
free list every request ends up in every column and no choice of victim helps. Engine plugins keep a
`ColumnFreeList` in place of the engine's own free list, or ask it for the order.

Standard library only and no other import, because the very same file is loaded inside the offline engine.
Deterministic: the same calls give the same blocks.

The rule is `choose_column`: stay in the column that holds the request's last block; else take the column with the most
free blocks, the lowest of equals. An empty column is therefore preferred, a long prompt takes whole columns, and
when the pool is nearly full a request is cut into as few pieces as there can be.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby


def choose_column(free_by_column: Sequence[int], current: int | None) -> int | None:
    """The rule itself, as a specification in O(columns): where a request's next block comes from, None if nowhere."""
    if current is not None and free_by_column[current] > 0:
        return current
    most = max(free_by_column, default=0)
    return free_by_column.index(most) if most > 0 else None


class FullestColumn:
    """Finds the column with the most free blocks, the lowest of equals.

    The code that frees blocks says so (`file`). Blocks that were taken show when the column is met. Growing by a block,
    which a request does all the time, then costs nothing here.
    """

    def __init__(self, columns: int, largest: int) -> None:
        self._by_count: list[list[int]] = [[] for _ in range(largest + 1)]
        """For each free count a heap of columns that had it; one with free blocks is on file there or higher up."""
        self._top = 0
        """No heap above this one has an entry: in a nearly full pool all but the lowest are empty."""
        self._on_file = [0] * columns
        """Bit n: the column stands in heap n, once at most, so the heaps cannot grow without bound."""

    def file(self, column: int, count: int) -> None:
        """The column has `count` free blocks now; a fall need not be told."""
        if not self._on_file[column] >> count & 1:
            self._on_file[column] |= 1 << count
            heapq.heappush(self._by_count[count], column)
            self._top = max(self._top, count)

    def find(self, count_of: Callable[[int], int]) -> int:
        """Precondition: some column has a free block. `count_of` says what is true now."""
        for count in range(self._top, 0, -1):
            heap = self._by_count[count]
            while heap:
                column = heap[0]
                true = count_of(column)
                if true == count:
                    self._top = count
                    return column
                heapq.heappop(heap)
                self._on_file[column] &= ~(1 << count)
                if 0 < true < count:
                    self.file(column, true)
        raise AssertionError("free list: blocks are available but no column is on file")


class ColumnFreeList:
    """Free blocks by column; take and give cost O(log columns) for each column touched, not for each block."""

    def __init__(self, column_of_block: Sequence[int], reserved: Iterable[int] = ()) -> None:
        """All blocks start free but the `reserved` ones (null, padding), which are never handed out."""
        columns = max(column_of_block, default=-1) + 1
        self._column_of = tuple(column_of_block)
        self._free: list[list[int]] = [[] for _ in range(columns)]
        self._withheld = [False] * columns
        kept = frozenset(reserved)
        self._reserved = kept
        for block in range(len(self._column_of) - 1, -1, -1):
            if block not in kept:
                self._free[self._column_of[block]].append(block)
        self._available = sum(map(len, self._free))
        self._order = FullestColumn(columns, max(map(len, self._free), default=0))
        for column in range(columns):
            self._file(column)

    def __len__(self) -> int:
        """Blocks that can be taken now."""
        return self._available

    def free_counts(self) -> list[int]:
        """Blocks that can be taken from each column."""
        return [0 if held else len(free) for free, held in zip(self._free, self._withheld, strict=True)]

    def take(self, count: int, last_block: int | None = None) -> list[int]:
        """`count` blocks for a request whose last block so far is `last_block`; ValueError when there are too few."""
        if count > self._available:
            raise ValueError(f"{count} blocks wanted, {self._available} are free")
        taken: list[int] = []
        column = self._column_of[last_block] if last_block is not None else None
        while len(taken) < count:
            if column is None or self._withheld[column] or not self._free[column]:
                column = self._fullest()
            free = self._free[column]
            keep = max(0, len(free) - (count - len(taken)))
            taken += free[: keep - 1 : -1] if keep else free[::-1]
            del free[keep:]
        self._available -= count
        return taken

    def give(self, blocks: Iterable[int]) -> None:
        """Blocks that no request holds any more; those of withheld columns wait until the column is restored."""
        by_column: dict[int, list[int]] = defaultdict(list)
        for column, run in groupby(blocks, self._column_of.__getitem__):
            by_column[column].extend(run)
        for column, back in by_column.items():
            self._free[column] += sorted(back, reverse=True)
            if not self._withheld[column]:
                self._available += len(back)
                self._file(column)

    def withhold(self, column: int) -> None:
        """The column has lost its backing: hand out nothing from it."""
        if not self._withheld[column]:
            self._withheld[column] = True
            self._available -= len(self._free[column])

    def restore(self, column: int) -> None:
        """The column is backed again."""
        if self._withheld[column]:
            self._withheld[column] = False
            self._available += len(self._free[column])
            self._file(column)

    def check_integrity(self, held: Iterable[int]) -> None:
        """Every block is reserved, held by a request, or free exactly once, in its own column."""
        books = [*self._reserved, *held, *(block for free in self._free for block in free)]
        if sorted(books) != list(range(len(self._column_of))):
            raise AssertionError("free list: a block is lost or has two owners")
        if any(self._column_of[block] != column for column, free in enumerate(self._free) for block in free):
            raise AssertionError("free list: a block is filed under a foreign column")
        if self._available != sum(self.free_counts()):
            raise AssertionError("free list: the count of available blocks is wrong")

    def _file(self, column: int) -> None:
        self._order.file(column, len(self._free[column]))

    def _fullest(self) -> int:
        """Precondition: at least one block is available."""
        return self._order.find(lambda column: 0 if self._withheld[column] else len(self._free[column]))
