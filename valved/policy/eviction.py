"""Which columns to take from the offline engine: selective eviction, the paper's Algorithm 1 on columns.

Two steps, so that the expensive one runs ahead of need. `index_requests` turns the engine's block tables into chains
and what each column would cost each chain; kv/reclaim refreshes it while offline runs. `select` walks it when
memory is wanted: until enough handles, take the column with the least marginal cost. The ids that the engine is told
afterwards come from the columns, so a slightly old index can make a choice dearer but never wrong.

A chain is a run of blocks held by the same requests: a shared prefix is one chain, a private tail another. Losing a
column costs a chain everything behind the first block lost, in it or in a chain before it; the cost of a set is the
sum over chains of the worst loss any chosen column causes. So shared prefixes count once and marginal costs only
fall, but a fallen cost can become the smallest: a lazy heap of old costs is NOT exact for a minimum. `select`
therefore keeps all marginal costs up to date, touching only the chains hit. Its loop is C (greedy.c).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from valved.model.memory import ColumnId, ColumnPick, EvictionCost, OfflineRequest, ReclaimDecision
from valved.policy._greedy import ffi, lib
from valved.policy.columns import ColumnMap

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
MAX_CHAIN_DEPTH = 8
"""Branchings of a shared prefix that are told apart; prompts of batch jobs have one or two (system, few-shot)."""
ENTRY_BITS = 24
"""Room for 16M entries beside 2^39 (chain, column) pairs in one sortable word."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvictionSettings:
    """How a lost token is priced; defaults for an 8B model on an H100, replaced by the job's profile."""

    cost: EvictionCost = EvictionCost.RECOMPUTE_NS
    token_ns: int = 21_000
    """Prefill time of one token in the linear layers: 48k token/s measured for 7B on H100 [Vidur tables]."""
    attention_ps_per_pair: int = 1_300
    """Attention time for each (token, earlier token) pair: 4 * layers * hidden / 40 % of 989 TFLOP/s for 8B."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockTables:
    """All requests of one engine as flat arrays: request r owns blocks[ptr[r]:ptr[r + 1]] in token order."""

    ptr: Ints
    blocks: Ints
    tokens: Ints

    @staticmethod
    def of(requests: Sequence[OfflineRequest]) -> BlockTables:
        return BlockTables(
            ptr=np.concatenate([[0], np.cumsum([len(one.blocks) for one in requests])]).astype(np.int64),
            blocks=np.array([block for one in requests for block in one.blocks], dtype=np.int64),
            tokens=np.array([one.tokens for one in requests], dtype=np.int64),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CostIndex:
    """Loss of each chain at each column, sorted by chain and falling loss, with the way back from columns.

    Losses are whole numbers kept in float64: sums stay exact below 2^53 and ties are real ties.
    """

    cost: EvictionCost
    column_map: ColumnMap
    chain_ptr: Ints
    entry_column: Ints
    entry_loss: Floats
    column_ptr: Ints
    column_entries: Ints
    """Entry numbers by column."""
    entry_chain: Ints
    column_cost: Floats
    """Marginal cost of each column when nothing is taken; infinite where it must not be taken."""
    free_blocks: Ints
    """Blocks of each column that no request holds, for ties."""

    def entries_of(self, column: int) -> Ints:
        return self.column_entries[self.column_ptr[column] : self.column_ptr[column + 1]]


def select(index: CostIndex, needed_handles: int, policy: str = "selective") -> ReclaimDecision:
    """Greedy: each step takes a cheapest column; ties go to fewer chains, more free blocks, lower address."""
    handles = index.column_map.handles_of_column
    columns = len(handles)
    costs = index.column_cost.copy()
    unused = _unused(index, needed_handles)
    costs[unused] = np.inf
    freed = int(handles[unused].sum())
    lost = np.zeros(len(index.chain_ptr) - 1)
    live_end = index.chain_ptr[1:].copy()
    picks, marginal = np.empty(columns, dtype=np.int64), np.empty(columns)
    view = ffi.new("struct valve_cost_index *", {"columns": columns})
    view.chain_ptr, view.entry_column = _ints(index.chain_ptr), _ints(index.entry_column)
    view.entry_loss, view.entry_chain = _floats(index.entry_loss), _ints(index.entry_chain)
    view.column_ptr, view.column_entries = _ints(index.column_ptr), _ints(index.column_entries)
    view.free_blocks, view.handles = _ints(index.free_blocks), _ints(handles)
    least = np.full(columns // lib.VALVE_GREEDY_GROUP + 1, -1.0)
    scratch = (_floats(costs), _floats(lost), _ints(live_end), _floats(least))
    count = lib.valve_greedy_select(view, *scratch, needed_handles - freed, _ints(picks), _floats(marginal))
    taken = np.concatenate([unused, picks[:count]])
    steps = zip(taken.tolist(), [0.0] * len(unused) + marginal[:count].tolist(), strict=True)
    made = [ColumnPick(column_id=ColumnId(column), marginal_cost=int(cost)) for column, cost in steps]
    return decision_of(policy, index.cost, made, needed_handles, int(handles[taken].sum()))


def _unused(index: CostIndex, needed_handles: int) -> Ints:
    """Columns that cost nothing from the start, in tie order, as far as they are needed."""
    unused = np.flatnonzero(index.column_cost == 0)
    unused = unused[np.argsort(-index.free_blocks[unused], kind="stable")]
    reached = np.cumsum(index.column_map.handles_of_column[unused])
    return unused[: int(np.searchsorted(reached, needed_handles)) + 1] if needed_handles > 0 else unused[:0]


def _ints(values: Ints) -> Any:
    return ffi.from_buffer("int64_t[]", values)


def _floats(values: Floats) -> Any:
    return ffi.from_buffer("double[]", values)


def decision_of(
    policy: str, cost: EvictionCost | None, picks: list[ColumnPick], needed_handles: int, freed: int
) -> ReclaimDecision:
    """Wrap the picks with the reason that `valve explain reclaim` prints."""
    missing = max(0, needed_handles - freed)
    reason = f"{len(picks)} columns give {freed} of {needed_handles} handles"
    return ReclaimDecision(
        policy=policy,
        cost=cost,
        picks=tuple(picks),
        needed_handles=needed_handles,
        freed_handles=freed,
        total_cost=sum(pick.marginal_cost for pick in picks),
        reason=reason if not missing else f"{reason}; no reclaimable column is left for {missing}",
    )


def index_requests(column_map: ColumnMap, tables: BlockTables, settings: EvictionSettings) -> CostIndex:
    """Chains and losses from the engine's block tables; a block id out of range is refused by name."""
    if len(tables.blocks) and not 0 <= int(tables.blocks.min()) <= int(tables.blocks.max()) < column_map.blocks:
        raise ValueError(f"a request names a block outside 0..{column_map.blocks - 1}")
    holders = np.bincount(tables.blocks, minlength=column_map.blocks)
    triples = _losses(column_map, tables, holders, settings)
    return _index_of(column_map, settings.cost, triples, holders)


