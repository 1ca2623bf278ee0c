"""What granting does to one load under one setting, and whether P10 and its mark hold there."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from valve_hook.policy.granting import (
    FAR,
    LEAST_COSTS,
    Decision,
    EngineFacts,
    GrantCost,
    GrantPolicy,
    GrantReason,
    GrantSettings,
    Target,
)
from valve_hook.policy.worth import saved_share
from valve_tools.lab.granted.engine import (
    GAP_MEDIAN_MS,
    GAP_SIGMA,
    OBSERVED,
    RULES,
    WINDOW_MS,
    Bench,
    Engine,
    Floats,
    Load,
    Outcome,
)
from valve_tools.sim.traces import Trace, read_file

TARGETS = (1.5, 2.0, 3.0, 4.0)
GAPS_MS: tuple[float | None, ...] = (None, 50.0, 100.0, 200.0)
"""None: as long as the target itself."""
COSTS_MS = (0.2, 0.5, 1.0, 2.0, 4.0, 8.0)
TIMESLICE_MS = 0.5
"""Up to here a grant costs what the timeslice rung costs; above, the gate's, with its budget of grants."""
GATE_GRANTS_PER_S = 20.0
ALONE_MISSES, GRANTED_MISSES, MORE_MISSES = 0.3, 1.0, 0.5
TTFT_NEAR, TTFT_FAR = 5.0, 10.0
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Alone:
    """A load on a GPU of its own."""

    tpot_ms: float
    token_ms: float
    """Mean time a token over all tokens: long answers count for more."""
    ttft99_ms: float
    busy: float
    outcome: Outcome


class DueTime:
    """The naive rule: the next token is due at first + tpot * k, and everything until then is given away."""

    def __init__(self, target: Target, cost: GrantCost, step_ms: float) -> None:
        self._policy = GrantPolicy(Target(tpot_ms=target.tpot_ms / 0.98, gap_ms=target.gap_ms), cost)
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


def alone(load: Load, bench: Bench) -> Alone:
    outcome = Engine(load, bench, None, None).run()
    seen = judged(load)
    tokens = np.array(load.answer, dtype=float) - 1
    several = seen & (tokens > 0) & ~np.isnan(outcome.end_ms)
    spent = outcome.end_ms - outcome.first_ms
    return Alone(
        tpot_ms=float((spent[several] / tokens[several]).mean()),
        token_ms=float(spent[several].sum() / tokens[several].sum()),
        ttft99_ms=quantile(ttft(load, outcome)[seen], 99),
        busy=1.0 - outcome.offline_idle_ms / outcome.duration_ms,
        outcome=outcome,
    )


