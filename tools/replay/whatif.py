"""`valve replay whatif`: what Valve would give on an operator's own load and machine, and with which settings."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from valve_tools.replay import svg
from valve_tools.replay.fleet_input import prometheus_of, requests_of
from valve_tools.replay.pairs import LATENCY_MARKS, increase_of
from valve_tools.replay.report import Cell, Chart, Report, Table
from valve_tools.replay.work import Progress, Workers, spread
from valve_tools.sim.combinations import BY_NAME, OURS, Context, Tuning, run_combination, run_job_alone, run_solo
from valve_tools.sim.machine import GPUS, MODELS, Gpu, Settings, pool_handles
from valve_tools.sim.metrics import Interval, Summary, interval, summarise
from valve_tools.sim.pairs import Bound, Pair, batch_lengths
from valve_tools.sim.shape import measure, window_s
from valve_tools.sim.traces import Folder, Trace, TraceError
from valve_tools.sim.world import NS, Job, Service

TARGETS = (6.0, 30.0, 120.0, 600.0)
HEADROOM_SHARES = (0.03, 0.06, 0.12)
WITHOUT_HINT = "Channel without hint+OurMem"


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    question: Question
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One seed: every candidate setting, and the default without a hint."""

    idle_share: float
    largest_gap_ms: float
    requests: int
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
    elif isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise TraceError(f"{place} is {value!r}, it must be a number above zero")
    elif name.endswith("_efficiency") and value > 1:
        raise TraceError(f"{place} is {value!r}, a share of the peak is at most 1")


def trace_of(question: Question, seed: int) -> Trace:
    if (question.requests is None) == (question.prometheus is None):
        raise TraceError("pass one of --requests FILE (CSV) and --prometheus FILE (query_range JSON)")
    if question.requests is not None:
        return requests_of(question.requests).thinned(question.replicas)
    if question.prometheus is None:
        raise AssertionError("checked above")
    return prometheus_of(question.prometheus, seed).thinned(question.replicas)


def bound_of(question: Question, trace: Trace) -> Bound:
    for name in (question.online, question.offline):
        if name not in MODELS:
            raise TraceError(f"model {name}: known are {', '.join(MODELS)}")
    if trace.requests == 0:
        raise TraceError("the load holds no request")
    shape = measure(trace)[0]
    pair = Pair(key="fleet", title="your load", about="", online=question.online, offline=question.offline, shape=shape)
    lengths = batch_lengths(Folder(traces=(), lengths=(), ignored=()))
    return Bound(
        pair=pair,
        trace=trace,
        shape=shape,
        service=Service(model=MODELS[question.online], tp=question.tp),
        job=Job(model=MODELS[question.offline], tp=question.tp, lengths=lengths),
    )


def candidates(settings: Settings, handles: int) -> dict[str, Tuning]:
    """Reclaim targets crossed with caps on headroom; the first is the product's default."""
    base = Tuning(settings=settings)
    found = {"defaults": base}
    for target in TARGETS:
        for share in HEADROOM_SHARES:
            most = max(base.reservation.headroom_min_handles, int(share * handles))
            reservation = replace(base.reservation, target_per_hour=target, headroom_max_handles=most)
            found[f"target {target:g}/h, headroom to {share:.0%}"] = replace(base, reservation=reservation)
    return found


def run_task(task: Task) -> Answer:
    settings = machine_of(task.question)
    bound = bound_of(task.question, trace_of(task.question, task.seed))
    handles = _handles(bound, settings)
    tunings = candidates(settings, handles)
    default = tunings["defaults"]
    solo = run_solo(bound, task.seed, default)
    alone = run_job_alone(bound, task.seed, default).offline_tokens_per_s
    summaries = {}
    for name, tuning in tunings.items():
        context = Context(bound=bound, seed=task.seed, solo=solo, tuning=tuning)
        summaries[name] = summarise(run_combination(BY_NAME[OURS], context), solo, alone)
    context = Context(bound=bound, seed=task.seed, solo=solo, tuning=default)
    summaries["defaults without a hint"] = summarise(run_combination(BY_NAME[WITHOUT_HINT], context), solo, alone)
    return Answer(
        idle_share=1 - solo.totals["online_busy_ns"] / NS / solo.seconds,
        largest_gap_ms=bound.service.gap.max_ns / 1e6,
        requests=bound.trace.requests,
        summaries=summaries,
    )


