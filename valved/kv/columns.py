"""The columns of an engine, as its ranks have laid out their blocks: which have memory, which would go first.

What follows from the books is remembered until they change: one look asks the same a dozen times, and a tick has asked
all of it before a service waits for the answers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from valved.abi.kv_link import KvLayoutPart
from valved.cells.taking import LARGEST, BlockPlaces, CellRuns, Handles
from valved.kv.slots import CLAIMED, NO_HANDLE, NOTHING, STRANGE, Ints, KvRangeBook, RangeSlots, SlotHandles
from valved.model.ids import ClientId, GpuIndex
from valved.model.memory import ColumnPick, KvLayout, KvRange
from valved.policy.columns import ColumnMap, columns_of
from valved.policy.eviction import CostIndex, select

Bools = NDArray[np.bool_]
Found = TypeVar("Found")
QUEUED = 1024  # columns of an engine that are put in order ahead of need: a GiB in handles of 2 MiB are 512


def remembered(find: Callable[[Columns], Found]) -> Callable[[Columns], Found]:
    """Asked once between two changes of the books. An array that is remembered is not to be written."""

    name = find.__name__

    @wraps(find)
    def known(columns: Columns) -> Found:
        answers = columns.known()
        if name in answers:
            answer: Found = answers[name]
            return answer
        found = answers[name] = find(columns)
        if isinstance(found, np.ndarray):
            found.flags.writeable = False
        return found

    return known


@dataclass(slots=True, kw_only=True)
class Rank:
    """One process of an engine: its KV tensors inside its ranges."""

    client: ClientId  # the shim
    hook: ClientId
    books: tuple[KvRangeBook, ...]
    layout: KvLayout
    columns: ColumnMap

    @staticmethod
    def of(client: ClientId, hook: ClientId, books: Iterable[KvRangeBook], told: KvLayoutPart) -> Rank:
        """Raises LayoutRefused."""
        mine = tuple(sorted(books, key=lambda book: book.base))
        layout = KvLayout(
            ranges=tuple(
                KvRange(base_addr=book.base, handle_bytes=book.handle_bytes, handles=book.slots) for book in mine
            ),
            tensors=told.tensors,
            blocks=told.blocks,
            block_tokens=told.block_tokens,
            pinned_blocks=told.pinned,
        )
        return Rank(client=client, hook=hook, books=mine, layout=layout, columns=columns_of(layout))


@dataclass(frozen=True, slots=True, kw_only=True)
class Cells:
    """All cells of an engine in one process on one GPU, by range and slot."""

    slots: RangeSlots
    column: Ints
    place: Ints  # in what stands at all slots of the engine
    runs: CellRuns


class Columns:
    """Of all ranks together. Books without effects."""

    def __init__(self) -> None:
        self.going: Bools = np.zeros(0, np.bool_)  # columns with an order under way; written by `mark`
        self.lost: Bools = np.zeros(0, np.bool_)  # of those, columns that are being taken away
        self._books: tuple[KvRangeBook, ...] = ()
        self._at = SlotHandles(NOTHING)  # at each slot of all its ranges, one after the other
        self._cell_column = self._cell_place = np.empty(0, np.int64)
        self._block_columns = self._block_ptr = np.empty(0, np.int64)
        self.parts: list[Cells] = []
        self.places: list[KvRangeBook] = []  # a range for each process and GPU where it has some
        self._known: dict[str, Any] = {}
        self._known_at = -1, -1  # changes of `_at`, and others, that are in it
        self._changes = 0
        self._reclaimable: Bools = np.zeros(0, np.bool_)
        self.columns = 0
        self.gpus: frozenset[GpuIndex] = frozenset()
        self.most_handles: dict[GpuIndex, int] = {}  # of a column, on each of its GPUs ...
        self.least_handles: dict[GpuIndex, int] = {}  # ... and of one that has any there
        self._gpu_handles: dict[GpuIndex, Ints] = {}
        self._cell_gpu = NOTHING
        self._bare = self.gains = Handles(0, {})
        self._bare_at = -1  # changes of `_at` that are in it

    def lay(self, ranks: list[Rank]) -> None:
        """These are all, one at least."""
        self._books = tuple(book for rank in ranks for book in rank.books)
        parts: list[tuple[Ints, Ints, Ints]] = []
        first_book = 0
        for rank in ranks:
            parts.append(_cells_of(rank, first_book))
            first_book += len(rank.books)
        column, book, slot = (np.concatenate(one) for one in zip(*parts, strict=True))
        order = np.lexsort((slot, book))
        self._cell_column, cell_book, cell_slot = column[order], book[order], slot[order]
        starts = np.cumsum([0, *(book.slots for book in self._books)])
        self._cell_place = starts[cell_book] + cell_slot
        self._at, self._bare_at = SlotHandles(np.concatenate([book.at for book in self._books])), -1
        for first_slot, known in zip(starts.tolist(), self._books, strict=False):  # from here on parts of one array
            known.join(self._at, first_slot)
        first = ranks[0].columns
        self._reclaimable = np.logical_and.reduce([rank.columns.is_reclaimable for rank in ranks])
        self.heed_pins()
        self._block_columns, self._block_ptr = first.block_columns, first.block_column_ptr
        self.block_places = BlockPlaces(len(first.columns), self._block_columns, self._block_ptr)
        if len(self.going) != len(first.columns):
            self.going = np.zeros(len(first.columns), np.bool_)
            self.lost = np.zeros(len(first.columns), np.bool_)
        owners = [(book.key.client, book.gpu) for book in self._books]
        self.parts = [
            self._cells_in([at == owner for at in owners], cell_book, cell_slot) for owner in dict.fromkeys(owners)
        ]
        self.places = [part.slots.books[0] for part in self.parts]
        self._cell_gpu = np.array([book.gpu for book in self._books])[cell_book]
        self._gpu_handles = {
            GpuIndex(gpu): np.bincount(self._cell_column[self._cell_gpu == gpu], minlength=len(first.columns))
            for gpu in np.unique(self._cell_gpu).tolist()
        }
        self.columns, self.gpus = len(self._reclaimable), frozenset(self._gpu_handles)
        self.gains = Handles(self.columns, self._gpu_handles)
        self.most_handles = {gpu: int(counts.max()) for gpu, counts in self._gpu_handles.items()}
        self.least_handles = {gpu: int(counts[counts > 0].min()) for gpu, counts in self._gpu_handles.items()}

    def _cells_in(self, is_mine: list[bool], cell_book: Ints, cell_slot: Ints) -> Cells:
        mine = np.flatnonzero(np.array(is_mine)[cell_book])
        books = tuple(book for book, is_one in zip(self._books, is_mine, strict=True) if is_one)
        of = (np.cumsum(is_mine) - 1)[cell_book[mine]]
        slots = RangeSlots(books=books, of=of, slots=cell_slot[mine])
        column, place, numbers = self._cell_column[mine], self._cell_place[mine], [book.key.number for book in books]
        runs = CellRuns(len(self._reclaimable), self._at.rows, numbers, (column, place, of, slots.slots))
        return Cells(slots=slots, column=column, place=place, runs=runs)

    def mark(self, columns: Ints, *, going: bool, lost: bool = False) -> None:
        self.going[columns] = going
        if lost or not going:  # what begins to come is not lost
            self.lost[columns] = lost
        self._changes += 1

    def heed_pins(self) -> None:
        """Columns with a slot that may never be taken. A pin costs one look at the cells, not a new map."""
        self._changes += 1
        if self._books:
            is_pinned = np.concatenate([book.pinned for book in self._books])[self._cell_place]
            self._reclaimable[self._cell_column[is_pinned]] = False

    # Questions

    def handles_of(self, gpu: GpuIndex) -> Ints:
        """Handles of each column on this GPU."""
        return self._gpu_handles[gpu]

    def handles_in(self, columns: Ints, gpu: GpuIndex) -> int:
        return int(self._gpu_handles[gpu][columns].sum()) if gpu in self._gpu_handles else 0

    @property
    def handles_per_column(self) -> int:
        """Of the largest column, on the GPU that has most."""
        return max(self.most_handles.values(), default=1)

    @property
    def changes(self) -> tuple[int, int]:
        """As long as this stays, so do the answers to all that is asked here."""
        return self._at.changes, self._changes

    def known(self) -> dict[str, Any]:
        """What was asked since the books changed last, and its answer."""
        now = self._at.changes, self._changes
        if now != self._known_at:
            self._known, self._known_at = {}, now
        return self._known

    @remembered
    def backed_columns(self) -> Bools:
        """Columns of which every cell has its handle."""
        return np.equal(np.bincount(self._cell_column[self._standing() < 0], minlength=self.columns), 0)

    @remembered
    def standing_columns(self) -> Bools:
        """Backed, and not being taken away."""
        return self.backed_columns() & ~self.lost

    @remembered
    def standing_count(self) -> int:
        return int(self.standing_columns().sum())

    @remembered
    def mapped_columns(self) -> int:
        """That it has or is about to have."""
        open_ = self._standing()
        is_open = self._having(open_ == NO_HANDLE) | self._having(open_ == STRANGE)
        return int(((~is_open | self.going) & ~self.lost).sum())

    def _standing(self) -> Ints:
        """What stands at each cell: a handle, nothing, or a claim."""
        return self._at.rows[self._cell_place]

    @remembered
    def bare_columns(self) -> Ints:
        """Columns that could be backed now, or in part."""
        standing = self._standing()
        return np.flatnonzero(self._having(standing == NO_HANDLE) & ~self._having(standing == STRANGE) & ~self.going)

    @remembered
    def partial_columns(self) -> Ints:
        """Columns with some of their handles, and none on its way."""
        standing = self._standing()
        is_partial = self._having(standing >= 0) & self._having(standing < 0) & ~self._having(standing == CLAIMED)
        return np.flatnonzero(is_partial)

    def _having(self, cells: Bools) -> Bools:
        """Columns with such a cell."""
        return np.greater(np.bincount(self._cell_column[cells], minlength=self.columns), 0)

    def cells(self, columns: Ints, *, backed: bool) -> list[RangeSlots]:
        """The slots of these columns that are backed, or bare and unclaimed, process by process and GPU by GPU."""
        wanted = (0, LARGEST) if backed else (NO_HANDLE, NO_HANDLE)
        chosen = ((part.slots.books, *part.runs.slots(columns, *wanted)) for part in self.parts)
        return [RangeSlots(books=books, of=of, slots=slots) for books, of, slots in chosen if slots.size]

    def bare_handles(self) -> Handles:
        """How many handles each column lacks that are not ordered yet."""
        if self._bare_at != self._at.changes:  # a mark changes nothing of it
            self._bare_at = self._at.changes
            is_bare = self._standing() == NO_HANDLE
            bare = {
                gpu: np.bincount(self._cell_column[is_bare & (self._cell_gpu == gpu)], minlength=self.columns)
                for gpu in self._gpu_handles
            }
            self._bare = Handles(self.columns, bare)
        return self._bare

    def lacking(self, columns: Ints) -> dict[GpuIndex, int]:
        """Handles that these lack on each GPU and that are not ordered yet."""
        return self.bare_handles().sum(columns)

    def fitting(self, columns: Ints, handles: Mapping[GpuIndex, int]) -> int:
        """How many of these can be backed by so many handles, from the first on."""
        bare = self.bare_handles()
        return min([bare.fitting(gpu, columns, handles[gpu]) for gpu in self._gpu_handles], default=len(columns))

    def are_whole(self, columns: Bools) -> Bools:
        """Of every block, whether it lies in these columns only."""
        inside: Bools = columns[self._block_columns]
        if len(inside) == len(self._block_ptr) - 1:  # none straddles
            return inside
        whole: Bools = np.logical_and.reduceat(inside, self._block_ptr[:-1])
        return whole

    @remembered
    def takeable(self) -> Bools:
        """Columns that may be taken now."""
        return self.backed_columns() & self._reclaimable & ~self.going

    @remembered
    def takeable_handles(self) -> dict[GpuIndex, int]:
        return {gpu: int(counts[self.takeable()].sum()) for gpu, counts in self._gpu_handles.items()}

    @remembered
    def takes_any(self) -> bool:
        """Whether anything may be taken now."""
        return any(self.takeable_handles().values())


def _cells_of(rank: Rank, first_book: int) -> tuple[Ints, Ints, Ints]:
    """(column, book, slot) of every handle that holds a block. Handles are counted through all ranges in order."""
    starts = np.concatenate([[0], np.cumsum([book.slots for book in rank.books])])
    counts = [len(column.handles) for column in rank.columns.columns]
    handles = np.array([handle for column in rank.columns.columns for handle in column.handles], dtype=np.int64)
    column = np.repeat(np.arange(len(counts)), counts)
    book = np.searchsorted(starts, handles, side="right") - 1
    return column, book + first_book, handles - starts[book]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Queue:
    """The columns of an engine in the order in which the policy takes them; the first ones, if fewer are needed."""

    index: CostIndex
    takeable: NDArray[np.bool_]
    handles: int  # of the engine's first rank that were asked for
    picks: tuple[ColumnPick, ...]
    columns: Ints

    def serves(self, index: CostIndex, takeable: NDArray[np.bool_], handles: int) -> bool:
        is_served = index is self.index and handles <= self.handles
        return is_served and (takeable is self.takeable or np.array_equal(takeable, self.takeable))


def queue_of(index: CostIndex, takeable: NDArray[np.bool_], handles: int) -> Queue:
    """Reads only, so that a thread may do it."""
    able = replace(index, column_cost=np.where(takeable, index.column_cost, np.inf))
    picks = select(able, handles).picks
    columns = np.array([pick.column_id for pick in picks], dtype=np.int64)
    return Queue(index=index, takeable=takeable, handles=handles, picks=picks, columns=columns)
