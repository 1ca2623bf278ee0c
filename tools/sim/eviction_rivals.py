"""Other ways to choose columns than the product's, for comparison: by age, at random, exactly.

Same answer type as eviction.select, priced with the same index. All take wholly free columns first, as any pool
hands out unused memory first.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from valved.model.memory import ColumnId, ColumnPick, ReclaimDecision
from valved.policy.eviction import CostIndex, decision_of

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnAges:
    """When each column was first and last handed a block, in any unit that grows; what the age policies go by."""

    first_given: Ints
    last_given: Ints


def fifo(index: CostIndex, ages: ColumnAges, needed_handles: int) -> ReclaimDecision:
    """Oldest first allocation first."""
    return _in_order(index, np.argsort(ages.first_given, kind="stable"), needed_handles, "fifo")


def lru(index: CostIndex, ages: ColumnAges, needed_handles: int) -> ReclaimDecision:
    """Longest since a block was handed out first."""
    return _in_order(index, np.argsort(ages.last_given, kind="stable"), needed_handles, "lru")


def shuffled(index: CostIndex, seed: int, needed_handles: int) -> ReclaimDecision:
    """In an order drawn from the seed."""
    order = np.random.default_rng(seed).permutation(len(index.column_map.columns))
    return _in_order(index, order, needed_handles, "random")


def exact(index: CostIndex, needed_handles: int, max_columns: int = 22) -> ReclaimDecision:
    """The cheapest set there is, by depth-first search with bounds; small cases only."""
    usable = [int(one) for one in np.flatnonzero(index.column_map.is_reclaimable)]
    if len(usable) > max_columns:
        raise ValueError(f"{len(usable)} reclaimable columns are too many for an exact search, at most {max_columns}")
    search = _Search(index, usable, needed_handles)
    return _decision(index, search.best_set(), needed_handles, "exact")


def marginal_costs(index: CostIndex, columns: list[int]) -> list[int]:
    """What each column adds when they are taken in this order."""
    lost = np.zeros(len(index.chain_ptr) - 1)
    added = []
    for column in columns:
        entries = index.entries_of(column)
        chains = index.entry_chain[entries]
        worst = np.maximum(lost[chains], index.entry_loss[entries])
        added.append(int((worst - lost[chains]).sum()))
        lost[chains] = worst
    return added


def _in_order(index: CostIndex, order: Ints, needed_handles: int, policy: str) -> ReclaimDecision:
    order = order[index.column_map.is_reclaimable[order]]
    is_free = index.column_ptr[order] == index.column_ptr[order + 1]
    order = np.concatenate([order[is_free], order[~is_free]])
    reached = np.cumsum(index.column_map.handles_of_column[order])
    count = int(np.searchsorted(reached, needed_handles)) + 1 if needed_handles > 0 else 0
    return _decision(index, [int(one) for one in order[:count]], needed_handles, policy)


def _decision(index: CostIndex, columns: list[int], needed_handles: int, policy: str) -> ReclaimDecision:
    picks = [
        ColumnPick(column_id=ColumnId(column), marginal_cost=cost)
        for column, cost in zip(columns, marginal_costs(index, columns), strict=True)
    ]
    freed = int(index.column_map.handles_of_column[columns].sum()) if columns else 0
    return decision_of(policy, index.cost, picks, needed_handles, freed)


class _Search:
    """Depth-first over take / leave; a branch is cut when it costs as much as the best set or cannot free enough."""

    def __init__(self, index: CostIndex, usable: list[int], needed_handles: int) -> None:
        self._index = index
        self._usable = usable
        self._handles = [int(index.column_map.handles_of_column[one]) for one in usable]
        self._needed = min(needed_handles, sum(self._handles))
        self._best: tuple[float, list[int]] = (float("inf"), usable)

    def best_set(self) -> list[int]:
        self._visit(0, [], 0, 0.0, np.zeros(len(self._index.chain_ptr) - 1))
        return self._best[1]

    def _visit(self, at: int, taken: list[int], freed: int, cost: float, lost: NDArray[np.float64]) -> None:
        if cost >= self._best[0] or freed + sum(self._handles[at:]) < self._needed:
            return
        if freed >= self._needed:
            self._best = (cost, taken)
            return
        column = self._usable[at]
        entries = self._index.entries_of(column)
        chains = self._index.entry_chain[entries]
        worst = lost.copy()
        worst[chains] = np.maximum(lost[chains], self._index.entry_loss[entries])
        added = float((worst - lost).sum())
        self._visit(at + 1, [*taken, column], freed + self._handles[at], cost + added, worst)
        self._visit(at + 1, taken, freed, cost, lost)