def _handles(bound: Bound, settings: Settings) -> int:
    weights = (bound.service.model.weights_gib + bound.job.model.weights_gib) / bound.service.tp
    handles = pool_handles(weights, 2, settings)
    if handles < 16:
        raise TraceError(
            f"{bound.service.model.name} and {bound.job.model.name} leave {handles} handles of KV on a "
            f"{settings.gpu.name}: take a smaller offline model or more GPUs (--tp)"
        )
    return handles


def run(question: Question, seeds: Sequence[int], progress: Progress, workers: Workers | None = None) -> Report:
    bound = bound_of(question, trace_of(question, seeds[0]))
    settings = machine_of(question)
    handles = _handles(bound, settings)
    tasks = [Task(question=question, seed=seed) for seed in seeds]
    answers = spread(run_task, tasks, progress, workers or Workers(), label="whatif")
    names = list(answers[0].summaries)
    best = recommend(answers)
    rows = [_row(name, answers, name == best) for name in names]
    saved = _over(answers, best, "share_of_alone")
    return Report(
        name="whatif",
        title=f"What Valve would give on {bound.trace.label}",
        summary=(
            f"{question.online} online and {question.offline} offline on {question.tp} {settings.gpu.name}, "
            f"{bound.trace.requests:,} requests in {window_s(bound.trace) / 3600:.1f} h for one replica; the service "
            f"alone leaves {100 * answers[0].idle_share:.0f} % of the GPU idle.",
            f"With the recommended settings a GPU of this service saves {saved.mean:.2f} of a GPU of offline work "
            f"(95 % interval {saved.low:.2f} to {saved.high:.2f} over {len(seeds)} seeds). The interval covers draws "
            "of gaps, stops and lengths, not an error of the machine model: expect a quarter either way in a pilot.",
        ),
        tables=(
            Table(title="Recommended settings", columns=("setting", "value", "why"),
                  rows=_advice(candidates(settings, handles)[best], answers, best, handles)),
            Table(title="All candidates",
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
    )  # fmt: skip


def recommend(answers: Sequence[Answer]) -> str:
    """The most offline work among candidates that keep the latency marks by the worse end.

    Of equals (within 2 %) the one with fewest reclaims, since a reclaim on hardware has costs that no model has; the
    defaults where they are level in that too.
    """
    names = [name for name in answers[0].summaries if name != "defaults without a hint"]
    fair = [name for name in names if _keeps(answers, name)] or names
    most = max(_over(answers, name, "share_of_alone").mean for name in fair)
    good = [name for name in fair if _over(answers, name, "share_of_alone").mean >= 0.98 * most]
    return min(good, key=lambda name: _reclaims(answers, name))


def _keeps(answers: Sequence[Answer], name: str) -> bool:
    return all(
        interval([increase_of(metric, quantile)(one.summaries[name]) for one in answers]).high <= mark
        for metric, quantile, mark in LATENCY_MARKS
    )


def _over(answers: Sequence[Answer], name: str, figure: str) -> Interval:
    return interval([getattr(one.summaries[name], figure) for one in answers])


def _reclaims(answers: Sequence[Answer], name: str) -> int:
    return max(max(one.summaries[name].reclaims_by_hour) for one in answers)


def _row(name: str, answers: Sequence[Answer], is_best: bool) -> tuple[Cell, ...]:
    saved = _over(answers, name, "share_of_alone")
    increases = [
        interval([increase_of(metric, quantile)(one.summaries[name]) for one in answers]).mean
        for metric, quantile, _ in LATENCY_MARKS
    ]
    worst = max(one.summaries[name].max_preemptions for one in answers)
    return (name, "*" if is_best else "", saved.mean, saved.low, saved.high, *increases, worst,
            _reclaims(answers, name))  # fmt: skip


def _advice(tuning: Tuning, answers: Sequence[Answer], best: str, handles: int) -> tuple[tuple[Cell, ...], ...]:
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


def _curves(answers: Sequence[Answer]) -> Mapping[str, list[tuple[float, float]]]:
    return {
        f"headroom to {share:.0%} of the pool": [
            (target, _over(answers, f"target {target:g}/h, headroom to {share:.0%}", "share_of_alone").mean)
            for target in TARGETS
        ]
        for share in HEADROOM_SHARES
    }
