"""What the lab measures of a run, a load on a GPU of its own, and the formulas for what granting is worth."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from valve_hook.policy.worth import saved_share
from valve_tools.lab.granted.books import WINDOW_MS, Floats, Outcome
from valve_tools.lab.granted.engine import GAP_MEDIAN_MS, GAP_SIGMA, OBSERVED, Bench, Engine, Load

REPEATS, AGAIN = 4, 1000
"""Replays of a load alone, and how far apart their seeds are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alone:
    """A load on a GPU of its own."""

    tpot_ms: float
    token_ms: float
    """Mean time a token over all tokens: long answers count for more."""
    ttft_ms: Floats
    reached_ms: Floats
    """TPOT by request, as `ttft_ms` over several replays: one replay's P99 is off by up to 4 %."""
    busy: float
    seed: int
    outcome: Outcome


def alone(load: Load, bench: Bench, seed: int = 1) -> Alone:
    outcome = Engine(load, bench, None, None, seed).run()
    again = [Engine(load, bench, None, None, AGAIN * repeat + seed).run() for repeat in range(1, REPEATS)]
    seen = judged(load)
    tokens = np.array(load.answer, dtype=float) - 1
    several = seen & (tokens > 0) & ~np.isnan(outcome.end_ms)
    spent = outcome.end_ms - outcome.first_ms
    return Alone(
        tpot_ms=float((spent[several] / tokens[several]).mean()),
        token_ms=float(spent[several].sum() / tokens[several].sum()),
        ttft_ms=np.concatenate([ttft(one)[seen] for one in (outcome, *again)]),
        reached_ms=np.concatenate([tpot(load, one) for one in (outcome, *again)]),
        busy=1.0 - outcome.offline_idle_ms / outcome.duration_ms,
        seed=seed,
        outcome=outcome,
    )


def judged(load: Load) -> NDArray[np.bool_]:
    """Requests that came after the time of observation."""
    return np.array(load.arrive_ms) >= OBSERVED * load.duration_ms


def ttft(outcome: Outcome) -> Floats:
    found: Floats = outcome.first_ms - outcome.arrive_ms
    return found


def tpot(load: Load, outcome: Outcome) -> Floats:
    tokens = np.array(load.answer, dtype=float) - 1
    seen = judged(load) & (tokens > 0) & ~np.isnan(outcome.end_ms)
    found: Floats = (outcome.end_ms - outcome.first_ms)[seen] / tokens[seen]
    return found


def quantile(values: Floats, percent: float) -> float:
    finite = values[~np.isnan(values)]
    return float(np.percentile(finite, percent)) if finite.size else float("nan")


def interval99(outcomes: Iterable[Outcome]) -> float:
    """P99 of the time between two tokens of an answer, over all tokens."""
    found = list(outcomes)
    spans = np.concatenate([one.intervals_ms for one in found])
    order = np.argsort(spans)
    weights = np.cumsum(np.concatenate([one.readers for one in found])[order])
    if not weights.size:
        return float("nan")
    return float(spans[order][np.searchsorted(weights, 0.99 * weights[-1])])


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
