"""`valve replay whatif`: what Valve would give on an operator's own load and machine, and with which settings."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import numpy as np
from valve_tools.replay import svg
from valve_tools.replay.fleet_input import prometheus_of, requests_of
from valve_tools.replay.pair_results import LATENCY_MARKS, increase_of, words_of
from valve_tools.replay.report import Cell, Chart, Claim, Report, ReportTable, at_least, at_most
from valve_tools.replay.work import TellProgress, Workers, spread
from valve_tools.sim.combinations import (
    BY_NAME,
    OURS,
    Context,
    Tuning,
    alone_tokens_per_s,
    as_shipped,
    run_combination,
    run_own,
    run_solo,
)
from valve_tools.sim.machine import GPUS, MODELS, Gpu, Settings, pool_handles
from valve_tools.sim.metrics import Interval, Summary, distribution, interval, summarise
from valve_tools.sim.pairs import Bound, PairRow, batch_lengths
from valve_tools.sim.shape import LoadShape, window_s
from valve_tools.sim.traces import Folder, Trace, TraceError
from valve_tools.sim.world import NS, OfflineSide, OnlineSide

PLAUSIBLE = {"memory_gib": (1.0, 10_000.0), "bandwidth_bytes_s": (1e9, 1e15), "flops": (1e10, 1e18)}
SHARE, TIMES_NS = (0.01, 1.0), (1e-3, 1e9)
"""What a figure of a card can be: by its name, of an efficiency, of a time."""
TARGETS = (6.0, 30.0, 120.0, 600.0)
LEAST_POOL_MIB = 1024
HEADROOM_SHARES = (0.03, 0.06, 0.12)
WITHOUT_HINT = "Channel without hint+OurMem"
LEAST_REQUESTS, LEAST_S = 50, 60.0
"""A shorter load says nothing about a service: no answer is given."""
LEAST_SAVED = 0.05
"""GPUs saved per GPU below which sharing is not worth having somebody watch it."""
NOT_ASKED = LoadShape(harvestable=math.nan, idle_per_hour=math.nan, kv_peak_tokens=math.nan)
"""The shape says which pair a trace is for; here the operator said it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What the operator has."""

    requests: Path | None = None
    prometheus: Path | None = None
    machine: Path | None = None
    gpu: str = "H100"
    online: str = "8B"
    offline: str = "8B"
    tp: int = 1
    replicas: int = 1
    """The load is that of so many replicas; one of them is simulated."""
    hours: float | None = None
    """Only the first so many hours of the load."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatifTask:
    """What an answer follows from: the load and the machine themselves, not the files that told them."""

    bound: Bound
    settings: Settings
    seed: int
    is_brief: bool = False
    """The default settings alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeedAnswer:
    """One seed: every candidate setting, and the default without a hint."""

    idle_share: float
    largest_gap_ms: float
    requests: int
    alone_ms: dict[str, dict[str, float]]
    """The service without the job, by what it runs on: TTFT and TPOT."""
    summaries: dict[str, Summary]


def machine_of(question: Question) -> Settings:
    """The card by name, or its figures from a JSON file that names the fields of `Gpu` to change."""
    if question.gpu not in GPUS:
        raise TraceError(f"--gpu {question.gpu}: known are {', '.join(GPUS)}; describe another with --machine FILE")
    gpu = GPUS[question.gpu]
    if question.machine is None:
        return Settings(gpu=gpu)
    try:
        changes = json.loads(question.machine.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise TraceError(f"{question.machine}: not readable as JSON: {error}") from error
    if not isinstance(changes, dict):
        raise TraceError(f'{question.machine}: not a JSON object of figures, such as {{"memory_gib": 44}}')
    for name, value in changes.items():
        _check_figure(f"{question.machine}: {name}", name, value)
    return Settings(gpu=replace(gpu, **changes))


def _check_figure(place: str, name: str, value: object) -> None:
    known = [field.name for field in fields(Gpu)]
    if name not in known:
        raise TraceError(f"{place}: unknown field {name!r}; known are {', '.join(known)}")
    if name == "name":
        if not isinstance(value, str):
            raise TraceError(f"{place} is {value!r}, it must be a word")
        return
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise TraceError(f"{place} is {value!r}, it must be a number above zero")
    least, most = PLAUSIBLE.get(name, SHARE if name.endswith("_efficiency") else TIMES_NS)
    if not least <= value <= most:
        raise TraceError(f"{place} is {value!r}, it must be at least {least:g} and at most {most:g}")


def trace_of(question: Question, seed: int) -> Trace:
    if (question.requests is None) == (question.prometheus is None):
        raise TraceError("pass one of --requests FILE (CSV) and --prometheus FILE (query_range JSON)")
    whole = requests_of(question.requests) if question.requests else prometheus_of(Path(str(question.prometheus)), seed)
    load = whole.thinned(question.replicas)
    return load if question.hours is None else load.first(question.hours * 3600)


def judged(trace: Trace) -> int:
    """Requests of the hours that are simulated: the first of a long load."""
    return trace.first(window_s(trace)).requests


def bound_of(question: Question, trace: Trace) -> Bound:
    for name in (question.online, question.offline):
        if name not in MODELS:
            raise TraceError(f"model {name}: known are {', '.join(MODELS)}")
    if trace.requests == 0:
        raise TraceError("the load holds no request")
    if judged(trace) < LEAST_REQUESTS or window_s(trace) < LEAST_S:
        raise TraceError(
            f"no answer: {judged(trace)} requests in {window_s(trace):.0f} s say nothing about a service; "
            f"bring at least {LEAST_REQUESTS} over {LEAST_S:.0f} s, better a day"
        )
    online, offline, shape = question.online, question.offline, NOT_ASKED
    pair = PairRow(key="fleet", title="your load", about="", online=online, offline=offline, shape=shape)
    lengths = batch_lengths(Folder(traces=(), lengths=(), ignored=()))
    return Bound(
        pair=pair,
        trace=trace,
        shape=shape,
        service=OnlineSide(model=MODELS[online], tp=question.tp),
        job=OfflineSide(model=MODELS[offline], tp=question.tp, lengths=lengths),
    )


def candidates(bound: Bound, settings: Settings) -> dict[str, Tuning]:
    """Reclaim targets crossed with caps on headroom; the first is the product's default, with the columns it moves."""
    base = as_shipped(bound, Tuning(settings=settings))
    handles = _handles(bound, base.settings)
    found = {"defaults": base}
    for target in TARGETS:
        for share in HEADROOM_SHARES:
            most = max(base.reservation.headroom_min_handles, int(share * handles))
            reservation = replace(base.reservation, target_per_hour=target, headroom_max_handles=most)
            found[f"target {target:g}/h, headroom to {share:.0%}"] = replace(base, reservation=reservation)
    return found


