"""`valve replay pairs`: ten online/offline pairs under every combination of policies."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from valve_tools.replay import svg
from valve_tools.replay.report import Chart, Claim, Report, Table, at_least, at_most
from valve_tools.replay.work import Progress, Workers, spread
from valve_tools.sim.combinations import (
    BUDGET_ORACLE,
    COMBINATIONS,
    FIXED,
    ORACLE,
    OURS,
    PRISM,
    SAME_ENGINE,
    Context,
    Tuning,
    fits,
    run_combination,
    run_job_alone,
    run_solo,
)
from valve_tools.sim.metrics import Interval, Summary, distribution, interval, summarise
from valve_tools.sim.pairs import Bound, bind
from valve_tools.sim.traces import Folder

TTFT_MARKS = {"mean": 2.5, "p99": 5.0}
TPOT_MARKS = {"mean": 1.0, "p99": 2.0}
KEEPS = 0.95
"""Offline throughput that must be left of the reference."""
TIE = 0.99
"""Within 1 % is a tie: where memory never presses, all reservations do the same."""
SHOWN = ("KernelPreempt+UVM", "GPreempt+UVM", "Channel+UVM", PRISM, "Channel+StaticMem", OURS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One pair under one seed: solo first, then every combination."""

    bound: Bound
    seed: int
    names: tuple[str, ...]
    tuning: Tuning = field(default_factory=Tuning)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    pair: str
    seed: int
    solo_ttft_ms: dict[str, float]
    solo_tpot_ms: dict[str, float]
    alone_tokens_per_s: float
    requests: int
    refused: int
    handles: int
    summaries: dict[str, Summary]


def run_task(task: Task) -> Outcome:
    bound = task.bound
    solo = run_solo(bound, task.seed, task.tuning)
    alone = run_job_alone(bound, task.seed, task.tuning).offline_tokens_per_s
    context = Context(bound=bound, seed=task.seed, solo=solo, tuning=task.tuning)
    wanted = [one for one in COMBINATIONS if one.name in task.names and fits(one, bound)]
    return Outcome(
        pair=bound.pair.key,
        seed=task.seed,
        solo_ttft_ms=distribution(solo.ttft_ms[solo.ttft_ms == solo.ttft_ms]),
        solo_tpot_ms=distribution(solo.tpot_ms[solo.tpot_ms == solo.tpot_ms]),
        alone_tokens_per_s=alone,
        requests=bound.trace.requests,
        refused=solo.totals["refused"],
        handles=solo.handles,
        summaries={one.name: summarise(run_combination(one, context), solo, alone) for one in wanted},
    )


def increase_of(metric: str, quantile: str) -> Callable[[Summary], float]:
    """Reads one figure of `ttft_increase` or `tpot_increase`."""

    def read(one: Summary) -> float:
        value: float = getattr(one, metric)[quantile]
        return value

    return read


class Results:
    """Outcomes of all tasks, asked by pair and combination."""

    def __init__(self, outcomes: Iterable[Outcome]) -> None:
        self._by_pair: dict[str, list[Outcome]] = defaultdict(list)
        for outcome in sorted(outcomes, key=lambda one: one.seed):
            self._by_pair[outcome.pair].append(outcome)

    def of(self, pair: str) -> list[Outcome]:
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

    def keeps_latency(self, pair: str, name: str) -> bool:
        """All four latency marks, by the worse end."""
        return all(
            self.over(pair, name, increase_of(metric, quantile)).high <= mark
            for metric, quantile, mark in LATENCY_MARKS
        )

    def keeps_ttft(self, pair: str, name: str) -> bool:
        return all(
            self.over(pair, name, increase_of("ttft_increase", quantile)).high <= mark
            for quantile, mark in TTFT_MARKS.items()
        )


LATENCY_MARKS = (
    *(("ttft_increase", quantile, mark) for quantile, mark in TTFT_MARKS.items()),
    *(("tpot_increase", quantile, mark) for quantile, mark in TPOT_MARKS.items()),
)


def run(folder: Folder, seeds: Sequence[int], progress: Progress, workers: Workers | None = None) -> Report:
    bounds = bind(folder)
    names = tuple(one.name for one in COMBINATIONS)
    tasks = [Task(bound=bound, seed=seed, names=names) for seed in seeds for bound in bounds]
    results = Results(spread(run_task, tasks, progress, workers or Workers(), label="pairs"))
    return report(bounds, results, seeds)


