"""GPUs that requests leave to offline work: spread or packed, in idle time alone or in granted time too.

Packed: a replica is full when its batch, paced to the target, with the prompts that come meanwhile, would just meet the
target for a token; then the next one gets requests. Engines and the product's GrantPolicy are those of the lab for
granted time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from pathlib import Path
from typing import Any

import numpy as np
from valve_hook.policy.credits import PACE
from valve_hook.policy.granting import GrantPolicy, GrantSettings, Target
from valve_tools.lab.granted.alone import alone, judged, tpot
from valve_tools.lab.granted.engine import Bench, Engine, Load
from valve_tools.lab.granted.parts import Part, load_of
from valve_tools.lab.granted.sweep import cost_of
from valve_tools.sim.generator import generate
from valve_tools.sim.metrics import Claim, at_least, at_most

GPUS = 8
TARGET, GAP_MS, COST_MS = 2.0, 100.0, 0.5
LATE = 0.01
LONG = 95  # percent of the prompts are no longer
PARTS = (
    Part(trace="azure2023_conv_first2100s", thin=4, seconds=300),
    Part(trace="azure2023_code_first2100s", thin=2, seconds=300),
    Part(trace="inst06_msmall_c31_t432000", seconds=300),
)
MODES = ("spread, idle", "spread, granted", "packed, idle", "packed, granted")
OURS = "packed, granted"


@dataclass(frozen=True, slots=True, kw_only=True)
class Freed:
    load: str
    seed: int
    most_open: int  # in one replica before the next gets requests
    gpus: dict[str, float]  # by mode
    late: dict[str, float]  # requests over the target for a token


def parts(folder: Path, seeds: int) -> list[tuple[Load, int]]:
    return [(load_of(folder, part, seed), seed) for part in PARTS for seed in range(1, seeds + 1)]


def quick() -> list[tuple[Load, int]]:
    traces = {trace.name: trace for trace in generate().traces}
    return [(Load.of(traces["chat"], 120.0), 1)]


def work(task: tuple[Load, int]) -> Freed:
    load, seed = task
    bench = Bench.h100()
    spread = shares(load, [number % GPUS for number in range(len(load.arrive_ms))])
    busiest = max(spread, key=lambda one: len(one.arrive_ms))
    solo_ms = alone(busiest, bench, seed).tpot_ms
    goal = Target(tpot_ms=TARGET * solo_ms, gap_ms=GAP_MS)
    most = full_at(load, bench, PACE * goal.tpot_ms)
    packed = shares(load, packed_on(load, bench, most, PACE * goal.tpot_ms))
    gpus, late = {}, {}
    for name, replicas in (("spread", spread), ("packed", packed)):
        for mode, is_granted in (("idle", False), ("granted", True)):
            key = f"{name}, {mode}"
            gpus[key], late[key] = _freed(replicas, bench, goal, is_granted, seed)
    return Freed(load=load.name, seed=seed, most_open=most, gpus=gpus, late=late)


def shares(load: Load, where: list[int]) -> list[Load]:
    """What each GPU gets."""
    found = []
    for gpu in range(GPUS):
        mine = [i for i, there in enumerate(where) if there == gpu]
        found.append(
            replace(
                load,
                name=f"{load.name} on {gpu}",
                arrive_ms=tuple(load.arrive_ms[i] for i in mine),
                prompt=tuple(load.prompt[i] for i in mine),
                answer=tuple(load.answer[i] for i in mine),
            )
        )
    return found


def full_at(load: Load, bench: Bench, paced_ms: float) -> int:
    """The largest batch that meets the pace with its share of prompts, and in which one long prompt of another request
    does not make a usual answer late: where answers are short, nothing evens that out."""
    prompt, answer = float(np.mean(load.prompt)), float(np.mean(load.answer))
    clock = bench.timing
    prompt_ms = (prompt * clock.prefill_token_ns + prompt * prompt / 2 * clock.attention_pair_ns) / 1e6
    long = float(np.percentile(load.prompt, LONG))
    long_ms = (long * clock.prefill_token_ns + long * long / 2 * clock.attention_pair_ns) / 1e6
    for batch in range(bench.max_seqs, 1, -1):
        context = batch * (prompt + answer / 2)
        rows_ns = max(clock.base_ns, batch * clock.prefill_token_ns)
        step_ms = (rows_ns + clock.fixed_ns + batch * clock.seq_ns + context * clock.context_token_ns) / 1e6
        prompts = batch / (answer * paced_ms + prompt_ms) * prompt_ms  # of the time
        if step_ms + long_ms / answer > paced_ms:
            continue
        if prompts < 1 and step_ms / (1 - prompts) <= paced_ms and context <= 0.9 * bench.pool_tokens:
            return batch
    return 1


def packed_on(load: Load, bench: Bench, most: int, paced_ms: float) -> list[int]:
    """The first GPU with a free place, else the one with the fewest open; by predicted ends."""
    open_now: list[list[float]] = [[] for _ in range(GPUS)]
    clock, where = bench.timing, []
    for at_ms, prompt, answer in zip(load.arrive_ms, load.prompt, load.answer, strict=True):
        for ends in open_now:
            while ends and ends[0] <= at_ms:
                heappop(ends)
        free = [gpu for gpu, ends in enumerate(open_now) if len(ends) < most]
        gpu = free[0] if free else min(range(GPUS), key=lambda one: len(open_now[one]))
        heappush(open_now[gpu], at_ms + prompt * clock.prefill_token_ns / 1e6 + answer * paced_ms)
        where.append(gpu)
    return where


def _freed(replicas: list[Load], bench: Bench, goal: Target, is_granted: bool, seed: int) -> tuple[float, float]:
    freed, late = 0.0, []
    for gpu, load in enumerate(replicas):
        if not load.arrive_ms:
            freed += 1.0
            continue
        cost, granter = cost_of(COST_MS), None
        if is_granted:
            rules: Any = GrantSettings(grants_per_s=float("inf"))
            granter = GrantPolicy(goal, cost, settings=rules)
        outcome = Engine(load, bench, cost, granter, 100 * seed + gpu).run()
        freed += (outcome.offline_idle_ms + outcome.offline_granted_ms) / outcome.duration_ms
        if judged(load).any():
            late.append(tpot(load, outcome) > goal.tpot_ms)
    return freed, float(np.concatenate(late).mean()) if late else 0.0


def best_other(one: Freed) -> float:
    """Of the ways that keep the target in all but one of a hundred requests."""
    return max((one.gpus[mode] for mode in MODES if one.late[mode] <= LATE), default=math.nan)


def claims(found: list[Freed]) -> list[Claim]:
    least = [one.gpus[OURS] / best_other(one) for one in found]
    late = [100 * one.late[OURS] for one in found]
    return [
        at_least("GPUs freed by packing and granting, over the best of the four ways", "shared traces", least, 0.98),
        at_most("requests over the target for a token then", "shared traces", late, 100 * LATE),
    ]