def run_task(task: WhatifTask) -> SeedAnswer:
    bound = task.bound
    tunings = candidates(bound, task.settings)
    default = tunings["defaults"]
    own, solo = run_own(bound, task.seed, default), run_solo(bound, task.seed, default)
    alone = alone_tokens_per_s(bound, task.seed, default)
    summaries = {}
    for name, tuning in {"defaults": default}.items() if task.is_brief else tunings.items():
        context = Context(bound=bound, seed=task.seed, solo=solo, tuning=tuning)
        summaries[name] = summarise(run_combination(BY_NAME[OURS], context), solo, alone, own)
    if not task.is_brief:
        context = Context(bound=bound, seed=task.seed, solo=solo, tuning=default)
        blind = run_combination(BY_NAME[WITHOUT_HINT], context)
        summaries["defaults without a hint"] = summarise(blind, solo, alone, own)
    return SeedAnswer(
        idle_share=1 - solo.totals["online_busy_ns"] / NS / solo.seconds,
        largest_gap_ms=bound.service.gap.max_ns / 1e6,
        requests=bound.trace.requests,
        alone_ms={
            f"{metric} {name}": distribution(times[np.isfinite(times)])
            for name, one in (("own", own), ("pool", solo))
            for metric, times in (("ttft", one.ttft_ms), ("tpot", one.tpot_ms))
        },
        summaries=summaries,
    )


def _handles(bound: Bound, settings: Settings) -> int:
    weights = (bound.service.model.weights_gib + bound.job.model.weights_gib) / bound.service.tp
    handles = pool_handles(weights, 2, settings)
    if handles * settings.handle_mib < LEAST_POOL_MIB:
        raise TraceError(
            f"{bound.service.model.name} and {bound.job.model.name} leave {handles * settings.handle_mib} MiB of KV "
            f"on a {settings.gpu.name}: take a smaller offline model or more GPUs (--tp)"
        )
    return handles


def bounds_of(question: Question, seeds: Sequence[int]) -> list[Bound]:
    """One for each seed; only an export's load is drawn anew."""
    first = bound_of(question, trace_of(question, seeds[0]))
    if question.prometheus is None:
        return [first] * len(seeds)
    return [first, *(bound_of(question, trace_of(question, seed)) for seed in seeds[1:])]


