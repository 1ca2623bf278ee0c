"""What granting does to one load under one setting, and whether P10 and its mark hold there."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from valve_hook.policy.credits import PACE
from valve_hook.policy.granting import (
    LEAST_COSTS,
    Decision,
    EngineFacts,
    GrantCost,
    GrantPolicy,
    GrantReason,
    GrantSettings,
    Target,
)
from valve_tools.lab.granted.alone import Alone, alone, formula, interval99, judged, own_formula, quantile, tpot, ttft
from valve_tools.lab.granted.books import RULES, SHUT, Floats, Outcome
from valve_tools.lab.granted.engine import Bench, Engine, Load
from valve_tools.sim.traces import Trace, read_file

TARGETS = (1.5, 2.0, 3.0, 4.0)
GAPS_MS: tuple[float | None, ...] = (None, 50.0, 100.0, 200.0)
"""None: as long as the target itself."""
COSTS_MS = (0.2, 0.5, 1.0, 2.0, 4.0, 8.0)
TIMESLICE_MS = 0.5
"""Up to here a grant costs what the timeslice rung costs; above, the gate's, with its budget of grants."""
GATE_GRANTS_PER_S = 20.0
ALONE_MISSES, GRANTED_MISSES, MORE_MISSES = 0.3, 1.0, 0.5
TTFT_NEAR, TTFT_FAR, FAR = 5.0, 10.0, 3.0
MARK_LIGHT, MARK_BUSY, HALF_LOAD = 0.90, 0.75, 0.5
BELOW_IDLE = 0.005
SMALL = 0.005
"""A formula below half a hundredth of a GPU is no base for a ratio."""


def split(folder: Path) -> tuple[list[str], list[str]]:
    """The request traces of a folder in two halves, by nothing but what the files hold: (tuning, claims)."""
    found = []
    for path in sorted(folder.glob("*.csv*")):
        if isinstance(read_file(path), Trace):
            found.append((hashlib.sha256(path.read_bytes()).hexdigest(), path.name))
    names = [name for _, name in sorted(found)]
    half = len(names) // 2
    return names[:half], names[half:]


OURS, NAIVE = "policy", "due time"
NAIVE_COSTS_MS = (0.5, 4.0)


class DueTime:
    """The naive rule: the next token is due at first + tpot * k, and everything until then is given away."""

    def __init__(self, target: Target, cost: GrantCost, step_ms: float) -> None:
        self._policy = GrantPolicy(Target(tpot_ms=target.tpot_ms / PACE, gap_ms=target.gap_ms), cost)
        self._least_ms = LEAST_COSTS * cost.total_ms
        self._step_ms = step_ms

    def arrived(self, request: int, now_ms: float) -> None:
        self._policy.arrived(request, now_ms)

    def first_token(self, request: int, now_ms: float) -> None:
        self._policy.first_token(request, now_ms)

    def delivered(self, now_ms: float, skipped: list[int]) -> None:
        self._policy.delivered(now_ms, skipped)

    def finished(self, request: int, now_ms: float) -> object:
        return self._policy.credits.end(request, now_ms)

    def stepped(self, batch: int, context: int, ms: float, gap_ms: float, *, prefill: bool) -> None:
        """It learns nothing: its step is the solo one."""

    def decide(self, now_ms: float, facts: EngineFacts) -> Decision:
        spare_ms = self._policy.credits.least_due_ms() - now_ms - self._step_ms
        if facts.prefilling or facts.waiting or spare_ms < self._least_ms:
            return Decision(grant_ms=0.0, reason=GrantReason.SHORT)
        return Decision(grant_ms=spare_ms, reason=GrantReason.GRANTED)


def cost_of(total_ms: float) -> GrantCost:
    """In equal parts; half is offline's time, half the service's."""
    part = total_ms / 4
    return GrantCost(stop_ms=part, wake_ms=part, bubble_ms=part, damage_ms=part)


