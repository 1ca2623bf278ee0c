"""`valve replay pairs`: ten online/offline pairs under every combination of policies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import msgspec
from valve_tools.replay import svg
from valve_tools.replay.pair_results import (
    KEEPS,
    LATENCY_MARKS,
    PAPER_MARKS,
    POOL_MARKS,
    TIE,
    PairOutcome,
    PairTask,
    Results,
    best_rival,
    claims_of,
    increase_of,
    run_task,
    tokens,
    worst_reclaims,
)
from valve_tools.replay.report import Cell, Chart, Report, ReportTable, plus_minus
from valve_tools.replay.work import TellProgress, Workers, spread
from valve_tools.sim.combinations import (
    BUDGET_ORACLE,
    COMBINATIONS,
    COOPERATIVE,
    FIXED,
    HELPER,
    ORACLE,
    OURS,
    SAME_ENGINE,
    SHIPPED,
)
from valve_tools.sim.metrics import Interval, Summary
from valve_tools.sim.pairs import PAIRS, Bound, PairRow, bind
from valve_tools.sim.rivals import PRISM, TIME_SLICE, XSCHED
from valve_tools.sim.shape import LoadShape
from valve_tools.sim.traces import Folder
from valve_tools.sim.tuning import Tuning

SHOWN = (SHIPPED, PRISM, XSCHED, TIME_SLICE, "GPreempt+OurMem", "KernelPreempt+UVM")
RUNGS = {"sparse": SHIPPED, "helper": HELPER, "cooperative": COOPERATIVE, "64 MiB columns": OURS}
FIRST_TARGET = 6
"""Reclaims an hour: one in ten minutes, the target before the product's default was raised."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairEntry:
    """A pair as its page shows it: what was bound to it, without the requests."""

    pair: PairRow
    trace: str
    hours: float
    work: str
    shape: LoadShape


def entry_of(bound: Bound) -> PairEntry:
    job = bound.job
    work = f"{job.train_tokens} tokens/step" if job.is_training else (job.lengths.name if job.lengths else "")
    return PairEntry(pair=bound.pair, trace=bound.trace.label, hours=bound.seconds / 3600, work=work, shape=bound.shape)


def run(folder: Folder, seeds: Sequence[int], progress: TellProgress, workers: Workers | None = None) -> Report:
    bounds = bind(folder)
    names = tuple(one.name for one in COMBINATIONS)
    tasks = [PairTask(bound=bound, seed=seed, names=names) for seed in seeds for bound in bounds]
    results = Results(spread(run_task, tasks, progress, workers or Workers(), label="pairs"))
    return report([entry_of(bound) for bound in bounds], results, seeds)


def from_data(data: Mapping[str, Any], seeds: Sequence[int]) -> Report:
    """The same page from the figures of a `pairs.json`."""
    pairs = {pair.key: pair for pair in PAIRS}
    entries = [
        PairEntry(
            pair=pairs[key],
            trace=one["trace"],
            hours=one["hours"],
            work=one["work"],
            shape=msgspec.convert(one["shape"], LoadShape),
        )
        for key, one in sorted(data.items(), key=lambda item: list(pairs).index(item[0]))
    ]
    runs = [msgspec.convert(run, PairOutcome) for one in data.values() for run in one["runs"]]
    return report(entries, Results(runs), seeds)


def report(entries: Sequence[PairEntry], results: Results, seeds: Sequence[int]) -> Report:
    target = Tuning().reservation.target_per_hour
    return Report(
        name="pairs",
        title="Ten pairs: what sharing costs online and what it leaves for offline",
        summary=(
            "Every pair runs its trace under every combination of a compute and a memory policy, on the same "
            "requests and the same seeds as the service alone. Increases are over the service on a GPU of its own, and "
            "claims are judged by them; beside them stand those over the service alone in the pool that it has beside "
            "the job's weights, which is what stopping and reclaiming cost. "
            f"{SHIPPED} moves what a default installation moves, columns of K and V apart in every layer (1 GiB for "
            "32 layers in handles of 16 MiB); Channel+OurMem moves 64 MiB, as a packed layout would. "
            "One H100 model unless the pair says otherwise; short slices are used whole.",
            "± is half the 95 % interval over the seeds; claims are judged by its worse end. With one seed there is no "
            f"interval. Level means at least {TIE:g} of the best baseline; whether ours is ahead (1.00) is said beside "
            f"it. Reclaims are judged against the product's default of {target:g} an hour, which departs from the "
            f"{FIRST_TARGET} of one in ten minutes: the table has both. Rivals run at the setting that is best for "
            "them on the other half of the traces (the page of rivals).",
        ),
        claims=tuple(claim for entry in entries for claim in claims_of(entry.pair.key, results)),
        tables=(
            _pairs_table(entries, results),
            _ahead_table(entries, results),
            _reclaim_table(entries, results),
            _rung_table(entries, results),
            *(_result_table(entry, results) for entry in entries),
        ),
        charts=tuple(_charts(entries, results)),
        data=_data(entries, results),
        has_pictures=True,
        is_small=True,
        seeds=tuple(seeds),
    )


