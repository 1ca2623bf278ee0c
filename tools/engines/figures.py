"""What `make demo-vllm` has measured, in words and as a table."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

METRICS = ("mean_ttft_ms", "p99_ttft_ms", "mean_tpot_ms", "p99_tpot_ms")


@dataclass(slots=True, kw_only=True)
class Batch:
    """One run of the batch file."""

    seconds: float
    tokens: dict[str, list[str]]  # custom id -> what was answered


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
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


def share(looks: list[Look]) -> Share:
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


def events(folder: Path) -> dict[str, int]:
    """How often valved said what."""
    counts: dict[str, int] = {}
    for line in (folder / "valved.log").read_text(errors="replace").splitlines():
        if line.startswith("{"):
            name = str(json.loads(line).get("event", ""))
            counts[name] = counts.get(name, 0) + 1
    return counts


def show(
    console: Console, benches: list[dict[str, Any]], said: dict[str, int], undisturbed: Batch, ours: Batch
) -> bool:
    table = Table(title="online latency by vLLM's benchmark client")
    for column in ("condition", *METRICS, "stops"):
        table.add_column(column, justify="right" if column != "condition" else "left")
    for bench in benches:
        cells = [f"{bench[name]:.1f}" for name in METRICS]
        table.add_row(bench["condition"], *cells, str(bench["stops"]))
    console.print(table)
    outlived = all(bench["outlived"] for bench in benches)
    console.print(f"the batch worked during the whole of each benchmark beside it: {outlived}")
    for bench in benches:
        if bench.get("idle tokens/s"):
            console.print(progress(bench["share"], bench["idle tokens/s"]))
    once = {name: len(answers) for name, answers in ours.tokens.items()} == dict.fromkeys(undisturbed.tokens, 1)
    same = sum(ours.tokens.get(name) == answer for name, answer in undisturbed.tokens.items())
    console.print(f"batch: {len(ours.tokens)} of {len(undisturbed.tokens)} requests answered, each once: {once}")
    console.print(f"       {same} of {len(undisturbed.tokens)} answers identical to the undisturbed run")
    console.print(f"       {undisturbed.seconds:.0f} s undisturbed, {ours.seconds:.0f} s with Valve, start-up included")
    told = {name: said.get(name, 0) for name in ("reclaimed", "lent", "gate", "wake") if said.get(name)}
    console.print(f"valved: {told}")
    return outlived and once and same == len(undisturbed.tokens)


def progress(share: Share, idle_rate: float) -> str:
    """What the batch made of the time in which no online request was open."""
    rate = share.tokens / max(share.seconds, 1e-9)
    could = idle_rate * share.idle_s
    return (
        f"with Valve: online idle {share.idle_s:.1f} of {share.seconds:.1f} s, offline allowed to run"
        f" {share.ran_s:.1f} s; {rate:.0f} offline tokens/s, {idle_rate:.0f} beside an idle neighbour:"
        f" {100 * share.tokens / max(could, 1e-9):.0f} % of what the idle time was worth"
    )


def report(arguments: str, figures: str) -> str:
    cores, load = os.cpu_count(), os.getloadavg()
    lines = [
        "# Two real vLLM on one emulated GPU",
        "",
        f"Written by `make demo-vllm DEMO_ARGS='{arguments}'` on {cores} cores; load {load[0]:.1f} in the last minute,",
        f"{load[2]:.1f} in the last fifteen. Model steps are computed by the CPU: latencies compare the conditions of",
        "this run with each other and say nothing of a GPU.",
        "",
        "```",
        *(line.rstrip() for line in figures.splitlines()),
        "```",
        "",
    ]
    return "\n".join(lines)
