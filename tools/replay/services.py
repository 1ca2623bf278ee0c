"""`valve replay whatif --requests FOLDER`: one page for many services, each under the product's default settings.

No settings are searched for, so a service costs three short simulations where one by itself costs seventeen. A worker
reads the file that it judges: a week of requests takes as long to read as to simulate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from valve_tools.replay.question import Question, bound_of, machine_of, trace_of
from valve_tools.replay.report import Cell, Report, ReportTable
from valve_tools.replay.store import TaskStore
from valve_tools.replay.whatif import SeedAnswer, WhatifTask, refusals, run_task
from valve_tools.replay.work import TellProgress, Workers, spread
from valve_tools.sim.machine import Settings
from valve_tools.sim.metrics import interval
from valve_tools.sim.sample import RULE
from valve_tools.sim.traces import TraceError

DEFAULTS = "defaults"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceFile:
    """One file of the folder; without answers where it tells too little to judge."""

    name: str
    requests: int = 0
    hours: float = 0.0
    of_hours: float = 0.0
    """How long the load lasts of which so many hours were judged."""
    answers: tuple[SeedAnswer, ...] = ()
    why_not: tuple[str, ...] = ()

    @property
    def saved(self) -> float:
        return interval([one.summaries[DEFAULTS].share_of_alone for one in self.answers]).mean if self.answers else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One file to judge. What is kept of it is named by what it holds, not by its path."""

    path: Path
    question: Question
    settings: Settings
    seeds: tuple[int, ...]
    store: TaskStore


def run(question: Question, seeds: Sequence[int], progress: TellProgress, workers: Workers | None = None) -> Report:
    settings, workers = machine_of(question), workers or Workers()
    asks = [
        Ask(path=path, question=question, settings=settings, seeds=tuple(seeds), store=workers.store)
        for path in files_of(question)
    ]
    services = spread(judge, asks, progress, replace(workers, store=TaskStore(folder=None)), label="whatif")
    return report(question, settings.gpu.name, services, seeds)


def judge(ask: Ask) -> ServiceFile:
    path, question = ask.path, replace(ask.question, requests=ask.path)
    try:
        bound = bound_of(question, trace_of(question, ask.seeds[0]))
    except TraceError as error:
        return ServiceFile(name=path.name, why_not=(str(error).removeprefix(f"{path}: "),))
    tasks = [WhatifTask(bound=bound, settings=ask.settings, seed=seed, is_brief=True) for seed in ask.seeds]
    answers = tuple(ask.store.run(run_task, task) for task in tasks)
    return ServiceFile(
        name=path.name,
        requests=bound.trace.requests,
        hours=bound.seconds / 3600,
        of_hours=(bound.trace.sample.of_s if bound.trace.sample else bound.seconds) / 3600,
        answers=answers,
        why_not=tuple(refusals(answers, DEFAULTS)),
    )


def files_of(question: Question) -> list[Path]:
    if question.requests is None or question.prometheus is not None or question.replicas != 1:
        raise TraceError("a folder of services goes with --requests alone: one file is one replica")
    files = sorted(path for path in question.requests.iterdir() if path.name.endswith((".csv", ".csv.gz")))
    if not files:
        raise TraceError(f"{question.requests}: holds no .csv and no .csv.gz")
    return files


def report(question: Question, gpu: str, services: Sequence[ServiceFile], seeds: Sequence[int]) -> Report:
    good = [one for one in services if not one.why_not]
    ordered = sorted(services, key=lambda one: (bool(one.why_not), -one.saved, one.name))
    return Report(
        name="whatif",
        title=f"What Valve would give on {len(services)} services",
        summary=(
            f"{question.online} online and {question.offline} offline on {question.tp} {gpu} for each replica, "
            f"default settings. {RULE}",
            f"{len(good)} of {len(services)} services would save {sum(one.saved for one in good):.1f} GPUs, one "
            "replica of each; the others should not share (docs/when-not.md). "
            "A service by itself (--requests FILE) gets its best settings, too.",
        ),
        tables=(
            ReportTable(
                title="Services",
                columns=("service", "requests", "hours", "of hours", "idle %", "GPUs saved",
                         "own GPU: TTFT ms mean", "P99", "with Valve: TTFT ms mean", "P99", "TPOT % mean", "verdict"),
                rows=tuple(_row(one) for one in ordered),
            ),
        ),
        data={"services": [asdict(one) for one in services]},
        seeds=tuple(seeds),
        input={"requests": sum(one.requests for one in services)},
    )  # fmt: skip


def _row(one: ServiceFile) -> tuple[Cell, ...]:
    verdict = "share" if not one.why_not else "DO NOT USE VALVE HERE: " + "; ".join(one.why_not)
    if not one.answers:
        return (one.name, *[None] * 10, verdict)

    def mean(figures: Sequence[float]) -> float:
        return interval(list(figures)).mean

    def valve(which: str, quantile: str) -> Any:
        return mean([getattr(answer.summaries[DEFAULTS], which)[quantile] for answer in one.answers])

    return (
        one.name,
        one.requests,
        one.hours,
        one.of_hours,
        100 * mean([answer.idle_share for answer in one.answers]),
        one.saved,
        *(mean([answer.alone_ms["ttft own"][quantile] for answer in one.answers]) for quantile in ("mean", "p99")),
        *(valve("ttft_ms", quantile) for quantile in ("mean", "p99")),
        valve("own_tpot_increase", "mean"),
        verdict,
    )