def report(bounds: Sequence[Bound], results: Results, seeds: Sequence[int]) -> Report:
    claims = [claim for bound in bounds for claim in claims_of(bound.pair.key, results)]
    return Report(
        name="pairs",
        title="Ten pairs: what sharing costs online and what it leaves for offline",
        summary=(
            "Every pair runs its trace under every combination of a compute and a memory policy, on the same "
            "requests and the same seeds as the service alone. Increases are over the service alone in the same pool. "
            "One H100 model unless the pair says otherwise; short slices are used whole.",
            "Claims are judged by the worse end of the 95 % interval over seeds; with one seed that is a point.",
        ),
        claims=tuple(claims),
        tables=(
            _pairs_table(bounds, results),
            *(_result_table(bound, results) for bound in bounds),
        ),
        charts=tuple(_charts(bounds, results)),
        data=_data(bounds, results),
        seeds=tuple(seeds),
    )


def claims_of(pair: str, results: Results) -> list[Claim]:
    """The pass marks of the product on one pair."""
    claims = []
    for metric, quantile, mark in LATENCY_MARKS:
        high = results.over(pair, OURS, increase_of(metric, quantile)).high
        claims.append(at_most(f"{metric.split('_')[0].upper()} {quantile} increase %", pair, high, mark))
    worst = max(outcome.summaries[OURS].max_preemptions for outcome in results.of(pair))
    claims.append(at_most("preemptions per request", pair, worst, 1))
    reclaims = max(outcome.summaries[OURS].reclaims_after_first_hour for outcome in results.of(pair))
    target = Tuning().reservation.target_per_hour
    claims.append(at_most("reclaims in an hour after the first", pair, reclaims, target))
    return [*claims, *_throughput_claims(pair, results)]


def _throughput_claims(pair: str, results: Results) -> list[Claim]:
    claims = []
    reference = PRISM if results.keeps_ttft(pair, PRISM) else ORACLE
    ratio = results.ratio(pair, OURS, reference)
    if ratio is not None:
        other = ORACLE if reference == PRISM else PRISM
        beside = results.ratio(pair, OURS, other)
        in_budget = results.ratio(pair, OURS, BUDGET_ORACLE)
        note = f"against {reference}"
        note += f"; {other} {beside.mean:.2f}" if beside else ""
        note += f"; in budget {in_budget.mean:.2f}" if in_budget else ""
        note += "" if ratio.low >= KEEPS else _why(pair, reference, results)
        claims.append(at_least("offline kept", pair, ratio.low, KEEPS, note))
    rivals = [one.name for one in COMBINATIONS if one.is_baseline and results.has(pair, one.name)]
    fair = [name for name in rivals if results.keeps_latency(pair, name)]
    best = max(fair, key=lambda name: results.over(pair, name, _tokens).mean, default=None)
    lead = results.ratio(pair, OURS, best) if best is not None else None
    if best is not None and lead is not None:
        note = f"best is {best}" + ("" if lead.low >= TIE else _why(pair, best, results))
        claims.append(at_least("level with baselines that keep latency", pair, lead.low, TIE, note))
    return claims


def _why(pair: str, other: str, results: Results) -> str:
    """Where a difference in offline throughput comes from: time, speed while it runs, work done twice."""

    def both(figure: Callable[[Summary], float], form: str) -> str:
        return " / ".join(format(results.over(pair, name, figure).mean, form) for name in (OURS, other))

    parts = {
        "GPUs saved": both(lambda one: one.share_of_alone, ".4f"),
        "time": both(lambda one: one.utilisation_gain, ".4f"),
        "tokens/s while running": both(lambda one: _tokens(one) / max(one.utilisation_gain, 1e-9), ",.0f"),
        "tokens/s computed again": both(lambda one: one.lost_tokens_per_s, ",.0f"),
        "most preemptions of a request": both(lambda one: float(one.max_preemptions), ",.0f"),
    }
    return f". Ours / {other}: " + ", ".join(f"{name} {figures}" for name, figures in parts.items())


def _tokens(one: Summary) -> float:
    return one.offline_tokens_per_s


def _pairs_table(bounds: Sequence[Bound], results: Results) -> Table:
    rows = []
    for bound in bounds:
        first = results.of(bound.pair.key)[0]
        job = bound.job
        work = f"{job.train_tokens} tokens/step" if job.is_training else (job.lengths.name if job.lengths else "")
        rows.append(
            (
                bound.pair.key,
                bound.pair.title,
                bound.trace.label,
                f"{bound.service.model.name} TP{bound.service.tp}",
                f"{job.model.name}, {work}",
                bound.seconds / 3600,
                first.requests,
                first.refused,
                bound.shape.harvestable,
                bound.shape.idle_per_hour,
                bound.shape.kv_peak_tokens,
                first.handles,
                first.solo_ttft_ms["mean"],
                first.solo_ttft_ms["p99"],
                first.solo_tpot_ms["mean"],
            )
        )
    return Table(
        title="Pairs",
        columns=("pair", "about", "trace", "online", "offline", "hours", "requests", "refused", "harvestable",
                 "idle/h", "KV peak", "handles", "TTFT ms", "TTFT P99", "TPOT ms"),
        rows=tuple(rows),
        note="Traces are chosen by shape as seen by one 8B reference GPU (harvestable, idle periods, KV peak). "
        "Refused: larger than the whole pool.",
    )  # fmt: skip


