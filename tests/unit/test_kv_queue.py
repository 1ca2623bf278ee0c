"""The order of victims that stands ready serves every need as a choice of its own would."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from valved.kv.columns import queue_of
from valved.model.memory import KvLayout, KvRange, KvTensor
from valved.policy.columns import columns_of
from valved.policy.eviction import BlockTables, EvictionSettings, index_requests, select

COLUMNS = 40


def index(seed):
    """Requests that share prefixes, over a cache of two planes."""
    chance = np.random.default_rng(seed)
    ranges = tuple(KvRange(base_addr=(at + 1) << 40, handle_bytes=1 << 21, handles=COLUMNS) for at in range(2))
    tensors = tuple(
        KvTensor(base_addr=one.base_addr, block_stride_bytes=1 << 19, block_bytes=1 << 19) for one in ranges
    )
    layout = KvLayout(ranges=ranges, tensors=tensors, blocks=4 * COLUMNS, block_tokens=16, pinned_blocks=(0,))
    shared = chance.integers(1, 4 * COLUMNS, 3).tolist()
    rows = [shared * (row % 2) + chance.integers(1, 4 * COLUMNS, 8).tolist() for row in range(12)]
    tables = BlockTables(
        ptr=np.concatenate([[0], np.cumsum([len(row) for row in rows])]),
        blocks=np.array([block for row in rows for block in row]),
        tokens=np.array([16 * len(row) for row in rows]),
    )
    return index_requests(columns_of(layout), tables, EvictionSettings()), chance


@pytest.mark.parametrize("seed", range(20))
def test_who_needs_fewer_never_gets_others_than_the_first_of_the_queue(seed):
    costs, chance = index(seed)
    takeable = chance.random(COLUMNS) < 0.8
    able = replace(costs, column_cost=np.where(takeable, costs.column_cost, np.inf))

    queue = queue_of(costs, takeable, 2 * COLUMNS)

    for handles in range(1, 2 * COLUMNS):
        picks = select(able, handles).picks
        assert queue.picks[: len(picks)] == picks
    assert takeable[queue.columns].all()


def test_a_queue_of_other_columns_or_another_index_never_serves():
    costs, _ = index(1)
    takeable = np.ones(COLUMNS, np.bool_)
    queue = queue_of(costs, takeable, 10)
    fewer = takeable.copy()
    fewer[3] = False

    assert queue.serves(costs, takeable.copy(), 10)
    assert not queue.serves(costs, takeable, 11)
    assert not queue.serves(costs, fewer, 10)
    assert not queue.serves(index(1)[0], takeable, 10)