@dataclass(frozen=True, slots=True, kw_only=True)
class CellResult:
    """One setting on one load, beside the same load alone and in idle mode; requests of all seeds together."""

    load: str
    seeds: int
    target: float
    gap_ms: float
    is_gap_target: bool
    cost_ms: float
    rule: str
    misses_alone: float
    misses: float
    ttft99_alone_ms: float
    ttft99_idle_ms: float
    ttft99_ms: float
    tpot99_ms: float
    interval99_ms: float
    longest_share: float
    """Longest added pause over the stated gap."""
    idle_mode: float
    offline: float
    grants_per_s: float
    formula: float
    formula_reached: float
    formula_own: float
    busy_alone: float
    refused_by: str
    held: dict[str, float]
    """Share of the time that requests were there, by the rule that refused."""
    requests: int
    gains: tuple[float, ...]
    """By seed."""
    ttft_first: float | None = None
    """A reading above the bound, which the figures here, of fresh replays, stand for."""

    @property
    def gain(self) -> float:
        return self.offline - self.idle_mode

    @property
    def is_refused(self) -> bool:
        """The policy granted nothing."""
        return self.grants_per_s == 0.0

    @property
    def misses_ok(self) -> bool:
        if self.misses_alone <= ALONE_MISSES:
            return self.misses <= GRANTED_MISSES
        return self.misses <= self.misses_alone + MORE_MISSES

    @property
    def ttft_more(self) -> float:
        return 100 * (self.ttft99_ms / self.ttft99_alone_ms - 1)

    @property
    def ttft_idle(self) -> float:
        """The part that idle mode costs without any grant."""
        return 100 * (self.ttft99_idle_ms / self.ttft99_alone_ms - 1)

    @property
    def ttft_bound(self) -> float:
        return TTFT_NEAR if self.target <= FAR else TTFT_FAR

    @property
    def ttft_ok(self) -> bool:
        return self.ttft_more <= self.ttft_bound

    @property
    def p10(self) -> bool:
        return self.misses_ok and self.ttft_ok and self.longest_share <= 1.0

    @property
    def fails(self) -> bool:
        return not self.p10

    @property
    def mark(self) -> bool:
        """The gain against the formula for clients that come at random."""
        return self._reaches(self.formula)

    @property
    def own_mark(self) -> bool:
        """The gain against the formula for the clients that came."""
        return self._reaches(self.formula_own)

    def _reaches(self, formula: float) -> bool:
        share = MARK_LIGHT if self.busy_alone <= HALF_LOAD else MARK_BUSY
        return self.gain >= -BELOW_IDLE and (formula < SMALL or self.gain >= share * formula)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bed:
    """One seed's load, alone and in idle mode: what a setting is laid upon."""

    load: Load
    bench: Bench
    solo: Alone
    idle: Outcome
    cost_ms: float
    shut: list[tuple[Target, Outcome]] = field(default_factory=list)
    """Targets and gaps at which the policy opened at no time: what is asked within them needs no run."""

    @classmethod
    def of(cls, load: Load, bench: Bench, cost_ms: float, solo: Alone | None = None) -> Bed:
        solo = solo or alone(load, bench)
        idle = Engine(load, bench, cost_of(cost_ms), None, solo.seed).run()
        return cls(load=load, bench=bench, solo=solo, idle=idle, cost_ms=cost_ms)

    def goal(self, target: float, gap: float | None) -> Target:
        tpot_ms = target * self.solo.tpot_ms
        return Target(tpot_ms=tpot_ms, gap_ms=gap or tpot_ms)

    def run(self, goal: Target, rule: str) -> Outcome:
        for wider, outcome in self.shut if rule == OURS else ():
            if wider.tpot_ms >= goal.tpot_ms and wider.gap_ms >= goal.gap_ms:
                return outcome
        cost = cost_of(self.cost_ms)
        rate = float("inf") if self.cost_ms <= TIMESLICE_MS else GATE_GRANTS_PER_S
        granter: Any = (
            DueTime(goal, cost, self.solo.tpot_ms)
            if rule == NAIVE
            else GrantPolicy(goal, cost, settings=GrantSettings(grants_per_s=rate))
        )
        outcome = Engine(self.load, self.bench, cost, granter, self.solo.seed).run()
        if rule == OURS and outcome.reasons <= SHUT:
            self.shut.append((goal, outcome))
        return outcome

    def formulas(self, paced_ms: float, outcome: Outcome) -> tuple[float, float]:
        """For clients that come at random, and for these."""
        random = formula(self.load, self.bench, self.solo.token_ms, paced_ms, outcome, self.cost_ms)
        return random, own_formula(self.load, self.bench, self.solo, paced_ms, outcome, self.cost_ms)

    def token_ms(self, outcome: Outcome) -> float:
        tokens = np.array(self.load.answer, dtype=float) - 1
        several = judged(self.load) & (tokens > 0) & ~np.isnan(outcome.end_ms)
        return float((outcome.end_ms - outcome.first_ms)[several].sum() / tokens[several].sum())