def _ahead_table(entries: Sequence[PairEntry], results: Results) -> ReportTable:
    rows: list[tuple[Cell, ...]] = []
    for entry in entries:
        for words, marks in (("ours", LATENCY_MARKS), ("the papers'", PAPER_MARKS)):
            found = best_rival(entry.pair.key, results, marks)
            if found is None:
                rows.append(
                    (entry.pair.key, words, "none keeps them and does any work", None, None, "n/a", "n/a", "n/a")
                )
                continue
            best, lead = found
            keeps = "yes" if results.keeps_latency(entry.pair.key, SHIPPED, marks) else "no"
            judged = ("yes" if lead.low >= 1 else "no", "yes" if lead.low >= TIE else "no")
            rows.append((entry.pair.key, words, best, plus_minus(lead), f"{lead.low:.4f}", *judged, keeps))
    return ReportTable(
        title="Ours over the best baseline that keeps the latency marks",
        columns=("pair", "marks", "baseline", "offline throughput, ratio", "worse end", "ahead (1.00)",
                 f"level ({TIE:g})", "ours keeps them"),
        rows=tuple(rows),
        note="The papers' marks: mean TTFT +5 %, mean TPOT +2 %, no tails. Where a baseline is ahead under them, Valve "
        "is the wrong choice for those who can live with them.",
    )  # fmt: skip


def _reclaim_table(entries: Sequence[PairEntry], results: Results) -> ReportTable:
    rows: list[tuple[Cell, ...]] = []
    for entry in entries:
        worst = worst_reclaims(entry.pair.key, results)
        first = max(one.summaries[SHIPPED].reclaims_by_hour[0] for one in results.of(entry.pair.key))
        marks = (Tuning().reservation.target_per_hour, FIRST_TARGET)
        within = (("n/a" if worst is None else "yes" if worst <= mark else "no") for mark in marks)
        rows.append((entry.pair.key, "n/a" if worst is None else worst, first, *within))
    return ReportTable(
        title="Reclaims of ours in the worst hour, all seeds",
        columns=("pair", "after the first", "first hour", "within the default's 30", "within 6"),
        rows=tuple(rows),
        note="n/a: the slice ends within the first hour, in which the reservation still learns.",
    )


def _rung_table(entries: Sequence[PairEntry], results: Results) -> ReportTable:
    rows: list[tuple[Cell, ...]] = []
    for entry in entries:
        for words, name in RUNGS.items():
            if not results.has(entry.pair.key, name):
                continue
            late = (
                results.over(entry.pair.key, name, increase_of(metric, "mean"))
                for metric in ("own_ttft_increase", "ttft_increase")
            )
            rows.append(
                (
                    entry.pair.key,
                    words,
                    *(plus_minus(one) for one in late),
                    plus_minus(results.over(entry.pair.key, name, lambda s: s.own_ttft_increase["p99"])),
                    plus_minus(results.ratio(entry.pair.key, name, ORACLE)),
                    plus_minus(results.over(entry.pair.key, name, lambda s: s.share_of_alone)),
                )
            )
    return ReportTable(
        title="How memory is taken",
        columns=("pair", "way", "TTFT mean %, own GPU", "TTFT mean %, same pool", "TTFT P99 %, own GPU",
                 "offline of clairvoyant", "GPUs saved"),
        rows=tuple(rows),
        note="sparse: after a process has passed its trial, the default; cooperative: the default in one that has "
        "not; helper: by setting. 64 MiB columns at 0.1 ms stand for a packed layout.",
    )  # fmt: skip


def _pairs_table(entries: Sequence[PairEntry], results: Results) -> ReportTable:
    rows = []
    for entry in entries:
        pair = entry.pair
        first = results.of(pair.key)[0]
        rows.append(
            (
                pair.key,
                pair.title,
                entry.trace,
                f"{pair.online} TP{pair.tp}",
                f"{pair.offline}, {entry.work}",
                entry.hours,
                first.requests,
                first.refused,
                entry.shape.harvestable,
                entry.shape.idle_per_hour,
                entry.shape.kv_peak_tokens,
                first.handles,
                first.own_ttft_ms["mean"],
                first.own_ttft_ms["p99"],
                first.own_tpot_ms["mean"],
                first.solo_ttft_ms["mean"],
            )
        )
    return ReportTable(
        title="Pairs",
        columns=("pair", "about", "trace", "online", "offline", "hours", "requests", "refused", "harvestable",
                 "idle/h", "KV peak", "handles", "own GPU: TTFT ms", "TTFT P99", "TPOT ms", "same pool: TTFT ms"),
        rows=tuple(rows),
        note="Traces are chosen by shape as seen by one 8B reference GPU (harvestable, idle periods, KV peak). "
        "Refused: larger than the whole pool.",
    )  # fmt: skip


