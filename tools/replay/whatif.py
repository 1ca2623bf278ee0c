"""`valve replay whatif`: what Valve would give on an operator's own load and machine, and with which settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np
from valve_tools.replay import svg
from valve_tools.replay.pair_results import LATENCY_MARKS, increase_of, words_of
from valve_tools.replay.question import Question, bounds_of, machine_of, words_of_load
from valve_tools.replay.report import Cell, Chart, Report, ReportTable
from valve_tools.replay.work import TellProgress, Workers, spread
from valve_tools.sim.combinations import (
    BY_NAME,
    OURS,
    alone_tokens_per_s,
    as_shipped,
    run_combination,
    run_own,
    run_solo,
)
from valve_tools.sim.machine import Settings, pool_handles
from valve_tools.sim.metrics import Claim, Interval, Summary, at_least, at_most, distribution, interval, summarise
from valve_tools.sim.pairs import Bound
from valve_tools.sim.sample import RULE
from valve_tools.sim.traces import TraceError
from valve_tools.sim.tuning import Context, Tuning
from valve_tools.sim.world import NS

TARGETS = (6.0, 30.0, 120.0, 600.0)
LEAST_POOL_MIB = 1024
HEADROOM_SHARES = (0.03, 0.06, 0.12)
WITHOUT_HINT = "Channel without hint+OurMem"
LEAST_SAVED = 0.05
"""GPUs saved per GPU below which sharing is not worth a person's attention."""


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
            f"{words_of_load(bound.trace)} for one replica; the service alone leaves "
            f"{100 * answers[0].idle_share:.0f} % of the GPU idle.",
            *((RULE,) if bound.trace.sample else ()),
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