def run_cell(beds: Sequence[Bed], target: float, gap: float | None, rule: str = OURS) -> CellResult:
    """One setting over all seeds of a load."""
    goals = [bed.goal(target, gap) for bed in beds]
    found = [bed.run(goal, rule) for bed, goal in zip(beds, goals, strict=True)]
    runs = list(zip(beds, goals, found, strict=True))
    by_rule: Counter[GrantReason] = Counter()
    for one in found:
        by_rule.update(one.reason_ms)
    all_ms = sum(by_rule.values()) or 1.0
    refused = {reason: ms for reason, ms in by_rule.items() if reason in RULES and ms > 0}
    at_full = [bed.formulas(PACE * goal.tpot_ms, one) for bed, goal, one in runs]
    idle = [bed.idle.offline_idle_ms / bed.idle.duration_ms for bed in beds]
    offline = [(one.offline_idle_ms + one.offline_granted_ms) / one.duration_ms for one in found]
    return CellResult(
        load=beds[0].load.name,
        seeds=len(beds),
        target=target,
        gap_ms=_mean([goal.gap_ms for goal in goals]),
        is_gap_target=gap is None,
        cost_ms=beds[0].cost_ms,
        rule=rule,
        misses_alone=_over([bed.solo.reached_ms > goal.tpot_ms for bed, goal, _ in runs]),
        misses=_over([tpot(bed.load, one) > goal.tpot_ms for bed, goal, one in runs]),
        ttft99_alone_ms=_p99([bed.solo.ttft_ms for bed in beds]),
        ttft99_idle_ms=_p99([ttft(bed.idle)[judged(bed.load)] for bed in beds]),
        ttft99_ms=_p99([ttft(one)[judged(bed.load)] for bed, _, one in runs]),
        tpot99_ms=_p99([tpot(bed.load, one) for bed, _, one in runs]),
        interval99_ms=interval99(found),
        longest_share=max(one.longest_ms / goal.gap_ms for _, goal, one in runs),
        idle_mode=_mean(idle),
        offline=_mean(offline),
        grants_per_s=_mean([1e3 * one.grants / one.duration_ms for one in found]),
        formula=_mean([random for random, _ in at_full]),
        formula_reached=_mean([bed.formulas(bed.token_ms(one), one)[0] for bed, _, one in runs]),
        formula_own=_mean([own for _, own in at_full]),
        busy_alone=_mean([bed.solo.busy for bed in beds]),
        refused_by=max(refused, key=lambda reason: refused[reason]).name if refused else "",
        held={reason.name: ms / all_ms for reason, ms in refused.items()},
        requests=sum(int(judged(bed.load).sum()) for bed in beds),
        gains=tuple(mine - of_idle for mine, of_idle in zip(offline, idle, strict=True)),
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _over(parts: Sequence[NDArray[np.bool_]]) -> float:
    """Per cent."""
    return 100 * float(np.concatenate(parts).mean())


def _p99(parts: Sequence[Floats]) -> float:
    return quantile(np.concatenate(parts), 99)


def sweep(
    loads: Sequence[Load],
    bench: Bench,
    costs: Iterable[float] = COSTS_MS,
    targets: Sequence[float] = TARGETS,
    gaps: Sequence[float | None] = GAPS_MS,
) -> list[CellResult]:
    """Every cell of one load, one load a seed; the naive rule beside those at a gap of 100 ms."""
    solos = [alone(load, bench, seed) for seed, load in enumerate(loads, 1)]
    fresh = Fresh(loads, bench)
    cells = []
    for cost_ms in costs:
        beds = [Bed.of(load, bench, cost_ms, solo) for load, solo in zip(loads, solos, strict=True)]
        widest_first = product(sorted(targets, reverse=True), sorted(gaps, key=lambda gap: gap or 0.0, reverse=True))
        found = {setting: judged_cell(beds, *setting, fresh) for setting in widest_first}
        for target in targets:
            cells += [found[target, gap] for gap in gaps]
            if cost_ms in NAIVE_COSTS_MS:
                cells.append(run_cell(beds, target, 100.0, NAIVE))
    return cells


FRESH, FRESH_SEED = 4, 100_000
NEAR_BOUND = 0.5
"""A reading above this part of the bound is taken anew: one reading is off by up to 8 points."""


class Fresh:
    """Replays for a second reading: made when first asked for, alone once a load, idle mode once a cost."""

    def __init__(self, loads: Sequence[Load], bench: Bench) -> None:
        self._loads = loads
        self._bench = bench
        self._solos: list[tuple[Load, Alone]] = []
        self._beds: dict[float, list[Bed]] = {}

    def beds(self, cost_ms: float) -> list[Bed]:
        if not self._solos:
            self._solos = [
                (load, alone(load, self._bench, FRESH_SEED + FRESH * number + repeat))
                for number, load in enumerate(self._loads)
                for repeat in range(FRESH)
            ]
        if cost_ms not in self._beds:
            self._beds[cost_ms] = [Bed.of(load, self._bench, cost_ms, solo) for load, solo in self._solos]
        return self._beds[cost_ms]


def judged_cell(beds: Sequence[Bed], target: float, gap: float | None, fresh: Fresh) -> CellResult:
    """P99 TTFT of a few thousand requests is off by some per cent: a reading near the bound is taken anew, of fresh
    replays alone, so that the first reading's luck has no part in it."""
    cell = run_cell(beds, target, gap)
    if cell.is_refused or cell.ttft_more <= NEAR_BOUND * cell.ttft_bound:
        return cell
    return replace(run_cell(fresh.beds(beds[0].cost_ms), target, gap), ttft_first=cell.ttft_more)
