"""What a reclaim will ask first, worked out before it comes: the columns of an engine, the cheapest first."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from valved.kv.slots import Ints
from valved.model.memory import ColumnPick
from valved.policy.eviction import CostIndex, select

COLUMNS = 1024  # of an engine that are put in order ahead of need: a GiB in handles of 2 MiB are 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Queue:
    """The columns of an engine in the order in which the policy takes them. Whoever needs fewer takes the first."""

    index: CostIndex
    takeable: NDArray[np.bool_]
    handles: int  # of the engine's first rank that were asked for
    picks: tuple[ColumnPick, ...]
    columns: Ints

    def serves(self, index: CostIndex, takeable: NDArray[np.bool_], handles: int) -> bool:
        return index is self.index and handles <= self.handles and np.array_equal(takeable, self.takeable)


def queue_of(index: CostIndex, takeable: NDArray[np.bool_], handles: int) -> Queue:
    """Reads only, so that a thread may do it."""
    able = replace(index, column_cost=np.where(takeable, index.column_cost, np.inf))
    picks = select(able, handles).picks
    columns = np.array([pick.column_id for pick in picks], dtype=np.int64)
    return Queue(index=index, takeable=takeable, handles=handles, picks=picks, columns=columns)


def per_column(index: CostIndex) -> int:
    """Handles of the largest column, as `handles` are counted here."""
    return int(index.column_map.handles_of_column.max(initial=1))