def run(question: Question, seeds: Sequence[int], progress: TellProgress, workers: Workers | None = None) -> Report:
    settings = machine_of(question)
    bounds = bounds_of(question, seeds)
    bound = bounds[0]
    tasks = [WhatifTask(bound=one, settings=settings, seed=seed) for one, seed in zip(bounds, seeds, strict=True)]
    answers = spread(run_task, tasks, progress, workers or Workers(), label="whatif")
    names = list(answers[0].summaries)
    best = recommend(answers)
    rows = [_row(name, answers, name == best) for name in names]
    why_not = refusals(answers, best)
    tuning = candidates(bound, settings)[best]
    settled = _advice(tuning, answers, best, _handles(bound, tuning.settings))
    advice = ReportTable(title="Recommended settings", columns=("setting", "value", "why"), rows=settled)
    return Report(
        name="whatif",
        title=f"What Valve would give on {bound.trace.label}",
        summary=(
            f"{question.online} online and {question.offline} offline on {question.tp} {settings.gpu.name}, "
            f"{judged(bound.trace):,} requests in {window_s(bound.trace) / 3600:.1f} h for one replica; the service "
            f"alone leaves {100 * answers[0].idle_share:.0f} % of the GPU idle.",
            *verdict(answers, best, why_not),
        ),
        claims=tuple(_claims(answers, best)),
        tables=(
            *(() if why_not else (advice,)),
            _latency(answers, best),
            ReportTable(title="All candidates",
                  columns=("settings", "chosen", "GPUs saved", "low", "high", "TTFT % mean", "TTFT % P99",
                           "TPOT % mean", "TPOT % P99", "max preempt.", "worst reclaims/h"),
                  rows=tuple(rows)),
        ),
        charts=(
            Chart(
                title="GPUs saved per GPU by reclaim target",
                svg=svg.curves(_curves(answers), x_unit="reclaims per hour allowed", y_unit="GPUs per GPU", log_x=True),
            ),
        ),
        data={"answers": [asdict(answer) for answer in answers], "recommended": best},
        seeds=tuple(seeds),
        input={"requests": bound.trace.requests, "skipped rows": bound.trace.skipped},
    )  # fmt: skip


def refusals(answers: Sequence[SeedAnswer], best: str) -> list[str]:
    """Why this service's GPU is not one to share; empty where it is."""
    found = []
    saved = _over(answers, best, "share_of_alone").low
    if saved < LEAST_SAVED:
        idle = answers[0].idle_share
        found.append(f"it would save {max(saved, 0.0):.2f} of a GPU: the service leaves {100 * idle:.0f} % of it idle")
    for metric, quantile, mark in LATENCY_MARKS:
        over = _worse_end(answers, best, metric, quantile)
        if over > mark:
            pool = _worse_end(answers, best, metric.removeprefix("own_"), quantile)
            found.append(
                f"{words_of(metric)} {quantile} would rise by {over:.1f} % over the service on its own GPU "
                f"(mark {mark:g} %), {pool:.1f} % of it by stops and reclaims, "
                "the rest by the memory that the other engine's weights take"
            )
    return found


def verdict(answers: Sequence[SeedAnswer], best: str, why_not: Sequence[str]) -> list[str]:
    if why_not:
        return ["DO NOT USE VALVE HERE (docs/when-not.md): " + "; ".join(why_not) + "."]
    saved = _over(answers, best, "share_of_alone")
    seeds = len(answers)
    spread_of = f"95 % interval {saved.low:.2f} to {saved.high:.2f} over {seeds} seeds" if seeds > 1 else "one seed"
    return [
        f"With the recommended settings a GPU of this service saves {saved.mean:.2f} of a GPU of offline work "
        f"({spread_of}). An interval covers draws of gaps, stops and lengths, not an error of the machine model: "
        "expect a quarter either way in a pilot.",
    ]


def _latency(answers: Sequence[SeedAnswer], best: str) -> ReportTable:
    """What requests take, in milliseconds: an increase in percent says little by itself."""
    figures = [(metric, quantile) for metric in ("ttft", "tpot") for quantile in ("mean", "p99")]

    def alone(name: str) -> list[float]:
        return [interval([one.alone_ms[f"{metric} {name}"][q] for one in answers]).mean for metric, q in figures]

    def valve() -> list[float]:
        return [
            interval([getattr(one.summaries[best], f"{metric}_ms")[q] for one in answers]).mean for metric, q in figures
        ]

    return ReportTable(
        title="What requests take",
        columns=("the service", "TTFT ms mean", "P99", "TPOT ms mean", "P99"),
        rows=(
            ("on a GPU of its own", *alone("own")),
            ("alone, beside the weights of the offline engine", *alone("pool")),
            (f"with Valve, {best}", *valve()),
        ),
    )