def judged(load: Load) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Requests that came after the time of observation."""
    return np.array(load.arrive_ms) >= OBSERVED * load.duration_ms


def ttft(load: Load, outcome: Outcome) -> Floats:
    found: Floats = outcome.first_ms - np.array(load.arrive_ms)
    return found


def tpot(load: Load, outcome: Outcome) -> Floats:
    tokens = np.array(load.answer, dtype=float) - 1
    seen = judged(load) & (tokens > 0) & ~np.isnan(outcome.end_ms)
    found: Floats = (outcome.end_ms - outcome.first_ms)[seen] / tokens[seen]
    return found


def quantile(values: Floats, percent: float) -> float:
    finite = values[~np.isnan(values)]
    return float(np.percentile(finite, percent)) if finite.size else float("nan")


def interval99(outcome: Outcome) -> float:
    """P99 of the time between two tokens of an answer, over all tokens."""
    order = np.argsort(outcome.intervals_ms)
    weights = np.cumsum(np.array(outcome.readers)[order])
    if not weights.size:
        return float("nan")
    return float(np.array(outcome.intervals_ms)[order][np.searchsorted(weights, 0.99 * weights[-1])])


def formula(load: Load, bench: Bench, alone_ms: float, paced_ms: float, outcome: Outcome, cost_ms: float) -> float:
    """a * (S(T0) - S(T)) - C * grants a second, window by window, where the policy's rules let it grant."""
    gap_ms = GAP_MEDIAN_MS * float(np.exp(GAP_SIGMA**2 / 2))
    windows = outcome.open_ms.size
    tokens = np.zeros(windows)
    requests = np.zeros(windows)
    for at_ms, answer in zip(load.arrive_ms, load.answer, strict=True):
        window = min(int(at_ms // WINDOW_MS), windows - 1)
        tokens[window] += answer
        requests[window] += 1
    total = 0.0
    for window in range(int(OBSERVED * load.duration_ms // WINDOW_MS), windows):
        decided_ms = outcome.open_ms[window] + outcome.refused_ms[window]
        if requests[window] == 0 or decided_ms <= 0:
            continue
        each = tokens[window] / requests[window]
        saved = saved_share(bench.fixed_ms + gap_ms, alone_ms, paced_ms, requests[window] / WINDOW_MS, each)
        total += saved * outcome.open_ms[window] / decided_ms * WINDOW_MS
    return float(total) / outcome.duration_ms - cost_ms * outcome.grants / outcome.duration_ms


def own_formula(load: Load, bench: Bench, solo: Alone, paced_ms: float, outcome: Outcome, cost_ms: float) -> float:
    """The same with S of these very arrivals: requests that come in clumps share their steps at any pace."""
    gap_ms = GAP_MEDIAN_MS * float(np.exp(GAP_SIGMA**2 / 2))
    decided_ms = outcome.open_ms + outcome.refused_ms
    is_open = np.divide(outcome.open_ms, decided_ms, out=np.zeros(decided_ms.size), where=decided_ms > 0)
    saved = 0.0
    if paced_ms > solo.token_ms:
        steps = _own_steps(load, solo, solo.token_ms, is_open) - _own_steps(load, solo, paced_ms, is_open)
        saved = (bench.fixed_ms + gap_ms) * steps
    return (saved - cost_ms * outcome.grants) / outcome.duration_ms


def _own_steps(load: Load, solo: Alone, token_ms: float, weight: Floats) -> float:
    """Steps in which somebody decodes when every token takes `token_ms`; each window counts by its weight."""
    total, until_ms = 0.0, 0.0
    first = solo.outcome.first_ms
    for request in np.argsort(first):
        begins_ms = float(first[request])
        if not begins_ms >= OBSERVED * load.duration_ms:
            continue
        ends_ms = begins_ms + (load.answer[request] - 1) * token_ms
        if ends_ms > until_ms:
            window = min(int(begins_ms // WINDOW_MS), weight.size - 1)
            total += float(weight[window]) * (ends_ms - max(begins_ms, until_ms)) / token_ms
            until_ms = ends_ms
    return total


@dataclass(frozen=True, slots=True, kw_only=True)
class CellResult:
    """One setting on one load, beside the same load alone and in idle mode."""

    load: str
    target: float
    gap_ms: float
    is_gap_target: bool
    cost_ms: float
    rule: str
    misses_alone: float
    misses: float
    ttft99_alone_ms: float
    ttft99_ms: float
    tpot99_ms: float
    interval99_ms: float
    longest_ms: float
    idle_mode: float
    offline: float
    grants_per_s: float
    formula: float
    formula_reached: float
    formula_own: float
    busy_alone: float
    refused_by: str
    refused_share: float
    requests: int

    @property
    def gain(self) -> float:
        return self.offline - self.idle_mode

    @property
    def is_refused(self) -> bool:
        """The policy granted nothing, or next to nothing of the time."""
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
    def ttft_ok(self) -> bool:
        return self.ttft_more <= (TTFT_NEAR if self.target <= FAR else TTFT_FAR)

    @property
    def p10(self) -> bool:
        return self.misses_ok and self.ttft_ok and self.longest_ms <= self.gap_ms

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


def run_cell(
    load: Load, bench: Bench, solo: Alone, idle: Outcome, target: float, gap: float | None, cost_ms: float, rule: str
) -> CellResult:
    goal = Target(tpot_ms=target * solo.tpot_ms, gap_ms=gap or target * solo.tpot_ms)
    cost = cost_of(cost_ms)
    rate = float("inf") if cost_ms <= TIMESLICE_MS else GATE_GRANTS_PER_S
    if rule == "due time":
        granter: Any = DueTime(goal, cost, solo.tpot_ms)
    else:
        granter = GrantPolicy(goal, cost, settings=GrantSettings(grants_per_s=rate))
    outcome = Engine(load, bench, cost, granter).run()
    reached = tpot(load, outcome)
    tokens = np.array(load.answer, dtype=float) - 1
    several = judged(load) & (tokens > 0) & ~np.isnan(outcome.end_ms)
    token_ms = float((outcome.end_ms - outcome.first_ms)[several].sum() / tokens[several].sum())
    by_rule = {reason: ms for reason, ms in outcome.reason_ms.items() if reason in RULES}
    all_ms = sum(outcome.reason_ms.values()) or 1.0
    seen = judged(load)
    return CellResult(
        load=load.name,
        target=target,
        gap_ms=goal.gap_ms,
        is_gap_target=gap is None,
        cost_ms=cost_ms,
        rule=rule,
        misses_alone=100 * float((tpot(load, solo.outcome) > goal.tpot_ms).mean()),
        misses=100 * float((reached > goal.tpot_ms).mean()),
        ttft99_alone_ms=solo.ttft99_ms,
        ttft99_ms=quantile(ttft(load, outcome)[seen], 99),
        tpot99_ms=quantile(reached, 99),
        interval99_ms=interval99(outcome),
        longest_ms=outcome.longest_ms,
        idle_mode=idle.offline_idle_ms / idle.duration_ms,
        offline=(outcome.offline_idle_ms + outcome.offline_granted_ms) / outcome.duration_ms,
        grants_per_s=1e3 * outcome.grants / outcome.duration_ms,
        formula=formula(load, bench, solo.token_ms, 0.98 * goal.tpot_ms, outcome, cost_ms),
        formula_reached=formula(load, bench, solo.token_ms, token_ms, outcome, cost_ms),
        formula_own=own_formula(load, bench, solo, 0.98 * goal.tpot_ms, outcome, cost_ms),
        busy_alone=solo.busy,
        refused_by=max(by_rule, key=lambda reason: by_rule[reason]).name if by_rule else "",
        refused_share=sum(by_rule.values()) / all_ms,
        requests=int(seen.sum()),
    )


def sweep(
    load: Load,
    bench: Bench,
    costs: Iterable[float] = COSTS_MS,
    targets: Iterable[float] = TARGETS,
    gaps: Iterable[float | None] = GAPS_MS,
) -> list[CellResult]:
    """Every cell of one load, and the naive rule beside those of C = 0.5 and 4 ms at a gap of 100 ms."""
    solo = alone(load, bench)
    cells = []
    for cost_ms in costs:
        idle = Engine(load, bench, cost_of(cost_ms), None).run()
        for target in targets:
            for gap in gaps:
                cells.append(run_cell(load, bench, solo, idle, target, gap, cost_ms, "policy"))
            if cost_ms in NAIVE_COSTS_MS:
                cells.append(run_cell(load, bench, solo, idle, target, 100.0, cost_ms, "due time"))
    return cells


NAIVE_COSTS_MS = (0.5, 4.0)