def _losses(
    column_map: ColumnMap, tables: BlockTables, holders: Ints, settings: EvictionSettings
) -> tuple[Ints, Ints, Floats]:
    """(chain, column, loss) triples, by chain and falling loss; a (chain, column) pair may still repeat."""
    counts_requests = settings.cost in (EvictionCost.REQUESTS, EvictionCost.TOKENS)
    if not counts_requests and int(holders.max(initial=0)) > 1:
        return _chain_losses(column_map, tables, holders, settings)
    is_start = np.zeros(len(tables.blocks), dtype=np.bool_)
    is_start[tables.ptr[:-1][np.diff(tables.ptr) > 0]] = True
    touch, column = _first_touches(column_map, tables.blocks, is_start)
    owner = np.searchsorted(tables.ptr, touch, side="right") - 1
    if counts_requests:
        whole = np.ones(len(tables.tokens)) if settings.cost is EvictionCost.REQUESTS else tables.tokens
        return owner, column, np.maximum(whole[owner], 1.0)
    first_token = np.minimum((touch - tables.ptr[owner]) * column_map.block_tokens, tables.tokens[owner])
    loss = _price(tables.tokens, settings)[owner] - _price(first_token, settings)
    return owner, column, np.maximum(loss, 1.0)


def _price(tokens: Ints, settings: EvictionSettings) -> Floats:
    """Cost of computing the first `tokens` tokens of a request, in whole tokens or nanoseconds."""
    if settings.cost is EvictionCost.PREFIX_TOKENS:
        return tokens.astype(np.float64)
    count = tokens.astype(np.float64)
    return np.floor(count * (settings.token_ns + settings.attention_ps_per_pair / 2000 * count))