def _claims(answers: Sequence[SeedAnswer], best: str) -> list[Claim]:
    """The marks that the recommendation keeps or misses, and what it saves."""
    claims = []
    for metric, quantile, mark in LATENCY_MARKS:
        name = f"{words_of(metric)} {quantile} increase %"
        claims.append(at_most(name, "fleet", _worse_end(answers, best, metric, quantile), mark))
    worst = max(one.summaries[best].max_preemptions for one in answers)
    claims.append(at_most("preemptions per request", "fleet", worst, 1))
    saved = _over(answers, best, "share_of_alone").low
    return [*claims, at_least("GPUs saved per GPU", "fleet", saved, LEAST_SAVED)]


def recommend(answers: Sequence[SeedAnswer]) -> str:
    """The most offline work among candidates that keep the latency marks by the worse end.

    Of equals (within 2 %) the one with fewest reclaims, since a reclaim on hardware has costs that no model has; the
    defaults where they are level in that too. Where none keeps the marks, the one that comes nearest.
    """
    names = [name for name in answers[0].summaries if name != "defaults without a hint"]
    fair = [name for name in names if _keeps(answers, name)]
    if not fair:
        return min(names, key=lambda name: _excess(answers, name))
    most = max(_over(answers, name, "share_of_alone").mean for name in fair)
    good = [name for name in fair if _over(answers, name, "share_of_alone").mean >= 0.98 * most]
    return min(good, key=lambda name: _reclaims(answers, name))


def _worse_end(answers: Sequence[SeedAnswer], name: str, metric: str, quantile: str) -> float:
    return interval([increase_of(metric, quantile)(one.summaries[name]) for one in answers]).high


def _excess(answers: Sequence[SeedAnswer], name: str) -> float:
    """The largest of the latency increases, each over its mark."""
    return max(_worse_end(answers, name, metric, quantile) / mark for metric, quantile, mark in LATENCY_MARKS)


def _keeps(answers: Sequence[SeedAnswer], name: str) -> bool:
    return _excess(answers, name) <= 1


def _over(answers: Sequence[SeedAnswer], name: str, figure: str) -> Interval:
    return interval([getattr(one.summaries[name], figure) for one in answers])


def _reclaims(answers: Sequence[SeedAnswer], name: str) -> int:
    return max(max(one.summaries[name].reclaims_by_hour) for one in answers)


def _row(name: str, answers: Sequence[SeedAnswer], is_best: bool) -> tuple[Cell, ...]:
    saved = _over(answers, name, "share_of_alone")
    increases = [
        interval([increase_of(metric, quantile)(one.summaries[name]) for one in answers]).mean
        for metric, quantile, _ in LATENCY_MARKS
    ]
    worst = max(one.summaries[name].max_preemptions for one in answers)
    return (name, "*" if is_best else "", saved.mean, saved.low, saved.high, *increases, worst,
            _reclaims(answers, name))  # fmt: skip


def _advice(tuning: Tuning, answers: Sequence[SeedAnswer], best: str, handles: int) -> tuple[tuple[Cell, ...], ...]:
    reservation, cooldown = tuning.reservation, tuning.cooldown
    hinted = _over(answers, "defaults", "share_of_alone").mean
    blind = _over(answers, "defaults without a hint", "share_of_alone").mean
    gap_ms = answers[0].largest_gap_ms
    mib = tuning.settings.handle_mib
    return (
        ("lifecycle hint", "on", f"saves {hinted:.2f} GPUs per GPU with it and {blind:.2f} without"),
        ("memory.target_per_hour", reservation.target_per_hour, f"worst hour seen: {_reclaims(answers, best)}"),
        ("memory.headroom_max_mib", reservation.headroom_max_handles * mib,
         f"{100 * reservation.headroom_max_handles / handles:.0f} % of the KV pool of {handles * mib // 1024} GiB"),
        ("cooldown.start_ms", max(cooldown.start_ns / 1e6, gap_ms),
         f"without a hint: the largest decode gap of the model is {gap_ms:g} ms"),
        ("cooldown.ceiling_ms", cooldown.ceiling_ns / 1e6, "without a hint: the default"),
    )  # fmt: skip


def _curves(answers: Sequence[SeedAnswer]) -> Mapping[str, list[tuple[float, float]]]:
    return {
        f"headroom to {share:.0%} of the pool": [
            (target, _over(answers, f"target {target:g}/h, headroom to {share:.0%}", "share_of_alone").mean)
            for target in TARGETS
        ]
        for share in HEADROOM_SHARES
    }
