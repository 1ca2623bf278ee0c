"""Benches of the memory policies: selection time, what MIAD holds, what eviction saves against FIFO.

`select` splits the work as valved does: the index is refreshed while offline runs, only the selection stands between
a pressure event and the remap. Both are timed, for pools handed out column by column and for the stock free list.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import numpy as np
from valve_tools.bench.row import Row, row_of
from valve_tools.sim.eviction import PRODUCT, EvictionPlan, Which, run_eviction
from valve_tools.sim.eviction_headroom import BURSTY, HEAVY, LONG_PROMPTS, STATIONARY, demand, run_headroom

from valved.model.memory import ReservationRule
from valved.policy.columns import uniform_columns
from valved.policy.eviction import BlockTables, EvictionSettings, index_requests, select
from valved.policy.reservation import ReservationSettings

BLOCKS_PER_COLUMN = 32
"""64 MiB of 2 MiB blocks: 8B KV, 16 tokens a block."""
SAMPLES = 60
HELD_OUT = (20, 21, 22, 23, 24)


def crowd(columns: int, requests: int, is_scattered: bool, seed: int = 1) -> BlockTables:
    """A nearly full pool of log-normal requests; scattered is what a stock free list tends to after an hour."""
    rng = np.random.default_rng(seed)
    blocks = np.arange(BLOCKS_PER_COLUMN, columns * BLOCKS_PER_COLUMN)
    if is_scattered:
        rng.shuffle(blocks)
    lengths = rng.lognormal(0.0, 0.4, requests)
    lengths = np.maximum(1, (lengths * 0.97 * len(blocks) / lengths.sum()).astype(np.int64))
    ptr = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return BlockTables(ptr=ptr, blocks=blocks[: ptr[-1]], tokens=lengths * 16 - rng.integers(0, 16, requests))


def bench_select() -> Iterator[Row]:
    for columns, requests, budget_ms in ((4096, 1024, 1.0), (16384, 4096, 10.0)):
        column_map = uniform_columns(columns, BLOCKS_PER_COLUMN, pinned=1)
        for is_scattered in (False, True):
            tables = crowd(columns, requests, is_scattered)
            index = index_requests(column_map, tables, EvictionSettings())
            free = int((index.column_cost == 0).sum())
            size = f"{columns}x{requests}-{'stock' if is_scattered else 'affine'}"
            for label, used in (("16", 16), ("1pct", columns // 100)):
                milliseconds = _timed(lambda index=index, needed=free + used: select(index, needed))  # type: ignore[misc]
                yield row_of("select", f"{size}-take-{label}", "ms", milliseconds, budget_ms, judged="p50")
            milliseconds = _timed(lambda m=column_map, t=tables: index_requests(m, t, EvictionSettings()))  # type: ignore[misc]
            note = "refreshed while offline runs, not while online waits"
            yield row_of("select", f"{size}-index", "ms", milliseconds, 100.0, judged="p50", note=note)


def bench_reservation() -> Iterator[Row]:
    """Hours of virtual time: the worst sliding hour's reclaims, and what offline keeps of the clairvoyant's; on seeds
    that the settings were not chosen on."""
    loads = (("stationary", STATIONARY, 0.95), ("bursty", BURSTY, 0.95), ("long-prompts", LONG_PROMPTS, 0.9))
    published = ReservationSettings(rule=ReservationRule.MIAD, headroom_max_handles=128, hold_share=0.9)  # its best
    policy = ReservationSettings()
    for name, load, mark in (*loads, ("heavy", HEAVY, 0.86)):
        results = [run_headroom(demand(load, seed), load.pool_handles, policy) for seed in HELD_OUT]
        hours = [float(one.worst_sliding_hour) for one in results]
        miad = [run_headroom(demand(load, seed), load.pool_handles, published) for seed in HELD_OUT[:2]]
        as_published = float(np.mean([one.offline_share / one.clairvoyant_share for one in miad]))
        kept = [one.offline_share / one.clairvoyant_share for one in results]
        peak60 = float(np.mean([one.offline_share / one.peak60_share for one in results]))
        yield row_of("reservation", f"{name}-reclaims-per-hour", "1/h", hours, policy.target_per_hour, judged="max")
        note = f"of a reservation of the next minute's peak: {peak60:.3f}; MIAD as published: {as_published:.3f}"
        row = row_of(
            "reservation", f"{name}-memory-kept", "share", kept, mark, better="higher", judged="p50", note=note
        )
        yield replace(row, p99=min(kept), max=max(kept))


def bench_eviction() -> Iterator[Row]:
    """A quarter of the grid of `valve replay eviction`, on drawn lengths: the samples are cells."""
    plan = EvictionPlan(
        intervals_s=(10, 30, 120),
        sizes=(0.02, 0.10, 0.40),
        policies=(PRODUCT,),
        stock_policies=(PRODUCT,),
        other_handles_mib=(),
        churn_s=900.0,
    )
    result = run_eviction(None, (0,), plan=plan)
    for allocator in plan.allocators:
        cuts = result.over_seeds(Which(policy=PRODUCT, allocator=allocator), "reduction")
        note = "the stock free list, for comparison" if allocator == "stock" else ""
        bound = 0.0 if allocator == "stock" else 0.6
        yield row_of(
            "eviction",
            f"{allocator}-cut",
            "share",
            [one.mean for one in cuts.values()],
            bound,
            better="higher",
            judged="p50",
            note=note,
        )
    fifo, ours = Which(policy="fifo"), Which(policy=PRODUCT)
    losses, cuts = result.over_seeds(fifo, "loss"), result.over_seeds(ours, "reduction")
    hurt = [-cut.mean for key, cut in cuts.items() if losses[key].mean > 0.02]
    note = "reductions negated: the worst cell where FIFO loses over 2 % cuts at least 0.3"
    yield row_of("eviction", "affine-worst-cut", "share", hurt, -0.3, judged="max", note=note)
    ratios = result.greedy_over_exact
    yield row_of("eviction", "greedy-over-exact", "ratio", ratios, 1.05, judged="p50", note="small pools")


def _timed(call: Callable[[], object]) -> list[float]:
    call()
    samples = []
    for _ in range(SAMPLES):
        began = time.perf_counter()
        call()
        samples.append((time.perf_counter() - began) * 1e3)
    return samples


BENCHES: dict[str, Callable[[], Iterable[Row]]] = {
    "select": bench_select,
    "reservation": bench_reservation,
    "eviction": bench_eviction,
}