def _chain_losses(
    column_map: ColumnMap, tables: BlockTables, holders: Ints, settings: EvictionSettings
) -> tuple[Ints, Ints, Floats]:
    """Requests with shared prefixes cut into chains where the number of holders changes.

    A chain is known by its first block, the same for all its holders; the first of them speaks for it.
    """
    lengths = np.diff(tables.ptr)
    owner = np.repeat(np.arange(len(lengths)), lengths)
    position = np.arange(len(tables.blocks)) - np.repeat(tables.ptr[:-1], lengths)
    price_before = _price(np.minimum(position * column_map.block_tokens, tables.tokens[owner]), settings)
    is_last = np.concatenate([position[1:] == 0, [True]])
    price_after = np.where(is_last, _price(tables.tokens, settings)[owner], np.concatenate([price_before[1:], [0.0]]))
    count = holders[tables.blocks]
    cuts = np.cumsum((position == 0) | (count != np.concatenate([[0], count[:-1]])))
    depth = np.minimum(cuts - cuts[tables.ptr[:-1][owner]], MAX_CHAIN_DEPTH - 1)
    parts = []
    for level in range(int(depth.max()) + 1):
        inside = depth == level
        heads = np.flatnonzero(inside & ((position == 0) | np.concatenate([[True], ~inside[:-1]])))
        tails = np.flatnonzero(inside & (is_last | np.concatenate([~inside[1:], [True]])))
        spoken = np.sort(np.unique(tables.blocks[heads], return_index=True)[1])
        head_of = np.full(len(tables.tokens), -1)
        end_of = np.zeros(len(tables.tokens))
        head_of[owner[heads[spoken]]] = heads[spoken]
        end_of[owner[tails]] = price_after[tails]
        hit = np.flatnonzero((head_of[owner] >= 0) & (depth <= level))
        head = head_of[owner[hit]]
        loss = end_of[owner[hit]] - np.maximum(price_before[hit], price_before[head])
        parts.append((tables.blocks[head], tables.blocks[hit], loss))
    first_block, blocks, loss = (np.concatenate(column) for column in zip(*parts, strict=True))
    order = np.lexsort((-loss, first_block))
    chain = np.unique(first_block[order], return_inverse=True)[1]
    touch, column = _first_touches(column_map, blocks[order], np.concatenate([[True], chain[1:] != chain[:-1]]))
    return chain[touch], column, np.maximum(loss[order][touch], 1.0)


def _first_touches(column_map: ColumnMap, blocks: Ints, is_start: NDArray[np.bool_]) -> tuple[Ints, Ints]:
    """(index into blocks, column) wherever a chain enters a column; a block that straddles handles enters each.

    Of neighbours in one column only the first is kept: it is the dearest, and with column-affine hand-out this
    leaves a few per cent of the blocks to work on.
    """
    if column_map.has_straddling:
        starts = column_map.block_column_ptr[blocks]
        counts = column_map.block_column_ptr[blocks + 1] - starts
        behind = np.cumsum(counts) - counts
        column = column_map.block_columns[np.arange(int(counts.sum())) + np.repeat(starts - behind, counts)]
        at = np.repeat(np.arange(len(blocks)), counts)
        changes = np.zeros(len(at), dtype=np.bool_)
        changes[behind[is_start]] = True
    else:
        column, at, changes = column_map.block_columns[blocks], None, is_start
    changes = changes.copy()
    changes[1:] |= column[1:] != column[:-1]
    kept = np.flatnonzero(changes)
    return kept if at is None else at[kept], column[kept]


def _index_of(
    column_map: ColumnMap, cost: EvictionCost, triples: tuple[Ints, Ints, Floats], holders: Ints
) -> CostIndex:
    chain, column, loss = _without_repeats(*triples, len(column_map.columns))
    columns = len(column_map.columns)
    chains = int(chain.max(initial=-1)) + 1
    small = column.astype(np.uint16) if columns <= 1 << 16 else column
    costs = np.bincount(column, weights=loss, minlength=columns)
    return CostIndex(
        cost=cost,
        column_map=column_map,
        chain_ptr=np.searchsorted(chain, np.arange(chains + 1)),
        entry_column=column,
        entry_loss=loss,
        column_ptr=np.concatenate([[0], np.cumsum(np.bincount(column, minlength=columns))]),
        column_entries=np.argsort(small, kind="stable"),
        entry_chain=chain,
        column_cost=np.where(column_map.is_reclaimable, costs, np.inf),
        free_blocks=_free_blocks(column_map, holders),
    )


def _free_blocks(column_map: ColumnMap, holders: Ints) -> Ints:
    free = np.flatnonzero(holders == 0)
    if not column_map.has_straddling:
        return np.bincount(column_map.block_columns[free], minlength=len(column_map.columns))
    is_free = np.repeat(holders == 0, np.diff(column_map.block_column_ptr))
    return np.bincount(column_map.block_columns[is_free], minlength=len(column_map.columns))


def _without_repeats(chain: Ints, column: Ints, loss: Floats, columns: int) -> tuple[Ints, Ints, Floats]:
    """Keep the first, dearest entry of each (chain, column)."""
    packed = np.sort((chain * columns + column) << ENTRY_BITS | np.arange(len(chain)))
    group = packed >> ENTRY_BITS
    is_first = np.concatenate([[True], group[1:] != group[:-1]])[: len(packed)]
    kept = np.sort(packed[is_first] & ((1 << ENTRY_BITS) - 1))
    return chain[kept], column[kept], loss[kept]
