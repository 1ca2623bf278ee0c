"""The eviction experiment: what the choice of columns, and the order in which blocks are handed out, save.

An offline engine with a full pool loses a share of it again and again and gets it back five seconds later. Every policy
runs on the same backlog from the same fragmented pool (one hour of churn on its allocator); loss is against the
same engine left alone, reduction against FIFO on the same allocator. Called by `valve replay eviction`.

`fifo`, `random`, `lru`, `fewest-requests` and `greedy` recompute a request from its first token once a block of it is
lost, as the paper's baselines do; names ending in `+prefix` keep the valid prefix. `selective` is the product: prefix
kept, priced by recompute time. `fifo+prefix` shows how much of the gain is the prefix alone, `capacity-only` what no
choice of columns can avoid, because the pool is smaller for a while.
"""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
from valve_tools.sim import eviction_rivals
from valve_tools.sim.eviction_engine import (
    AffineFreeList,
    EngineSettings,
    EvictionEngine,
    Lengths,
    Loss,
    Select,
    StockFreeList,
)
from valve_tools.sim.eviction_rivals import ColumnAges
from valve_tools.sim.metrics import Claim, Interval, at_least, interval, not_judged
from valve_tools.sim.traces import largest, lengths_in

from valved.model.memory import ColumnId, EvictionCost, ReclaimDecision
from valved.policy.columns import ColumnMap, uniform_columns
from valved.policy.eviction import BlockTables, EvictionSettings, index_requests, select

INTERVALS_S = (5, 10, 30, 60, 120, 300)
SIZES = (0.01, 0.02, 0.05, 0.10, 0.20, 0.40)
PRODUCT = "selective"
BOUND = "capacity-only"
MAIN_HANDLE_MIB = 64
MEDIAN_CUT, LEAST_CUT = 0.6, 0.3
"""Pass marks: of the median cell, and of each in which FIFO loses more than `WORTH_A_CUT`."""
WORTH_A_CUT = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class EvictionPlan:
    """The grid; every value a parameter. Pool: 36 GiB of 8B KV in 2 MiB blocks of 16 tokens."""

    intervals_s: tuple[int, ...] = INTERVALS_S
    sizes: tuple[float, ...] = SIZES
    handle_mib: int = MAIN_HANDLE_MIB
    allocators: tuple[str, ...] = ("affine", "stock")
    other_handles_mib: tuple[int, ...] = (2, 16, 256)
    """Handle sizes run with FIFO and the product only, on every second interval and size."""
    policies: tuple[str, ...] = ()
    """Rivals to run with columns handed out in order; all when empty. FIFO is always among them."""
    stock_policies: tuple[str, ...] = ("lru", "greedy", "greedy+prefix", PRODUCT)
    """Those beside FIFO on the stock free list, where no choice helps much."""
    pool_mib: int = 36 * 1024
    block_mib: int = 2
    churn_s: float = 3600.0
    returned_after_s: float = 5.0
    reclaims: int = 8
    """Reclaims per cell, within the two bounds below."""
    min_s: float = 240.0
    max_s: float = 600.0
    engine: EngineSettings = field(default_factory=EngineSettings)

    def cell_s(self, interval_s: int) -> float:
        wanted = min(max(self.reclaims * interval_s, self.min_s), self.max_s)
        return wanted // interval_s * interval_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Rival:
    """A policy and what requests keep under it."""

    name: str
    loss: Loss
    cost: EvictionCost | None
    """None: by age or at random."""


