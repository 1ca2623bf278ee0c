"""Attached engines: where their blocks lie, which columns have memory, what their books say. Books without effects.

An engine is the scheduler's hook of one service and the ranks that registered a layout. All ranks lose and get the same
columns, so a column here is its cells on every rank: (range, slot) pairs. A layout whose columns are cut otherwise than
those of its siblings is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from valve_abi import KvMode

from valved.abi.kv_files import BookView, KvBook, KvTable
from valved.abi.kv_link import KvAttach, KvLayoutPart
from valved.kv.ahead import COLUMNS, Queue, per_column, queue_of
from valved.kv.slots import NO_HANDLE, NOTHING, STRANGE, Ints, KvRangeBook, RangeSlots, SlotHandles
from valved.model.ids import ClientId, GpuIndex, Role, ServiceId
from valved.model.memory import ColumnId, KvLayout, KvRange, LayoutRefused
from valved.policy.columns import ColumnMap, columns_of
from valved.policy.eviction import BlockTables, CostIndex, EvictionSettings, index_requests

Bools = NDArray[np.bool_]
Found = TypeVar("Found")


def remembered(find: Callable[[Engine], Found]) -> Callable[[Engine], Found]:
    """What follows from the books is worked out once, and stands until they change: ahead of need, by the tick."""

    @wraps(find)
    def known(engine: Engine) -> Found:
        answers = engine.known()
        found = answers.get(find.__name__)
        if found is None:
            found = answers[find.__name__] = find(engine)
            if isinstance(found, np.ndarray):
                found.flags.writeable = False
        return found  # type: ignore[no-any-return]

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


class Engine:
    """One attached engine."""

    def __init__(self, hook: ClientId, service: ServiceId, role: Role, attach: KvAttach) -> None:
        self.hook = hook
        self.service = service
        self.role = role
        self.name = attach.engine
        self.expected_ranks = attach.ranks
        self.table = KvTable(attach.blocks, attach.block_tokens)
        self.book = KvBook(attach.rows, attach.row_blocks, attach.blocks, attach.block_tokens)
        self.ranks: dict[ClientId, Rank] = {}
        self.is_broken = False
        self.index: CostIndex | None = None
        self.queue: Queue | None = None
        self.indexed_steps = -1
        self.indexed_ns = 0
        self.rung_ns = 0  # when its hook rang, by its own clock; 0 once that was looked at
        self.index_ns = 0  # how long the last one took
        self.is_indexing = False
        self.index_after_ns = 0  # not before: what an index costs is a share of the loop at most
        self.attached_mode = attach.mode
        self.going: Bools = np.zeros(0, np.bool_)  # columns with an order under way; written by `mark`
        self.lost: Bools = np.zeros(0, np.bool_)  # of those, columns that are being taken away
        self._books: tuple[KvRangeBook, ...] = ()
        self._at = SlotHandles(NOTHING)  # at each slot of all its ranges, one after the other
        self._cell_column = self._cell_place = np.empty(0, np.int64)
        self._block_columns = self._block_ptr = np.empty(0, np.int64)
        self._parts: list[Cells] = []
        self.places: list[KvRangeBook] = []  # a range for each process and GPU where it has some
        self._known: dict[str, Any] = {}
        self._known_at = -1, -1  # changes of `_at`, and others, that are in it
        self._changes = 0
        self._reclaimable: Bools = np.zeros(0, np.bool_)
        self._gpu_handles: dict[GpuIndex, Ints] = {}

    # Ranks

    def join(self, rank: Rank) -> None:
        """Raises LayoutRefused when it is not cut like its siblings."""
        columns = rank.columns
        if columns.blocks != self.table.blocks:
            raise LayoutRefused("blocks", f"the engine attached with {self.table.blocks} blocks, not {columns.blocks}")
        spans = [column.blocks for column in columns.columns]
        if any(spans != [column.blocks for column in known.columns.columns] for known in self.ranks.values()):
            raise LayoutRefused("tensors", "the columns differ from those of another rank: give all ranks one layout")
        self.ranks[rank.client] = rank
        self._gather()

    def leave(self, client: ClientId) -> None:
        """One rank less is the end of it: what remains cannot compute. A new attachment begins anew."""
        self.is_broken |= client in self.ranks

    def _gather(self) -> None:
        self.index, self.queue, self.indexed_steps = None, None, -1
        ranks = list(self.ranks.values())  # one at least: it has just joined
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
        self._at = SlotHandles(np.concatenate([book.at for book in self._books]))
        for first_slot, known in zip(starts.tolist(), self._books, strict=False):  # from here on parts of one array
            known.join(self._at, first_slot)
        first = ranks[0].columns
        self._reclaimable = np.logical_and.reduce([rank.columns.is_reclaimable for rank in ranks])
        self.heed_pins()
        self._block_columns, self._block_ptr = first.block_columns, first.block_column_ptr
        if len(self.going) != len(first.columns):
            self.going = np.zeros(len(first.columns), np.bool_)
            self.lost = np.zeros(len(first.columns), np.bool_)
        owners = [(book.key.client, book.gpu) for book in self._books]
        self._parts = [self._cells_in([at == owner for at in owners], cell_book, cell_slot) for owner in dict.fromkeys(owners)]
        self.places = [self._books[owners.index(owner)] for owner in dict.fromkeys(owners)]
        gpu_of = np.array([book.gpu for book in self._books])[cell_book]
        self._gpu_handles = {
            GpuIndex(gpu): np.bincount(self._cell_column[gpu_of == gpu], minlength=len(first.columns))
            for gpu in np.unique(gpu_of).tolist()
        }
        lowest = first.block_columns[first.block_column_ptr[:-1].clip(max=len(first.block_columns) - 1)]
        self.table.set_columns(lowest, len(first.columns))

    def _cells_in(self, is_mine: list[bool], cell_book: Ints, cell_slot: Ints) -> Cells:
        mine = np.flatnonzero(np.array(is_mine)[cell_book])
        books = tuple(book for book, is_one in zip(self._books, is_mine, strict=True) if is_one)
        of = (np.cumsum(is_mine) - 1)[cell_book[mine]]
        slots = RangeSlots(books=books, of=of, slots=cell_slot[mine])
        return Cells(slots=slots, column=self._cell_column[mine], place=self._cell_place[mine])

    def mark(self, columns: Ints, *, going: bool, lost: bool = False) -> None:
        self.going[columns], self.lost[columns] = going, lost
        self._changes += 1

    def heed_pins(self) -> None:
        """Columns with a slot that may never be taken. A pin costs one look at the cells, not a new map."""
        self._changes += 1
        if self._books:
            is_pinned = np.concatenate([book.pinned for book in self._books])[self._cell_place]
            self._reclaimable[self._cell_column[is_pinned]] = False

    # Questions

    @property
    def is_complete(self) -> bool:
        """Every rank has said where its blocks lie."""
        return len(self.ranks) == self.expected_ranks and not self.is_broken

    @property
    def columns(self) -> int:
        return len(self._reclaimable)

    @property
    def gpus(self) -> frozenset[GpuIndex]:
        return frozenset(self._gpu_handles)

    @property
    def clients(self) -> frozenset[ClientId]:
        return frozenset(self.ranks)

    def view(self) -> BookView:
        return self.book.view()

    @property
    def heeds_table(self) -> bool:
        """Blocks without memory are not handed out. A hook that only reports hands out any."""
        return self.is_complete and self.attached_mode in (KvMode.COARSE, KvMode.FULL)

    @property
    def can_lose(self) -> bool:
        """Its hook recomputes what is lost. Any doubt means no."""
        return self.is_complete and self.attached_mode != KvMode.NONE and self.book.mode is not KvMode.NONE

    def handles_of(self, gpu: GpuIndex) -> Ints:
        """Handles of each column on this GPU."""
        return self._gpu_handles[gpu]

    @property
    def handles_per_column(self) -> int:
        """Of the largest column, on the GPU that has most."""
        return max((int(counts.max()) for counts in self._gpu_handles.values()), default=1)

    @property
    def blocks_per_column(self) -> int:
        return max(1, -(-self.table.blocks // max(1, self.columns)))

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
        return int(((self.backed_columns() | self.going) & ~self.lost).sum())

    def _standing(self) -> Ints:
        """What stands at each cell: a handle, nothing, or a claim."""
        return self._at.rows[self._cell_place]

    @remembered
    def bare_columns(self) -> Ints:
        """Columns that could be backed now, or in part."""
        standing = self._standing()
        is_strange: Ints = np.bincount(self._cell_column[standing == STRANGE], minlength=self.columns)
        return np.flatnonzero(~self.backed_columns() & ~self.going & (is_strange == 0))

    def partial_columns(self) -> Ints:
        """Columns with some of their handles."""
        missing: Ints = np.bincount(self._cell_column[self._standing() < 0], minlength=self.columns)
        whole: Ints = np.bincount(self._cell_column, minlength=self.columns)
        return np.flatnonzero((missing > 0) & (missing < whole))

    def cells(self, columns: Ints, *, backed: bool) -> list[RangeSlots]:
        """The slots of these columns that are backed, or bare and unclaimed, process by process and GPU by GPU."""
        is_wanted = np.zeros(self.columns, np.bool_)
        is_wanted[columns] = True
        found = []
        for part in self._parts:
            standing = self._at.rows[part.place]
            is_so = standing >= 0 if backed else standing == NO_HANDLE
            chosen = np.flatnonzero(is_wanted[part.column] & is_so)
            if len(chosen):
                found.append(part.slots[chosen])
        return found

    def blocks_of(self, columns: Ints) -> Ints:
        """Every block with a byte in these columns."""
        is_in = np.zeros(self.columns, np.bool_)
        is_in[columns] = True
        return np.flatnonzero(~self.are_whole(~is_in))

    def are_whole(self, columns: Bools) -> Bools:
        """Of every block, whether it lies in these columns only."""
        inside: Bools = columns[self._block_columns]
        if len(inside) == self.table.blocks:  # none straddles
            return inside
        whole: Bools = np.logical_and.reduceat(inside, self._block_ptr[:-1])
        return whole

    def offered_columns(self) -> Ints:
        """Standing columns that the hook offers whole. A block that straddles belongs to each of its columns."""
        offered = self.book.offered()
        if not offered.any():
            return np.empty(0, np.int64)
        open_ = self.standing_columns() & self._reclaimable & ~self.going
        kept = np.zeros(self.columns, np.bool_)
        kept[self._block_columns[~np.repeat(offered, np.diff(self._block_ptr))]] = True
        return np.flatnonzero(open_ & ~kept)

    # Victims

    def make_index(self, settings: EvictionSettings) -> CostIndex:
        """What each column would cost. Reads only, so that a thread may do it: its size is for the client to choose."""
        rows = self.book.requests()
        tables = BlockTables(ptr=rows.ptr, blocks=rows.blocks, tokens=rows.tokens)
        return index_requests(next(iter(self.ranks.values())).columns, tables, settings)

    def make_queue(self, takeable: Bools, settings: EvictionSettings) -> Queue:
        """What would be taken first, of these. Reads only, too."""
        index = self.make_index(settings)
        return queue_of(index, takeable, min(self.columns, COLUMNS) * per_column(index))

    def put_index(self, index: CostIndex, steps: int, now_ns: int) -> None:
        """One that was begun at this step count of the engine."""
        self.index, self.indexed_steps, self.indexed_ns = index, steps, now_ns

    @property
    def is_index_new(self) -> bool:
        """The engine has not stepped since."""
        return self.index is not None and self.view().steps == self.indexed_steps

    @property
    def is_queue_new(self) -> bool:
        return self.queue is not None and np.array_equal(self.queue.takeable, self.takeable())

    @remembered
    def takeable(self) -> Bools:
        """Columns that may be taken now."""
        return self.backed_columns() & self._reclaimable & ~self.going

    @remembered
    def least_handles(self) -> dict[GpuIndex, int]:
        """Of the smallest column that may be taken and has some, on each GPU where there is one."""
        found = {gpu: counts[self.takeable() & (counts > 0)] for gpu, counts in self._gpu_handles.items()}
        return {gpu: int(counts.min()) for gpu, counts in found.items() if len(counts)}

    @remembered
    def takeable_handles(self) -> dict[GpuIndex, int]:
        return {gpu: int(counts[self.takeable()].sum()) for gpu, counts in self._gpu_handles.items()}

    def close(self) -> None:
        self.table.close()
        self.book.close()


def _cells_of(rank: Rank, first_book: int) -> tuple[Ints, Ints, Ints]:
    """(column, book, slot) of every handle that holds a block. Handles are counted through all ranges in order."""
    starts = np.concatenate([[0], np.cumsum([book.slots for book in rank.books])])
    counts = [len(column.handles) for column in rank.columns.columns]
    handles = np.array([handle for column in rank.columns.columns for handle in column.handles], dtype=np.int64)
    column = np.repeat(np.arange(len(counts)), counts)
    book = np.searchsorted(starts, handles, side="right") - 1
    return column, book + first_book, handles - starts[book]


def ids(columns: Ints) -> tuple[ColumnId, ...]:
    return tuple(ColumnId(column) for column in columns.tolist())
