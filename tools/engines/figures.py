"""What `make demo-vllm` has measured, in words and as tables."""

from __future__ import annotations

import enum
import os
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

from rich.console import Console
from rich.table import Table

METRICS = ("mean_ttft_ms", "p99_ttft_ms", "mean_tpot_ms", "p99_tpot_ms")
BOUNDS = {"mean_ttft_ms": 2.5, "p99_ttft_ms": 5.0, "mean_tpot_ms": 1.0, "p99_tpot_ms": 2.0}
"""Per cent that Valve may add to a service's latency."""
LEAST_PROGRESS = 0.8
FEWEST_ROUNDS = 5


@dataclass(slots=True, kw_only=True)
class BatchRun:
    """One run of a batch file."""

    seconds: float
    tokens: dict[str, list[str]]  # custom id -> what was answered


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusSample:
    """What valved said at one moment."""

    at_s: float
    is_open: bool  # the server has a request
    tokens: int  # of the batch, so far
    ran_s: float  # the batch was allowed to run, so far


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """The batch's part of one benchmark."""

    seconds: float
    idle_s: float  # no online request was open
    ran_s: float
    tokens: int


@dataclass(slots=True, kw_only=True)
class ClientRun:
    """One run of vLLM's benchmark client."""

    condition: str
    latency: dict[str, float]
    completed: int
    stops: int
    reclaims: int
    outlived: bool  # the batch beside it worked all the while
    share: Share
    idle_rate: float = 0.0  # tokens a second of that batch beside an idle server


@dataclass(slots=True, kw_only=True)
class EngineOutcome:
    """The whole demo."""

    benches: list[ClientRun] = field(default_factory=list)
    batches: list[BatchRun] = field(default_factory=list)  # under Valve: one part each
    undisturbed: BatchRun = field(default_factory=lambda: BatchRun(seconds=0.0, tokens={}))
    lost_tokens: int = 0

    def of(self, condition: str, metric: str) -> list[float]:
        return [bench.latency[metric] for bench in self.benches if bench.condition == condition]


def share(looks: list[StatusSample]) -> Share:
    """From the first request that was seen to the last."""
    opened = [place for place, look in enumerate(looks) if look.is_open]
    if not opened:
        return Share(seconds=0.0, idle_s=0.0, ran_s=0.0, tokens=0)
    window = looks[opened[0] : opened[-1] + 1]
    first, last = window[0], window[-1]
    idle_s = sum(after.at_s - look.at_s for look, after in pairwise(window) if not look.is_open)
    return Share(
        seconds=last.at_s - first.at_s,
        idle_s=idle_s,
        ran_s=last.ran_s - first.ran_s,
        tokens=last.tokens - first.tokens,
    )


class RuleResult(enum.Enum):
    KEPT = "ok"
    BROKEN = "NO"
    VOID = "VOID"
    """The machine was too noisy to say; run it again. Never a pass."""


MARKS = {True: RuleResult.KEPT, False: RuleResult.BROKEN, None: RuleResult.VOID}


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One metric, medians over the rounds; per cent of the median alone."""

    alone: float
    other: float
    spread: float  # between the runs alone

    @property
    def added(self) -> float:
        return 100 * (self.other / self.alone - 1)


def compare(outcome: EngineOutcome, condition: str, metric: str) -> Comparison:
    alone, other = outcome.of("alone", metric), outcome.of(condition, metric)
    middle = median(alone)
    return Comparison(alone=middle, other=median(other), spread=100 * (max(alone) - min(alone)) / middle)


def too_noisy(outcome: EngineOutcome) -> list[str]:
    """Metrics by which runs alone differ more than Valve may add: five of them span the median's interval (94 %)."""
    return [name for name in METRICS if compare(outcome, "Valve", name).spread > BOUNDS[name]]


def latency(outcome: EngineOutcome) -> RuleResult:
    """Within the bound, and worse without Valve; void where there are too few rounds or runs alone differ by more."""
    if len(outcome.of("alone", METRICS[0])) < FEWEST_ROUNDS or too_noisy(outcome):
        return RuleResult.VOID
    found = {metric: compare(outcome, "Valve", metric) for metric in METRICS}
    ungated = compare(outcome, "ungated", "mean_tpot_ms")
    holds = all(one.added <= BOUNDS[name] for name, one in found.items()) and ungated.added > BOUNDS["mean_tpot_ms"]
    return RuleResult.KEPT if holds else RuleResult.BROKEN


def progress(outcome: EngineOutcome) -> float | None:
    """What the batches made of the time in which no online request was open, of what that time was worth. None: no such
    time was seen."""
    beside = [bench for bench in outcome.benches if bench.condition == "Valve" and bench.share.idle_s > 0]
    could = sum(bench.idle_rate * bench.share.idle_s for bench in beside)
    return (sum(bench.share.tokens for bench in beside) / could if could > 0 else 0.0) if beside else None


