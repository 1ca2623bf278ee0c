"""Selective eviction on cases small enough to price by hand. Columns hold four blocks of 16 tokens."""

from __future__ import annotations

import numpy as np
import pytest
from valve_tools.sim import eviction_rivals
from valve_tools.sim.eviction_rivals import ColumnAges

from valved.model.memory import EvictionCost, OfflineRequest, ReclaimDecision, RequestId
from valved.policy.columns import uniform_columns
from valved.policy.eviction import BlockTables, CostIndex, EvictionSettings, index_requests, select


def request(name: str, blocks: list[int], tokens: int | None = None) -> OfflineRequest:
    held = len(blocks) * 16 if tokens is None else tokens
    return OfflineRequest(request_id=RequestId(name), blocks=tuple(blocks), tokens=held)


def indexed(requests: list[OfflineRequest], cost: EvictionCost, columns: int = 4, pinned: int = 0) -> CostIndex:
    column_map = uniform_columns(columns, 4, pinned=pinned)
    return index_requests(column_map, BlockTables.of(requests), EvictionSettings(cost=cost))


def taken(decision: ReclaimDecision) -> list[tuple[int, int]]:
    return [(pick.column_id, pick.marginal_cost) for pick in decision.picks]


def test_free_columns_go_first_and_cost_nothing() -> None:
    index = indexed([request("a", [0, 1]), request("b", [8])], EvictionCost.TOKENS)

    assert taken(select(index, 2)) == [(1, 0), (3, 0)]


def test_the_paper_counts_all_tokens_of_each_request_once() -> None:
    """a (32 tokens) lies in columns 0 and 1, b (48) in 1 and 2: after a is hit, column 1 costs b alone."""
    index = indexed([request("a", [0, 4]), request("b", [5, 8, 9])], EvictionCost.TOKENS, columns=3)

    assert taken(select(index, 3)) == [(0, 32), (1, 48), (2, 0)]


def test_prefix_keeping_charges_only_what_lies_behind_the_first_lost_block() -> None:
    """Twelve blocks over three columns: the tail costs 64 tokens, then the middle 64 more, then the head."""
    index = indexed([request("a", list(range(12)))], EvictionCost.PREFIX_TOKENS, columns=3)

    assert taken(select(index, 3)) == [(2, 64), (1, 64), (0, 64)]


def test_recompute_time_prefers_the_same_tokens_of_a_short_request() -> None:
    """64 tokens at the end of a long request attend to more than 64 at the start of a short one."""
    index = indexed([request("long", list(range(8, 16))), request("short", [0, 1, 2, 3])], EvictionCost.RECOMPUTE_NS)

    assert [column for column, _ in taken(select(index, 3))] == [1, 0, 3]


def test_recompute_time_is_linear_plus_attention_in_whole_nanoseconds() -> None:
    settings = EvictionSettings(token_ns=1000, attention_ps_per_pair=2000)
    tables = BlockTables.of([request("a", list(range(8)))])

    decision = select(index_requests(uniform_columns(2, 4), tables, settings), 1)

    assert taken(decision) == [(1, 64 * 1000 + (128**2 - 64**2))]


def test_a_shared_prefix_is_counted_once() -> None:
    """Blocks 0-3 are the prefix of a, b and c, whose tails (16 tokens each) lie in columns 1 to 3."""
    prefix = [0, 1, 2, 3]
    requests = [request("a", [*prefix, 4]), request("b", [*prefix, 8]), request("c", [*prefix, 12])]
    index = indexed(requests, EvictionCost.PREFIX_TOKENS)

    assert index.column_cost[0] == 64 + 3 * 16
    assert taken(select(index, 4)) == [(1, 16), (2, 16), (3, 16), (0, 64)]


def test_branches_of_a_prefix_are_told_apart() -> None:
    """Column 0 is shared by three, column 1 by a and b, c branches off into column 2."""
    requests = [
        request("a", [0, 1, 2, 3, 4, 5, 6, 7, 12]),
        request("b", [0, 1, 2, 3, 4, 5, 6, 7, 13]),
        request("c", [0, 1, 2, 3, 8]),
    ]
    index = indexed(requests, EvictionCost.PREFIX_TOKENS)

    assert index.column_cost.tolist() == [64 + 64 + 32 + 16, 64 + 32, 16, 32]


def test_pinned_columns_are_never_taken_and_the_shortfall_is_told() -> None:
    decision = select(indexed([], EvictionCost.TOKENS, columns=3, pinned=1), 5)

    assert decision.columns == (1, 2)
    assert decision.missing_handles == 3
    assert "no reclaimable column is left for 3" in decision.reason


def test_ties_go_to_fewer_requests_then_more_free_blocks_then_the_lower_address() -> None:
    """64 tokens each: column 0 from two requests, column 1 from one on three blocks, 2 and 3 from one on two."""
    requests = [
        request("a", [0], tokens=32),
        request("b", [1], tokens=32),
        request("c", [4, 5, 6], tokens=64),
        request("d", [8, 9], tokens=64),
        request("e", [12, 13], tokens=64),
    ]
    index = indexed(requests, EvictionCost.TOKENS)

    assert [column for column, _ in taken(select(index, 4))] == [2, 3, 1, 0]


def test_a_block_outside_the_pool_is_refused() -> None:
    with pytest.raises(ValueError, match="outside"):
        indexed([request("a", [16])], EvictionCost.TOKENS)


def test_nothing_needed_takes_nothing() -> None:
    assert select(indexed([request("a", [0])], EvictionCost.TOKENS), 0).picks == ()


def test_age_baselines_take_free_columns_first_then_by_age() -> None:
    index = indexed([request("a", [0]), request("b", [4]), request("c", [8])], EvictionCost.TOKENS)
    ages = ColumnAges(first_given=np.array([3, 1, 2, 0]), last_given=np.array([4, 9, 5, 0]))

    assert eviction_rivals.fifo(index, ages, 3).columns == (3, 1, 2)
    assert eviction_rivals.lru(index, ages, 3).columns == (3, 0, 2)


def test_the_random_baseline_depends_on_nothing_but_its_seed() -> None:
    index = indexed([request("a", list(range(16)))], EvictionCost.TOKENS)

    assert eviction_rivals.shuffled(index, 7, 2) == eviction_rivals.shuffled(index, 7, 2)


def test_the_exact_set_can_beat_greedy() -> None:
    """Greedy starts with the cheapest column (x, 20) and then needs 60 more; the pair that shares y costs 60."""
    requests = [request("x", [0], 20), request("y", [4, 8], 60), request("z", [12], 60)]
    index = indexed(requests, EvictionCost.TOKENS)

    assert select(index, 2).total_cost == 80
    assert eviction_rivals.exact(index, 2).total_cost == 60


def test_an_exact_search_over_too_many_columns_is_refused() -> None:
    with pytest.raises(ValueError, match="at most 22"):
        eviction_rivals.exact(indexed([], EvictionCost.TOKENS, columns=23), 1)
