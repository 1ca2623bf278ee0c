"""Attached engines: where their blocks lie, which columns have memory, what their books say. Books without effects.

An engine is the scheduler's hook of one service and the ranks that registered a layout. All ranks lose and get the same
columns, so a column here is its cells on every rank: (range, slot) pairs. A layout whose columns are cut otherwise than
those of its siblings is refused.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import compress

import numpy as np
from valve_abi import KvMode

from valved.abi.kv_files import LOOP_CELLS, MAX_CELLS, BookView, KvBook, KvTable
from valved.abi.kv_link import KvAttach
from valved.fds import Fds
from valved.kv.columns import QUEUED, Bools, Columns, Queue, Rank, queue_of
from valved.kv.orders import Order
from valved.kv.slots import NOTHING, Ints
from valved.model.ids import ClientId, Role, ServiceId
from valved.model.memory import ColumnId, LayoutRefused
from valved.policy.eviction import BlockTables, CostIndex, EvictionSettings, index_requests

STALE_NS = 1_000_000_000  # an index that is older is made again for a reclaim, if its request table is small now


class Engine(Columns):
    """One attached engine."""

    def __init__(
        self, hook: ClientId, service: ServiceId, role: Role, attach: KvAttach, table: KvTable | None = None
    ) -> None:
        super().__init__()
        self.hook = hook
        self.service = service
        self.role = role
        self.name = attach.engine
        self.expected_ranks = attach.ranks
        with Fds() as fds:
            self.table = KvTable(attach.blocks, attach.block_tokens) if table is None else table
            fds.callback(self.table.close)
            self.book = KvBook(attach.rows, attach.row_blocks, attach.blocks, attach.block_tokens)
            fds.keep()
        self.ranks: dict[ClientId, Rank] = {}
        self.is_broken = False
        self.is_complete = False  # every rank has said where its blocks lie
        self.blocks_per_column = self.table.blocks
        self.column_handles = 1  # of the largest column, as the policy counts them: of one rank
        self.attached_mode = attach.mode
        self.index: CostIndex | None = None
        self.queue: Queue | None = None
        self.indexed_steps = -1
        self.indexed_ns = 0
        self.rung_ns: int | None = None  # when its hook rang, by its own clock, until that is looked at
        self.owes: list[Order] = []  # when a reclaim ended: orders that it had not carried out
        self.is_indexing = False
        self.index_after_ns = 0  # not before: what an index costs is a share of the loop at most

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
        self.is_complete &= not self.is_broken

    def _gather(self) -> None:
        self.index, self.queue, self.indexed_steps = None, None, -1
        self.lay(list(self.ranks.values()))
        self.is_complete = len(self.ranks) == self.expected_ranks and not self.is_broken
        self.blocks_per_column = max(1, -(-self.table.blocks // max(1, self.columns)))
        first = next(iter(self.ranks.values())).columns
        self.column_handles = int(first.handles_of_column.max(initial=1))
        lowest = first.block_columns[first.block_column_ptr[:-1].clip(max=len(first.block_columns) - 1)]
        self.table.set_columns(lowest, self.columns)

    # Questions

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

    @property
    def is_late(self) -> bool:
        """A reclaim has waited in vain for memory that it has still to give."""
        return any(not order.settled.is_set for order in self.owes)

    def offered_columns(self) -> Ints:
        """Standing columns that the hook offers whole. A block that straddles belongs to each of its columns."""
        offered = self.book.offered()
        if not offered.any():
            return np.empty(0, np.int64)
        open_ = self.standing_columns() & self._reclaimable & ~self.going
        kept = np.zeros(self.columns, np.bool_)
        kept[self._block_columns[~np.repeat(offered, np.diff(self._block_ptr))]] = True
        return np.flatnonzero(open_ & ~kept)

    def offered_though_wanted(self, wanted_blocks: int) -> Ints:
        """Standing blocks that the hook offers, where use has risen since: it waits for what it has itself."""
        offered = self.book.offered()
        if not offered.any():  # as a rule; who rang waits for this
            return NOTHING
        standing = self.table.is_backed()
        offered &= standing
        is_wanted = wanted_blocks > int(standing.sum()) - int(offered.sum())
        return np.flatnonzero(offered) if is_wanted else NOTHING

    # Victims

    def make_index(self, settings: EvictionSettings, most_cells: int = MAX_CELLS) -> CostIndex:
        """What each column would cost. Reads only, so that a thread may do it: its size is for the client to choose."""
        rows = self.book.requests(most_cells)
        tables = BlockTables(ptr=rows.ptr, blocks=rows.blocks, tokens=rows.tokens)
        return index_requests(next(iter(self.ranks.values())).columns, tables, settings)

    def make_queue(self, takeable: Bools, settings: EvictionSettings) -> Queue:
        """What would be taken first, of these. Reads only, too."""
        index = self.make_index(settings)
        return queue_of(index, takeable, min(self.columns, QUEUED) * self.column_handles)

    def index_now(self, settings: EvictionSettings, now_ns: int) -> None:
        """On the loop: of a large book the first rows alone count."""
        self.put_index(self.make_index(settings, LOOP_CELLS), self.view().steps, now_ns)

    def put_index(self, index: CostIndex, steps: int, now_ns: int) -> None:
        """One that was begun at this step count of the engine."""
        self.index, self.indexed_steps, self.indexed_ns = index, steps, now_ns

    @property
    def is_index_new(self) -> bool:
        """The engine has not stepped since."""
        return self.index is not None and self.view().steps == self.indexed_steps

    @property
    def is_queue_new(self) -> bool:
        queue = self.queue
        return queue is not None and queue.index is self.index and np.array_equal(queue.takeable, self.takeable())

    def leave_queue(self, columns: Ints) -> None:
        """These are being taken: the others follow in the same order."""
        if (queue := self.queue) is not None:
            stays = ~np.isin(queue.columns, columns)
            handles = queue.handles - len(columns) * self.column_handles
            picks = tuple(compress(queue.picks, stays))
            columns = queue.columns[stays]
            self.queue = replace(queue, takeable=self.takeable(), handles=handles, picks=picks, columns=columns)

    def close(self) -> None:
        self.table.close()
        self.book.close()


def ids(columns: Ints) -> tuple[ColumnId, ...]:
    return tuple(ColumnId(column) for column in columns.tolist())