def _result_table(entry: PairEntry, results: Results) -> ReportTable:
    key = entry.pair.key
    rows: list[tuple[Any, ...]] = []
    marks = set()
    for one in COMBINATIONS:
        if not results.has(key, one.name):
            continue
        over = {
            (metric, quantile): results.over(key, one.name, increase_of(metric, quantile))
            for metric, quantile, _ in (*LATENCY_MARKS, *POOL_MARKS)
        }
        if one.name == SHIPPED:
            for metric, quantile, mark in LATENCY_MARKS:
                if over[metric, quantile].high > mark:
                    marks.add((len(rows), 1 + list(over).index((metric, quantile))))
        first = [outcome.summaries[one.name] for outcome in results.of(key)]
        rows.append(
            (
                one.name,
                *(plus_minus(value) for value in over.values()),
                plus_minus(results.over(key, one.name, tokens)),
                plus_minus(results.ratio(key, one.name, PRISM)),
                plus_minus(results.ratio(key, one.name, ORACLE)),
                plus_minus(results.over(key, one.name, lambda s: s.share_of_alone)),
                plus_minus(results.over(key, one.name, lambda s: s.utilisation_gain)),
                max(s.max_preemptions for s in first),
                max((s.reclaims_after_first_hour for s in first if len(s.reclaims_by_hour) > 1), default="n/a"),
                max(s.kills for s in first),
                max(s.unserved for s in first),
                max(s.stop_ms["p99"] for s in first),
            )
        )
    return ReportTable(
        title=f"{key} {entry.pair.title}: {entry.pair.about}",
        columns=("combination", "own GPU: TTFT % mean", "P99", "TPOT % mean", "P99",
                 "same pool: TTFT % mean", "P99", "TPOT % mean", "P99",
                 "offline tok/s", "of Prism", "of clairvoyant", "of alone", "utilisation", "max preempt.",
                 "reclaims/h", "kills", "unserved", "stop P99 ms"),
        rows=tuple(rows),
        marks=frozenset(marks),
        is_detail=True,
    )  # fmt: skip


def _charts(entries: Sequence[PairEntry], results: Results) -> list[Chart]:
    keys = [entry.pair.key for entry in entries]

    def bars(
        find: Callable[[str, str], Interval | None], names: Sequence[str], unit: str, bound: float | None, cap: float
    ) -> str:
        found = {name: [find(key, name) for key in keys] for name in names}
        means = {name: [one.mean if one else None for one in row] for name, row in found.items()}
        halves = {name: [one.half if one else None for one in row] for name, row in found.items()}
        return svg.grouped_bars(keys, means, unit=unit, bound=bound, cap=cap, halves=halves)

    def over(figure: Callable[[Summary], float]) -> Callable[[str, str], Interval]:
        return lambda key, name: results.over(key, name, figure)

    def kept(key: str, name: str) -> Interval | None:
        return results.ratio(key, name, ORACLE)

    ttft, tpot = (lambda s: s.own_ttft_increase["mean"]), (lambda s: s.own_tpot_increase["mean"])
    return [
        Chart(
            title="Mean TTFT increase over the service on a GPU of its own",
            svg=bars(over(ttft), SHOWN, "%", 2.5, 50.0),
            note="Bars above 50 % are cut; every bar carries its value.",
        ),
        Chart(title="P99 TTFT increase", svg=bars(over(lambda s: s.own_ttft_increase["p99"]), SHOWN, "%", 5.0, 50.0)),
        Chart(title="Mean TPOT increase", svg=bars(over(tpot), SHOWN, "%", 1.0, 20.0)),
        Chart(
            title="Offline throughput against a clairvoyant reservation that sees the next minute",
            svg=bars(kept, (*SHOWN, FIXED, BUDGET_ORACLE), "ratio", KEEPS, 1.6),
            note="The clairvoyant reservation in budget knows the whole future but may take memory back only as often "
            "as the operator's reclaim target allows: no policy within the target can beat it by much.",
        ),
        Chart(
            title="GPUs saved: offline throughput over that of the job alone on a GPU",
            svg=bars(over(lambda s: s.share_of_alone), SHOWN, "GPUs per GPU", None, 1.0),
            note=f"{SAME_ENGINE} needs no second copy of the weights and is in the tables.",
        ),
    ]


def _data(entries: Sequence[PairEntry], results: Results) -> dict[str, Any]:
    return {
        entry.pair.key: {
            "trace": entry.trace,
            "hours": entry.hours,
            "work": entry.work,
            "shape": asdict(entry.shape),
            "runs": [asdict(outcome) for outcome in results.of(entry.pair.key)],
        }
        for entry in entries
    }