def show(console: Console, outcome: EngineOutcome) -> RuleResult:
    console.print(runs(outcome))
    console.print(comparisons(outcome))
    beside = [bench for bench in outcome.benches if bench.condition == "Valve"]
    shares = [bench.share for bench in beside]
    reclaims = sum(bench.reclaims for bench in beside)
    done = progress(outcome)
    outlived = all(bench.outlived for bench in outcome.benches)
    answers = {name: answer for batch in outcome.batches for name, answer in batch.tokens.items()}
    once = {name: len(answer) for name, answer in answers.items()} == dict.fromkeys(outcome.undisturbed.tokens, 1)
    same = sum(answers.get(name) == answer for name, answer in outcome.undisturbed.tokens.items())
    total = len(outcome.undisturbed.tokens)
    noisy = ", ".join(too_noisy(outcome)) or "fewer than five rounds"
    judged = latency(outcome)
    worth = "of unknown worth" if done is None else f"{100 * done:.0f} % of what the idle time was worth"
    verdicts: dict[str, bool | None] = {
        f"offline progress {worth}: {sum(s.tokens for s in shares)} tokens"
        f" in {sum(s.idle_s for s in shares):.1f} idle of {sum(s.seconds for s in shares):.1f} s, allowed to run"
        f" {sum(s.ran_s for s in shares):.1f} s": None if done is None else done >= LEAST_PROGRESS,
        f"reclaims from the working batch: {reclaims}; {outcome.lost_tokens} tokens computed again": reclaims > 0,
        f"batch: {len(answers)} of {total} requests answered, each once: {once}": once,
        f"batch: {same} of {total} answers identical to the undisturbed run": total == same > 0,
    }
    why = f" (runs alone differ by more than the bound: {noisy})" if judged is RuleResult.VOID else ""
    console.print(f"{judged.value:4} latency with Valve within the bound, without it beyond{why}")
    for words, holds in verdicts.items():
        console.print(f"{MARKS[holds].value:4} {words}")
    if not outlived:
        console.print("VOID a batch ended before the benchmark beside it did: give it more --requests")
    if False in verdicts.values():
        return RuleResult.BROKEN
    return judged if outlived and done is not None else RuleResult.VOID


def runs(outcome: EngineOutcome) -> Table:
    table = Table(title="each run of vLLM's benchmark client, in order")
    for column in ("condition", *METRICS, "stops", "reclaims"):
        table.add_column(column, justify="right" if column != "condition" else "left")
    for bench in outcome.benches:
        cells = [f"{bench.latency[name]:.1f}" for name in METRICS]
        table.add_row(bench.condition, *cells, str(bench.stops), str(bench.reclaims))
    return table


def comparisons(outcome: EngineOutcome) -> Table:
    table = Table(title="medians over the runs of a condition, against alone")
    for column in ("metric", "alone", "Valve", "added", "bound", "alone against alone", "ungated", "added"):
        table.add_column(column, justify="right" if column != "metric" else "left")
    for metric in METRICS:
        ours, theirs = compare(outcome, "Valve", metric), compare(outcome, "ungated", metric)
        table.add_row(
            metric,
            f"{ours.alone:.1f}",
            f"{ours.other:.1f}",
            f"{ours.added:+.1f} %",
            f"{BOUNDS[metric]:+.1f} %",
            f"{ours.spread:.1f} %",
            f"{theirs.other:.1f}",
            f"{theirs.added:+.0f} %",
        )
    return table


def report(arguments: str, figures: str) -> str:
    cores, load = os.cpu_count(), os.getloadavg()
    lines = [
        "# Two real vLLM on one emulated GPU",
        "",
        f"Written by `make demo-vllm DEMO_ARGS='{arguments}'` on {cores} cores;",
        f"load {load[0]:.1f} in the last minute, {load[2]:.1f} in the last fifteen. A model step takes as long as",
        "the emulated card says (20 ms, and 0.2 ms a token); what is computed is computed by the CPU. Latencies",
        "compare the conditions of this run and say nothing of a GPU. Online: 384 tokens in, 24 out, arrivals in",
        "bursts (gamma, shape 0.4), the same in every run, a warm-up run left out. Offline: 70 to 110 tokens out,",
        "shared beginnings, at most 16 requests at a time. Prefix caching is on on both sides.",
        "A run is void, never a pass, where runs alone differ by more than the bound.",
        "",
        "```",
        *(line.rstrip() for line in figures.splitlines()),
        "```",
        "",
    ]
    return "\n".join(lines)