def _result_table(bound: Bound, results: Results) -> Table:
    key = bound.pair.key
    rows: list[tuple[Any, ...]] = []
    marks = set()
    for one in COMBINATIONS:
        if not results.has(key, one.name):
            continue
        over = {
            (metric, quantile): results.over(key, one.name, increase_of(metric, quantile))
            for metric in ("ttft_increase", "tpot_increase")
            for quantile in ("mean", "p50", "p95", "p99")
        }
        if one.name == OURS:
            for metric, quantile, mark in LATENCY_MARKS:
                if over[metric, quantile].high > mark:
                    marks.add((len(rows), 1 + list(over).index((metric, quantile))))
        to_prism = results.ratio(key, one.name, PRISM)
        to_oracle = results.ratio(key, one.name, ORACLE)
        first = [outcome.summaries[one.name] for outcome in results.of(key)]
        rows.append(
            (
                one.name,
                *(value.mean for value in over.values()),
                results.over(key, one.name, _tokens).mean,
                to_prism.mean if to_prism else None,
                to_oracle.mean if to_oracle else None,
                results.over(key, one.name, lambda s: s.share_of_alone).mean,
                results.over(key, one.name, lambda s: s.utilisation_gain).mean,
                max(s.max_preemptions for s in first),
                max(s.reclaims_after_first_hour for s in first),
                max(s.kills for s in first),
                max(s.unserved for s in first),
                max(s.stop_ms["p99"] for s in first),
            )
        )
    return Table(
        title=f"{key} {bound.pair.title}: {bound.pair.about}",
        columns=("combination", "TTFT % mean", "P50", "P95", "P99", "TPOT % mean", "P50", "P95", "P99",
                 "offline tok/s", "of Prism", "of clairvoyant", "of alone", "utilisation", "max preempt.",
                 "reclaims/h", "kills", "unserved", "stop P99 ms"),
        rows=tuple(rows),
        marks=frozenset(marks),
    )  # fmt: skip


def _charts(bounds: Sequence[Bound], results: Results) -> list[Chart]:
    keys = [bound.pair.key for bound in bounds]

    def series(figure: Callable[[Summary], float]) -> Mapping[str, list[float | None]]:
        return {name: [results.over(key, name, figure).mean for key in keys] for name in SHOWN}

    def kept(name: str) -> list[float | None]:
        ratios = [results.ratio(key, name, ORACLE) for key in keys]
        return [ratio.mean if ratio else None for ratio in ratios]

    reservations = {name: kept(name) for name in (*SHOWN, FIXED, BUDGET_ORACLE)}
    return [
        Chart(
            title="Mean TTFT increase over the service alone",
            svg=svg.grouped_bars(keys, series(lambda s: s.ttft_increase["mean"]), unit="%", bound=2.5, cap=50.0),
            note="Bars above 50 % are cut and carry their value.",
        ),
        Chart(
            title="P99 TTFT increase",
            svg=svg.grouped_bars(keys, series(lambda s: s.ttft_increase["p99"]), unit="%", bound=5.0, cap=50.0),
        ),
        Chart(
            title="Mean TPOT increase",
            svg=svg.grouped_bars(keys, series(lambda s: s.tpot_increase["mean"]), unit="%", bound=1.0, cap=20.0),
        ),
        Chart(
            title="Offline throughput against a clairvoyant reservation that sees the next minute",
            svg=svg.grouped_bars(keys, reservations, unit="ratio", bound=KEEPS, cap=1.6),
            note="The clairvoyant reservation in budget knows the whole future but may take memory back only as often "
            "as the operator's reclaim target allows: no policy within the target can beat it by much.",
        ),
        Chart(
            title="GPUs saved: offline throughput over that of the job alone on a GPU",
            svg=svg.grouped_bars(
                keys, series(lambda s: s.share_of_alone), unit="GPUs per GPU", cap=1.0
            ),
            note=f"{SAME_ENGINE} needs no second copy of the weights and is in the tables.",
        ),
    ]  # fmt: skip


def _data(bounds: Sequence[Bound], results: Results) -> dict[str, Any]:
    return {
        bound.pair.key: {
            "trace": bound.trace.label,
            "shape": asdict(bound.shape),
            "runs": [asdict(outcome) for outcome in results.of(bound.pair.key)],
        }
        for bound in bounds
    }
