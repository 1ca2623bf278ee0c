"""One pair under every combination: the task, what comes back, and the product's pass marks on it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from valve_tools.sim.combinations import (
    BUDGET_ORACLE,
    COMBINATIONS,
    ORACLE,
    SHIPPED,
    fits,
    run_combination,
    run_job_alone,
    run_own,
    run_solo,
)
from valve_tools.sim.metrics import (
    Claim,
    Interval,
    Summary,
    at_least,
    at_most,
    distribution,
    interval,
    not_judged,
    summarise,
)
from valve_tools.sim.pairs import Bound
from valve_tools.sim.rivals import PRISM
from valve_tools.sim.tuning import Context, Tuning

Marks = Sequence[tuple[str, str, float]]
TTFT_MARKS: Marks = (("own_ttft_increase", "mean", 2.5), ("own_ttft_increase", "p99", 5.0))
LATENCY_MARKS: Marks = (*TTFT_MARKS, ("own_tpot_increase", "mean", 1.0), ("own_tpot_increase", "p99", 2.0))
"""What claims are judged by: over the service on a GPU of its own."""
POOL_MARKS: Marks = tuple((metric.removeprefix("own_"), quantile, mark) for metric, quantile, mark in LATENCY_MARKS)
"""The same over the service in the pool that it has beside the job: what stopping and reclaiming alone cost."""
PAPER_MARKS: Marks = (("own_ttft_increase", "mean", 5.0), ("own_tpot_increase", "mean", 2.0))
"""The looser marks that the rivals' papers use."""
KEEPS = 0.95
"""Offline throughput that must be left of the reference."""
TIE = 0.99
"""Within 1 % is a tie: where memory never presses, all reservations do the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairTask:
    """One pair under one seed: the service alone (whole card, then the pair's pool), then every combination."""

    bound: Bound
    seed: int
    names: tuple[str, ...]
    tuning: Tuning = field(default_factory=Tuning)


@dataclass(frozen=True, slots=True, kw_only=True)
class PairOutcome:
    pair: str
    seed: int
    own_ttft_ms: dict[str, float]
    own_tpot_ms: dict[str, float]
    solo_ttft_ms: dict[str, float]
    solo_tpot_ms: dict[str, float]
    alone_tokens_per_s: float
    requests: int
    refused: int
    handles: int
    summaries: dict[str, Summary]


def run_task(task: PairTask) -> PairOutcome:
    bound = task.bound
    own, solo = run_own(bound, task.seed, task.tuning), run_solo(bound, task.seed, task.tuning)
    alone = run_job_alone(bound, task.seed, task.tuning).offline_tokens_per_s
    context = Context(bound=bound, seed=task.seed, solo=solo, tuning=task.tuning)
    wanted = [one for one in COMBINATIONS if one.name in task.names and fits(one, bound)]
    return PairOutcome(
        pair=bound.pair.key,
        seed=task.seed,
        own_ttft_ms=distribution(own.ttft_ms[own.ttft_ms == own.ttft_ms]),
        own_tpot_ms=distribution(own.tpot_ms[own.tpot_ms == own.tpot_ms]),
        solo_ttft_ms=distribution(solo.ttft_ms[solo.ttft_ms == solo.ttft_ms]),
        solo_tpot_ms=distribution(solo.tpot_ms[solo.tpot_ms == solo.tpot_ms]),
        alone_tokens_per_s=alone,
        requests=bound.trace.requests,
        refused=solo.totals["refused"],
        handles=solo.handles,
        summaries={one.name: summarise(run_combination(one, context), solo, alone, own) for one in wanted},
    )


def increase_of(metric: str, quantile: str) -> Callable[[Summary], float]:
    """Reads one figure of one of the increases."""

    def read(one: Summary) -> float:
        value: float = getattr(one, metric)[quantile]
        return value

    return read


class Results:
    """Outcomes of all tasks, asked by pair and combination."""

    def __init__(self, outcomes: Iterable[PairOutcome]) -> None:
        self._by_pair: dict[str, list[PairOutcome]] = defaultdict(list)
        for outcome in sorted(outcomes, key=lambda one: one.seed):
            self._by_pair[outcome.pair].append(outcome)

    def of(self, pair: str) -> list[PairOutcome]:
        return self._by_pair[pair]

    def has(self, pair: str, name: str) -> bool:
        return all(name in outcome.summaries for outcome in self._by_pair[pair])

    def over(self, pair: str, name: str, figure: Callable[[Summary], float]) -> Interval:
        return interval([figure(outcome.summaries[name]) for outcome in self._by_pair[pair]])

    def ratio(self, pair: str, name: str, reference: str) -> Interval | None:
        """Offline throughput of one combination over another's, seed by seed."""
        pairs = [(one.summaries[name], one.summaries[reference]) for one in self._by_pair[pair]]
        if any(other.offline_tokens_per_s <= 0 for _, other in pairs):
            return None
        return interval([one.offline_tokens_per_s / other.offline_tokens_per_s for one, other in pairs])

    def keeps_latency(self, pair: str, name: str, marks: Marks) -> bool:
        """All latency marks, by the worse end."""
        return all(
            self.over(pair, name, increase_of(metric, quantile)).high <= mark for metric, quantile, mark in marks
        )


def words_of(metric: str) -> str:
    return metric.removeprefix("own_").split("_", maxsplit=1)[0].upper()


def claims_of(pair: str, results: Results) -> list[Claim]:
    """The pass marks of the product on one pair."""
    claims = []
    for metric, quantile, mark in LATENCY_MARKS:
        high = results.over(pair, SHIPPED, increase_of(metric, quantile)).high
        note = "" if high <= mark else _why_late(pair, metric, quantile, results)
        claims.append(at_most(f"{words_of(metric)} {quantile} increase %", pair, high, mark, note))
    ours = [outcome.summaries[SHIPPED] for outcome in results.of(pair)]
    worst = max(one.max_preemptions for one in ours)
    claims.append(at_most("preemptions per request", pair, worst, 1))
    return [*claims, _reclaims(pair, results), *_throughput_claims(pair, results)]


def worst_reclaims(pair: str, results: Results) -> int | None:
    """In an hour after the first, over all seeds; None where none follows."""
    ours = [outcome.summaries[SHIPPED] for outcome in results.of(pair)]
    return max((one.reclaims_after_first_hour for one in ours if len(one.reclaims_by_hour) > 1), default=None)


def _reclaims(pair: str, results: Results) -> Claim:
    name, target = "reclaims in an hour after the first", Tuning().reservation.target_per_hour
    worst = worst_reclaims(pair, results)
    if worst is None:
        first = max(outcome.summaries[SHIPPED].reclaims_by_hour[0] for outcome in results.of(pair))
        return not_judged(name, pair, target, f"no hour follows the first, which had {first}")
    return at_most(name, pair, worst, target)


def best_rival(pair: str, results: Results, marks: Marks = LATENCY_MARKS) -> tuple[str, Interval] | None:
    """The baseline with most offline work of those that keep the latency marks, and ours over it."""
    rivals = [one.name for one in COMBINATIONS if one.is_baseline and results.has(pair, one.name)]
    fair = [name for name in rivals if results.keeps_latency(pair, name, marks)]
    best = max(fair, key=lambda name: results.over(pair, name, tokens).mean, default=None)
    lead = results.ratio(pair, SHIPPED, best) if best is not None else None
    return (best, lead) if best is not None and lead is not None else None


def _throughput_claims(pair: str, results: Results) -> list[Claim]:
    claims = []
    reference = PRISM if results.keeps_latency(pair, PRISM, TTFT_MARKS) else ORACLE
    ratio = results.ratio(pair, SHIPPED, reference)
    if ratio is not None:
        other = ORACLE if reference == PRISM else PRISM
        beside = results.ratio(pair, SHIPPED, other)
        in_budget = results.ratio(pair, SHIPPED, BUDGET_ORACLE)
        note = f"against {reference}"
        note += f"; {other} {beside.mean:.2f}" if beside else ""
        note += f"; in budget {in_budget.mean:.2f}" if in_budget else ""
        note += "" if ratio.low >= KEEPS else _why(pair, reference, results)
        claims.append(at_least("offline kept", pair, ratio.low, KEEPS, note))
    found = best_rival(pair, results)
    if found is not None:
        best, lead = found
        note = f"best is {best}" + ("" if lead.low >= TIE else _why(pair, best, results))
        claims.append(at_least("level with baselines that keep latency", pair, lead.low, TIE, note))
    return claims


def _why_late(pair: str, metric: str, quantile: str, results: Results) -> str:
    """What one stop costs against what a request takes alone."""

    def mean(figure: Callable[[Summary], float]) -> float:
        return results.over(pair, SHIPPED, figure).mean

    solo = interval([getattr(one, f"own_{words_of(metric).lower()}_ms")["mean"] for one in results.of(pair)]).mean
    stopped = mean(lambda one: sum(one.preemptions[1:]) / max(sum(one.preemptions), 1))
    pool = results.over(pair, SHIPPED, increase_of(metric.removeprefix("own_"), quantile)).mean
    return (
        f"over the same pool {pool:+.2f} %: the rest is what sharing the card's memory costs; a stop takes "
        f"{mean(lambda one: one.stop_ms['p50']):.2f} ms (P99 {mean(lambda one: one.stop_ms['p99']):.2f}) "
        f"and meets {stopped:.0%} of the requests; alone the mean is {solo:.3g} ms; reclaims in the worst hour "
        f"{mean(lambda one: max(one.reclaims_by_hour)):.0f}"
    )


def _why(pair: str, other: str, results: Results) -> str:
    """Where a difference in offline throughput comes from: time, speed while it runs, work done twice."""

    def both(figure: Callable[[Summary], float], form: str) -> str:
        return " / ".join(format(results.over(pair, name, figure).mean, form) for name in (SHIPPED, other))

    parts = {
        "GPUs saved": both(lambda one: one.share_of_alone, ".4f"),
        "time": both(lambda one: one.utilisation_gain, ".4f"),
        "tokens/s while running": both(lambda one: tokens(one) / max(one.utilisation_gain, 1e-9), ",.0f"),
        "tokens/s computed again": both(lambda one: one.lost_tokens_per_s, ",.0f"),
        "most preemptions of a request": both(lambda one: float(one.max_preemptions), ",.0f"),
    }
    return f". Ours / {other}: " + ", ".join(f"{name} {figures}" for name, figures in parts.items())


def tokens(one: Summary) -> float:
    return one.offline_tokens_per_s