RIVALS = (
    Rival(name="fifo", loss=Loss.ALL, cost=None),
    Rival(name="fifo+prefix", loss=Loss.BEHIND, cost=None),
    Rival(name="lru", loss=Loss.ALL, cost=None),
    Rival(name="random", loss=Loss.ALL, cost=None),
    Rival(name="fewest-requests", loss=Loss.ALL, cost=EvictionCost.REQUESTS),
    Rival(name="greedy", loss=Loss.ALL, cost=EvictionCost.TOKENS),
    Rival(name="greedy+prefix", loss=Loss.BEHIND, cost=EvictionCost.PREFIX_TOKENS),
    Rival(name=PRODUCT, loss=Loss.BEHIND, cost=EvictionCost.RECOMPUTE_NS),
    Rival(name=BOUND, loss=Loss.NOTHING, cost=EvictionCost.RECOMPUTE_NS),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvictionCell:
    allocator: str
    handle_mib: int
    interval_s: int
    size: float
    policy: str
    seed: int
    loss: float
    """1 - throughput / throughput of the engine left alone."""
    reduction: float
    """1 - loss / loss of FIFO on the same allocator; 0 where FIFO loses nothing."""
    lost_tokens_per_s: float
    """Tokens whose KV was taken; those that growth preempts are not among them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Which:
    """The cells of one policy on one allocator and handle size."""

    policy: str
    allocator: str = "affine"
    handle_mib: int = MAIN_HANDLE_MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class EvictionResult:
    lengths: str
    seeds: tuple[int, ...]
    cells: tuple[EvictionCell, ...]
    greedy_over_exact: tuple[float, ...]
    """Cost of the greedy set over the cheapest set there is, on small pools."""
    claims: tuple[Claim, ...]

    def over_seeds(self, which: Which, figure: str) -> dict[tuple[int, float], Interval]:
        """A figure of every cell (interval, size), with its 95 % interval."""
        found: dict[tuple[int, float], list[float]] = {}
        for cell in self._cells_of(which):
            found.setdefault((cell.interval_s, cell.size), []).append(getattr(cell, figure))
        return {key: interval(values) for key, values in found.items()}

    def median_over_seeds(self, which: Which, figure: str) -> Interval | None:
        """The median of all cells under one seed, with its interval over the seeds; None where nothing ran."""
        found: dict[int, list[float]] = {}
        for cell in self._cells_of(which):
            found.setdefault(cell.seed, []).append(getattr(cell, figure))
        return interval([float(np.median(values)) for values in found.values()]) if found else None

    def _cells_of(self, which: Which) -> list[EvictionCell]:
        wanted = (which.allocator, which.handle_mib, which.policy)
        return [cell for cell in self.cells if (cell.allocator, cell.handle_mib, cell.policy) == wanted]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvictionPart:
    """Some intervals on one allocator and handle size under one seed: what can be worked off by itself."""

    plan: EvictionPlan
    lengths: Lengths
    seed: int
    allocator: str
    handle_mib: int
    intervals_s: tuple[int, ...]
    sizes: tuple[float, ...]
    policies: tuple[str, ...]
    """All when empty."""


def parts_of(plan: EvictionPlan, lengths: Lengths, seeds: Sequence[int]) -> list[EvictionPart]:
    """The main grid in thirds of about equal work; every other handle size on every second interval and size."""
    part = partial(EvictionPart, plan=plan, lengths=lengths)
    found = []
    for seed in seeds:
        found += [
            part(seed=seed, allocator=one, handle_mib=plan.handle_mib, intervals_s=intervals_s, sizes=plan.sizes,
                 policies=plan.stock_policies if one == "stock" else plan.policies)
            for one in plan.allocators
            for intervals_s in (plan.intervals_s[third::3] for third in range(3))
            if intervals_s
        ]  # fmt: skip
        found += [
            part(seed=seed, allocator="affine", handle_mib=mib, intervals_s=plan.intervals_s[1::2],
                 sizes=plan.sizes[1::2], policies=(PRODUCT,))
            for mib in plan.other_handles_mib
        ]  # fmt: skip
    return found


def run_eviction(
    traces_dir: Path | None,
    seeds: Sequence[int],
    plan: EvictionPlan,
    spread: Callable[[list[EvictionPart]], Iterable[list[EvictionCell]]] = lambda parts: map(run_part, parts),
) -> EvictionResult:
    """The whole experiment; deterministic for the same lengths, seeds and plan. `spread` runs `run_part` on each."""
    lengths, source = offline_lengths(traces_dir)
    cells = tuple(cell for found in spread(parts_of(plan, lengths, seeds)) for cell in found)
    exact = tuple(ratio for seed in seeds for ratio in greedy_over_exact(lengths, seed))
    draft = EvictionResult(lengths=source, seeds=tuple(seeds), cells=cells, greedy_over_exact=exact, claims=())
    return replace(draft, claims=claims_of(draft))


def offline_lengths(traces_dir: Path | None) -> tuple[Lengths, str]:
    """(prompt, output) pairs from the folder's largest length file; without one drawn."""
    found = lengths_in(traces_dir) if traces_dir else []
    if found:
        one = largest(found)
        return list(zip(one.in_tok.tolist(), one.out_tok.tolist(), strict=True)), one.name
    rng = np.random.default_rng(20)
    prompts = np.clip(rng.normal(2750, 900, 8192), 150, 4000).astype(int)
    outputs = np.clip(rng.lognormal(np.log(190), 0.75, 8192), 16, 4000).astype(int)
    return list(zip(prompts.tolist(), outputs.tolist(), strict=True)), "drawn, about those of a summarising job"


def run_part(part: EvictionPart) -> list[EvictionCell]:
    plan, seed = part.plan, part.seed
    start = pickle.dumps(_churned(plan, part.lengths, seed, part.allocator, part.handle_mib))
    alone = _left_alone(part, start)
    rivals = [one for one in RIVALS if not part.policies or one.name in ("fifo", *part.policies)]
    results = []
    for interval_s, size in itertools.product(part.intervals_s, part.sizes):
        seconds = plan.cell_s(interval_s)
        fifo_loss = 0.0
        for rival in rivals:
            engine = _run_cell(plan, start, rival, interval_s, size, seed)
            loss = 1 - engine.useful_tokens / alone[seconds]
            fifo_loss = loss if rival.name == "fifo" else fifo_loss
            results.append(
                EvictionCell(
                    allocator=part.allocator,
                    handle_mib=part.handle_mib,
                    interval_s=interval_s,
                    size=size,
                    policy=rival.name,
                    seed=seed,
                    loss=loss,
                    reduction=1 - loss / fifo_loss if fifo_loss > 0 else 0.0,
                    lost_tokens_per_s=engine.lost_tokens / seconds,
                )
            )
    return results


def _churned(plan: EvictionPlan, lengths: Lengths, seed: int, allocator: str, handle_mib: int) -> EvictionEngine:
    per_column = handle_mib // plan.block_mib
    column_map = uniform_columns(plan.pool_mib // handle_mib, per_column, pinned=1)
    make = AffineFreeList if allocator == "affine" else StockFreeList
    order = np.random.default_rng(seed).permutation(len(lengths))
    shuffled = [lengths[i] for i in order]
    engine = EvictionEngine(
        plan.engine, column_map, make(column_map.block_columns.tolist(), reserved=(0,)), shuffled, loss=Loss.BEHIND
    )
    for _ in range(int(plan.churn_s / plan.engine.step_s)):
        engine.step()
    engine.check_integrity()
    return engine


def _left_alone(part: EvictionPart, start: bytes) -> dict[float, float]:
    """Useful tokens of the undisturbed engine after each length of cell."""
    engine: EvictionEngine = pickle.loads(start)
    engine.start_counting()
    at: dict[float, float] = {}
    elapsed = 0.0
    for seconds in sorted({part.plan.cell_s(one) for one in part.intervals_s}):
        while elapsed < seconds:
            engine.step()
            elapsed += part.plan.engine.step_s
        at[seconds] = engine.useful_tokens
    return at


def _run_cell(
    plan: EvictionPlan, start: bytes, rival: Rival, interval_s: int, size: float, seed: int
) -> EvictionEngine:
    engine: EvictionEngine = pickle.loads(start)
    engine.loss = rival.loss
    engine.start_counting()
    needed = max(1, round(size * len(engine.column_map.columns)))
    choose = _chooser(rival, seed)
    out: list[tuple[float, tuple[ColumnId, ...]]] = []
    step_s = plan.engine.step_s
    for number in range(int(plan.cell_s(interval_s) / step_s)):
        now_s = number * step_s
        while out and out[0][0] <= now_s:
            engine.restore(out.pop(0)[1])
        if now_s % interval_s == 0:
            out.append((now_s + plan.returned_after_s, engine.reclaim(choose, needed)))
        engine.step()
    return engine


def _chooser(rival: Rival, seed: int) -> Select:
    settings = EvictionSettings(cost=rival.cost or EvictionCost.TOKENS)
    draws = iter(range(seed * 1_000_000, (seed + 1) * 1_000_000))

    def choose(column_map: ColumnMap, tables: BlockTables, ages: ColumnAges, needed: int) -> ReclaimDecision:
        index = index_requests(column_map, tables, settings)
        if rival.cost is not None:
            return select(index, needed, rival.name)
        if rival.name == "random":
            return eviction_rivals.shuffled(index, next(draws), needed)
        return (eviction_rivals.lru if rival.name == "lru" else eviction_rivals.fifo)(index, ages, needed)

    return choose


def greedy_over_exact(lengths: Lengths, seed: int, cases: int = 40) -> list[float]:
    """Small pools (14 columns of 8 blocks) of short requests, half of them handed out by columns, half in any order."""
    rng = np.random.default_rng(seed)
    column_map = uniform_columns(14, 8)
    ratios = []
    for case in range(cases):
        order = np.arange(column_map.blocks) if case % 2 else rng.permutation(column_map.blocks)
        picks = rng.integers(0, len(lengths), 40)
        counts = np.array([1 + sum(lengths[i]) // 300 for i in picks])
        counts = counts[np.cumsum(counts) <= 0.9 * column_map.blocks]
        ptr = np.concatenate([[0], np.cumsum(counts)])
        tables = BlockTables(ptr=ptr, blocks=order[: ptr[-1]], tokens=counts * 16 - rng.integers(0, 16, len(counts)))
        index = index_requests(column_map, tables, EvictionSettings())
        for needed in (2, 4, 7):
            best = eviction_rivals.exact(index, needed).total_cost
            ratios.append(select(index, needed).total_cost / best if best else 1.0)
    return ratios


def claims_of(result: EvictionResult) -> tuple[Claim, ...]:
    """By the worse end of the interval over the seeds."""
    ours, fifo = Which(policy=PRODUCT), Which(policy="fifo")
    losses, cuts = result.over_seeds(fifo, "loss"), result.over_seeds(ours, "reduction")
    median = result.median_over_seeds(ours, "reduction")
    middle = [median.low] if median else []
    claims = [at_least("median cell: loss cut against FIFO, same allocator", "eviction", middle, MEDIAN_CUT)]
    hurt = {key: cuts[key].low for key, loss in losses.items() if loss.mean > WORTH_A_CUT}
    name = f"worst cell where FIFO loses over {WORTH_A_CUT:.0%}: loss cut"
    if losses and not hurt:
        return (*claims, not_judged(name, "eviction", LEAST_CUT, "FIFO loses so much in no cell"))
    missed = sorted((key for key in hurt if hurt[key] < LEAST_CUT), key=lambda key: hurt[key])
    note = "; ".join(_why(result, key) for key in missed)
    return (*claims, at_least(name, "eviction", hurt.values(), LEAST_CUT, note))


def _why(result: EvictionResult, key: tuple[int, float]) -> str:
    """A missed cell: the losses, and how much of ours is that of a smaller pool, whatever is chosen."""
    loss = {name: result.over_seeds(Which(policy=name), "loss").get(key) for name in ("fifo", PRODUCT, BOUND)}
    figures = ", ".join(f"{name} {100 * one.mean:.1f} %" for name, one in loss.items() if one)
    return f"every {key[0]} s x {key[1]:.0%}: loses {figures}"
