"""The mechanics of the eviction experiment on pools small enough to follow by hand."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from valve_tools.sim import eviction
from valve_tools.sim.eviction_engine import (
    AffineFreeList,
    EngineSettings,
    EvictionEngine,
    Loss,
    Sequence_,
    StockFreeList,
)

from valved.model.memory import ColumnId, ColumnPick
from valved.policy.columns import uniform_columns
from valved.policy.eviction import decision_of

SETTINGS = EngineSettings(watermark=0.0)
FOUR_BY_FOUR = uniform_columns(4, 4)


def take(*columns):
    """A policy that always takes these columns."""

    def choose(column_map, tables, ages, needed):
        picks = [ColumnPick(column_id=ColumnId(one), marginal_cost=0) for one in columns]
        return decision_of("fixed", None, picks, needed, len(picks))

    return choose


def engine_of(lengths, loss=Loss.BEHIND, column_map=FOUR_BY_FOUR, stock=False):
    free = (StockFreeList if stock else AffineFreeList)(column_map.block_columns.tolist())
    return EvictionEngine(SETTINGS, column_map, free, lengths, loss)


def test_the_stock_list_is_a_queue_that_gets_blocks_back_last_first():
    free = StockFreeList([0, 0, 1, 1])
    first = free.take(3)
    free.give(first)

    assert first == [0, 1, 2]
    assert free.take(4) == [3, 2, 1, 0]


def test_the_stock_list_parks_blocks_of_withheld_columns():
    free = StockFreeList([0, 0, 1, 1])
    held = free.take(1)
    free.withhold_all([0])
    free.give(held)
    assert len(free) == 2

    free.restore_all([0])
    assert {0, 1, 2, 3} == set(free.take(4))


def test_every_prompt_and_output_token_counts_once_when_nothing_is_taken():
    """One request of 48 + 16 tokens fits at a time and ends within each step."""
    engine = engine_of([(48, 16)], column_map=uniform_columns(5, 1))
    for _ in range(20):
        engine.step()
    engine.check_integrity()

    assert engine.lost_tokens == 0
    assert engine.useful_tokens == pytest.approx(20 * 64)


def test_tokens_computed_again_do_not_count_again():
    engine = engine_of([(160, 64)], loss=Loss.ALL)
    engine._admit()
    engine._prefill(10.0)
    engine.reclaim(take(1), 1)
    engine._admit()
    engine._prefill(10.0)

    assert engine.useful_tokens == 160


@pytest.mark.parametrize(("loss", "kept"), [(Loss.ALL, 0.0), (Loss.BEHIND, 64.0)])
def test_what_a_request_keeps_follows_the_rule(loss, kept):
    """160 prompt tokens in columns 0 to 2; column 1 goes, so 64 are valid."""
    engine = engine_of([(160, 64)], loss=loss)
    engine._admit()
    engine._prefill(10.0)
    held = engine.useful_tokens
    engine.reclaim(take(1), 1)
    (waiting,) = [seq for seq in engine._waiting if seq.best == 160]

    assert held == 160
    assert waiting.done == kept
    assert engine.lost_tokens == 160 - kept
    assert len(waiting.blocks) == kept // 16
    engine.check_integrity()


@pytest.mark.parametrize(("pins", "kept"), [(True, 64.0), (False, 0.0)])
def test_a_kept_prefix_makes_room_only_when_it_is_not_pinned(pins, kept):
    """Eleven of sixteen blocks are free, the first in line needs twelve, the second keeps a prefix of four."""
    engine = engine_of([(16, 16)])
    engine.settings = EngineSettings(watermark=0.0, pins_prefix=pins)
    cut = Sequence_(prompt=128, end=192, target=128, done=64.0, blocks=engine.free.take(4))
    engine._decoding = [Sequence_(prompt=16, end=64, target=16, done=16.0, blocks=engine.free.take(1))]
    engine._waiting.extend([Sequence_(prompt=192, end=200, target=192), cut])
    engine._admit()

    assert cut.done == kept


def test_capacity_alone_wastes_no_token():
    engine = engine_of([(160, 64)], loss=Loss.NOTHING)
    engine._admit()
    engine._prefill(10.0)
    engine.reclaim(take(0, 1), 2)

    assert engine.lost_tokens == 0


def test_a_withheld_column_is_not_used_until_it_returns():
    engine = engine_of([(16, 16)])
    columns = engine.reclaim(take(0, 1, 2), 3)
    engine.step()
    assert all(block >= 12 for seq in engine._holders() for block in seq.blocks)

    engine.restore(columns)
    engine.step()
    engine.check_integrity()


def test_a_request_larger_than_the_pool_is_refused_and_counted():
    engine = engine_of([(16, 16), (100_000, 1)])
    for _ in range(3):
        engine.step()
    assert engine.refused > 0

    with pytest.raises(ValueError, match="no request fits"):
        engine_of([(100_000, 1)])


SMALL = eviction.EvictionPlan(
    intervals_s=(30,), sizes=(0.3,), other_handles_mib=(), pool_mib=8192, churn_s=60, reclaims=3, min_s=60, max_s=90
)


def test_the_experiment_is_the_same_for_the_same_seed():
    first = eviction.run_eviction(None, (3,), plan=SMALL)

    assert first == eviction.run_eviction(None, (3,), plan=SMALL)
    assert {one.policy for one in first.cells} == {rival.name for rival in eviction.RIVALS}


def test_the_work_is_cut_into_parts_that_cover_the_grid_once():
    parts = eviction.parts_of(eviction.EvictionPlan(), [(10, 10)], (1, 2))
    cells = [
        (part.seed, part.allocator, part.handle_mib, interval_s, size)
        for part in parts
        for interval_s in part.intervals_s
        for size in part.sizes
    ]

    assert len(cells) == len(set(cells)) == 2 * (2 * 36 + 3 * 9)


def test_claims_are_judged_by_the_worse_end_over_the_seeds():
    """Cuts 0.7 and 0.9: mean 0.8, half an interval 12.706 * 0.1; FIFO loses 0.1 and 0.3."""

    def cell(seed, policy, loss, reduction):
        return eviction.EvictionCell(
            allocator="affine", handle_mib=64, interval_s=30, size=0.1, policy=policy, seed=seed, loss=loss,
            reduction=reduction, lost_tokens_per_s=0.0,
        )  # fmt: skip

    cells = (
        cell(1, "fifo", 0.1, 0),
        cell(1, "selective", 0.03, 0.7),
        cell(2, "fifo", 0.3, 0),
        cell(2, "selective", 0.03, 0.9),
    )
    result = eviction.EvictionResult(lengths="", seeds=(1, 2), cells=cells, greedy_over_exact=(), claims=())

    assert [claim.value for claim in eviction.claims_of(result)] == pytest.approx([0.8 - 12.706 * 0.1] * 2)


def test_a_missed_cell_is_named_with_its_losses_and_no_cell_is_no_verdict():
    def result_of(fifo, reduction):
        cells = [
            eviction.EvictionCell(
                allocator="affine", handle_mib=64, interval_s=30, size=0.1, policy=policy, seed=seed, loss=loss,
                reduction=cut, lost_tokens_per_s=0.0,
            )
            for seed in (1, 2)
            for policy, loss, cut in (("fifo", fifo, 0.0), ("selective", 0.05, reduction), ("capacity-only", 0.04, 0))
        ]  # fmt: skip
        return eviction.EvictionResult(lengths="", seeds=(1, 2), cells=tuple(cells), greedy_over_exact=(), claims=())

    missed = eviction.claims_of(result_of(0.06, 0.17))[1]
    none = eviction.claims_of(result_of(0.01, 0.17))[1]

    assert missed.note == "every 30 s x 10%: loses fifo 6.0 %, selective 5.0 %, capacity-only 4.0 %"
    assert (none.value, none.ok) == (None, True)


def test_selective_loses_less_than_fifo_on_a_small_pool():
    result = eviction.run_eviction(None, (0,), plan=SMALL)
    lost = {(one.allocator, one.policy): one.lost_tokens_per_s for one in result.cells}

    assert lost["affine", "selective"] < 0.5 * lost["affine", "fifo"]
    assert lost["affine", "selective"] < 0.5 * lost["stock", "selective"]
    assert all(ratio >= 1.0 for ratio in result.greedy_over_exact)


def test_lengths_are_found_by_their_columns_and_bad_rows_by_their_line(tmp_path: Path):
    with gzip.open(tmp_path / "requests.csv.gz", "wt") as out:
        out.write("t_s,in_tok,out_tok\n0,1,2\n")
    (tmp_path / "summaries.csv").write_text("in_tok,out_tok\n10,20\n,5\n30,40\n")
    assert eviction.offline_lengths(tmp_path) == ([(10, 20), (30, 40)], "summaries")

    (tmp_path / "summaries.csv").write_text("in_tok,out_tok\n10,20\nten,5\n")
    with pytest.raises(ValueError, match=r"summaries\.csv:3"):
        eviction.offline_lengths(tmp_path)
