"""`valve demo granted`: a busy service that is ahead of its stated target, without its owner's consent and with it.

The same requests both times, beside the same offline job. Without consent the job gets the time in which no request is
open; with it, pauses between two steps as well, as long as each request keeps its target. The first requests only teach
the service's hook that it keeps the target alone, so the figures are those of the requests after them; only of the
gaps between two tokens all are judged.

Of a gap between two tokens the time in which this machine stood still is not counted, except while the hook meant to
pause: that made the gap no longer. A gap may be as long as stated, and longer by what no watcher of this machine can
see. A round (both runs) is VOID, neither a pass nor a failure, where stalls made many gaps too long; where a gap took
no longer too long than one that nothing paused in the same round; where a request missed the target only by a stall, or
without any pause, too; or where pauses brought offline work nothing. Such a round is made again, up to a bound. If all
are VOID the exit code is 3.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from rich import box
from rich.console import Console
from rich.table import Table
from valve_hook.policy.misses import MissSettings
from valve_kube.options import more_than_none, option, whole
from valve_tools.bench.row import percentile
from valve_tools.demo.endings import EXIT_VOID
from valve_tools.demo.figures import units_between
from valve_tools.demo.node import VALVE, EmulatedNode, NodeError
from valve_tools.demo.rounds import OFFLINE, last_summary
from valve_tools.demo.stalls import LATE_NS, Span, Stalls, StallWatch, outside
from valve_tools.emulator.node import Options

from valved.model.rungs import Rung

UNIT_US = 2000  # GPU time of one unit of offline work
DRIVER = "580.159.04"  # of the emulated card
TRIAL = MissSettings().trial
MOST_OVER = 0.01  # promise P10, where the service alone misses next to nothing
MOST_SPOILT = 0.1  # of the gaps with a pause in them
UNSEEN_MS = LATE_NS / 1e6  # a machine that stands still no longer is not seen to


class Promise(Protocol):
    @property
    def tpot_ms(self) -> float: ...
    @property
    def gap_ms(self) -> float: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class GrantedPlan:
    """The defaults take two minutes a round."""

    requests: int = 220
    rate: float = 5.0
    tpot_ms: float = 40.0
    gap_ms: float = 100.0
    seed: int = 1
    rung: str = "gate"
    rounds: int = 5  # at most
    hasty: bool = False  # the figures are those of all requests, and pauses are asked for from the first on

    def service(self) -> list[str]:
        numbers = ["--requests", str(self.requests), "--rate", str(self.rate), "--seed", str(self.seed), "--stay"]
        return [sys.executable, "-m", "valve_tools.demo.granted_service", *numbers, *["--hasty"][: self.hasty]]

    def config(self) -> str:
        """Of the node."""
        return f'[granted]\nrung = "{self.rung}"\nprobed_driver = "{DRIVER}"\n'


def launch(name: str, plan: Promise, *, consents: bool) -> list[str]:
    """How an owner starts a service that states a target, up to the service's own command."""
    slo = f"tpot={plan.tpot_ms:g}ms,gap={plan.gap_ms:g}ms"
    words = ["--slo", slo, "--grant" if consents else "--no-grant"]
    return [str(VALVE), "run", "--online", "--name", name, *words, "--"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GrantedFigures:
    """What came of one of the two."""

    consents: bool
    words: str  # of valve status
    requests: int
    tpots_ms: list[float]
    stood_ms: list[float]  # how long this machine stood still for each, per token
    stood_share: float  # of the whole time
    ttft_p99_ms: float
    tpot_ms: float
    tpot_p99_ms: float
    longest_ms: float  # between two tokens
    longest_plain_ms: float  # less the steps of prompts, and what a core stood still outside of pauses
    gaps: int  # of all requests, the first ones, too: no pause may be too long
    gaps_paused: int  # with a pause in them
    gaps_spoilt: int  # of these: too long only with what a core stood still
    offline_share: float  # of its rate with the GPU to itself
    grants: int
    pauses: int  # as the hook counts them: on the rung timeslice one grant holds many
    broken: int
    granted_s: float
    cost_ms: float | None
    worth: float | None
    offline_ok: bool

    def missed(self, plan: GrantedPlan) -> int:
        return sum(ms > plan.tpot_ms for ms in self.tpots_ms)

    def explained(self, plan: GrantedPlan) -> int:
        """Of the requests that missed, those that had not without what this machine stood still."""
        both = zip(self.tpots_ms, self.stood_ms, strict=True)
        return sum(plan.tpot_ms < ms <= plan.tpot_ms + stood for ms, stood in both)

    def is_too_many(self, missed: int) -> bool:
        return missed > MOST_OVER * self.requests + 1

    def wrongs(self) -> list[str]:
        """What no machine can make."""
        found = []
        if not self.offline_ok:
            found.append("the offline checksum is wrong")
        if not self.consents and self.grants:
            found.append("time was granted without consent")
        return found


class GrantedDemo:
    """One node on one emulated GPU."""

    def __init__(self, node: EmulatedNode, plan: GrantedPlan) -> None:
        self.node, self.plan = node, plan

    def offline_rate(self, seconds: float = 2.0) -> float:
        out = self.node.folder / "offline-alone.out"
        argv = [str(OFFLINE), "--unit-us", str(UNIT_US), "--duration", str(seconds)]
        self.node.run("", argv, name="offline-alone", out=out).wait()
        summary = last_summary(out)
        return summary["units"] / summary["wall_s"]

    def run(self, *, consents: bool, rate: float) -> GrantedFigures:
        node, tag = self.node, "with" if consents else "without"
        job_out, out = node.folder / f"{tag}.offline.out", node.folder / f"{tag}.online.out"
        valved = node.start_valved()
        job = node.run(
            "offline", [str(OFFLINE), "--unit-us", str(UNIT_US), "--report", "0.1"], name="batch", out=job_out
        )
        node.wait_for(lambda: b"units" in job_out.read_bytes(), "the offline job works")
        argv = [*launch("chat", self.plan, consents=consents), *self.plan.service()]
        child = node.run("", argv, name=f"chat-{tag}", out=out)
        with StallWatch(valved.pid) as watch:  # and asks valved nothing: that would be work of its own
            node.wait_for(lambda: child.poll() is not None or b"\n{" in b"\n" + out.read_bytes(), "the summary", 3600)
        seen = [each.granted for each in node.status().services if each.name == "chat"]
        os.kill(child.pid, signal.SIGTERM)
        child.wait()
        os.kill(job.pid, signal.SIGTERM)
        job.wait()
        node.stop_valved()
        if child.returncode or not seen:
            raise NodeError(f"the service ended with {child.returncode}: {out.read_text()[-500:]}")
        summary = json.loads(out.read_text().splitlines()[-1])
        return self._figures(seen[0], summary, job_out, consents, rate, watch.stalls)

    def _figures(
        self, granted: Any, summary: dict[str, Any], job_out: Path, consents: bool, rate: float, stalls: Stalls
    ) -> GrantedFigures:
        rows = every = sorted(summary["requests"], key=lambda row: row["arrived_s"])
        begin = 0 if self.plan.hasty else min(2 * TRIAL, len(rows) // 2)
        rows, tokens = rows[begin:], [row["tpot_ms"] for row in rows[begin:]]
        begin_ns, end_ns = min(row["first_ns"] for row in rows), max(row["last_ns"] for row in rows)
        both = [gap for row in every for gap in zip(row["gaps"], row["pauses"], strict=True)]
        gaps, paused = ([judged(stalls, *gap) for gap in kept] for kept in (both, [gap for gap in both if gap[1]]))
        most_ns = (self.plan.gap_ms + UNSEEN_MS) * 1e6
        start_s, end_s = rows[0]["arrived_s"], rows[-1]["arrived_s"]
        units = units_between(job_out.read_text().splitlines(), start_s, end_s)
        return GrantedFigures(
            consents=consents,
            words=granted.words,
            requests=len(rows),
            tpots_ms=tokens,
            stood_ms=[stood_in(row, stalls) for row in rows],
            stood_share=stalls.within(begin_ns, end_ns) / (end_ns - begin_ns),
            ttft_p99_ms=percentile(sorted(row["ttft_ms"] for row in rows), 0.99),
            tpot_ms=sum(tokens) / len(tokens),
            tpot_p99_ms=percentile(sorted(tokens), 0.99),
            longest_ms=max(row["longest_ms"] for row in rows),
            longest_plain_ms=max((gap - stood for gap, stood in gaps), default=0) / 1e6,
            gaps=len(gaps),
            gaps_paused=len(paused),
            gaps_spoilt=sum(gap - stood <= most_ns < gap for gap, stood in paused),
            offline_share=units / (end_s - start_s) / rate,
            grants=granted.grants,
            pauses=summary["given"],
            broken=granted.broken,
            granted_s=granted.granted_ns / 1e9,
            cost_ms=summary["cost_ms"],
            worth=summary["worth"],
            offline_ok=bool(last_summary(job_out)["ok"]),
        )


def judged(stalls: Stalls, gap: list[Span], pauses: list[Span]) -> tuple[int, int]:
    """How long a gap took, and how long a core stood still in it while nothing meant to pause."""
    return sum(end - begin for begin, end in gap), stalls.in_all(outside(gap, pauses))


def stood_in(row: dict[str, Any], stalls: Stalls) -> float:
    """The same of a whole request with its prompts, in ms a token."""
    pauses = [pause for within in row["pauses"] for pause in within]
    tokens: int = max(1, row["made"] - 1)
    return stalls.in_all(outside([(row["first_ns"], row["last_ns"])], pauses)) / tokens / 1e6


def perform(plan: GrantedPlan, folder: Path) -> list[GrantedFigures]:
    """One round: without consent and with it."""
    folder.mkdir(exist_ok=True)
    with EmulatedNode(folder, options=Options(), config=plan.config()) as node:
        demo = GrantedDemo(node, plan)
        rate = demo.offline_rate()
        return [demo.run(consents=consents, rate=rate) for consents in (False, True)]


def misses(runs: list[GrantedFigures], plan: GrantedPlan) -> list[tuple[str, str]]:
    """What was not kept, each with the reason why this machine says nothing about it; no reason: Valve missed it."""
    without, consenting, found = runs[0], runs[-1], []
    alone = "without any pause, too" if without.is_too_many(without.missed(plan)) else ""
    if not consenting.grants:  # rightly: valved grants nothing that this machine could make too late
        share = f"this machine stood still for {consenting.stood_share:.0%} of the time"
        found.append(("nothing was granted with consent", share if consenting.stood_share > MOST_OVER else ""))
    elif consenting.offline_share <= without.offline_share:  # rightly: a pause that costs too much is not worth it
        cost = f"one of {consenting.grants} grants cost {consenting.cost_ms or 0:.0f} ms on this machine"
        found.append(("offline work got no more with consent", cost))
    for run in runs:
        missed, explained = run.missed(plan), run.explained(plan)
        if run.is_too_many(missed):
            stood = "" if run.is_too_many(missed - explained) else f"{explained} only while this machine stood still"
            found.append((f"{missed} of {run.requests} requests missed {plan.tpot_ms:g} ms a token", alone or stood))
    found += gap_misses(without, consenting, plan)
    return found


def gap_misses(without: GrantedFigures, consenting: GrantedFigures, plan: GrantedPlan) -> list[tuple[str, str]]:
    """A prompt delays requests that decode, with consent and without. Less that no gap may be longer than stated. That
    bound is the same on any machine; what a machine can do is only to say nothing.
    """
    found, spoilt, paused = [], consenting.gaps_spoilt, consenting.gaps_paused
    if spoilt > MOST_SPOILT * paused:
        found.append((f"{spoilt} of {paused} gaps with a pause were too long", "this machine stood still in them"))
    over_ms = consenting.longest_plain_ms - plan.gap_ms - UNSEEN_MS
    if over_ms <= 0:
        return found
    late_ms = without.longest_plain_ms - without.tpot_ms
    miss = f"{consenting.longest_plain_ms:.0f} ms between two tokens, less prompts; {plan.gap_ms:.0f} ms are stated"
    alone = f"a token that nothing paused came {late_ms:.0f} ms late on this machine, too"
    return [*found, (miss, alone if over_ms <= late_ms else "")]


def verdict(runs: list[GrantedFigures], plan: GrantedPlan) -> tuple[int, list[str]]:
    """The exit code, and why."""
    wrongs, missed = [wrong for run in runs for wrong in run.wrongs()], misses(runs, plan)
    words = [f"VOID: {miss}: {why}" if why else miss for miss, why in missed]
    if wrongs or any(not why for _, why in missed):
        return 1, wrongs + words
    return (EXIT_VOID if missed else 0), words


def settled(plan: GrantedPlan, make: Callable[[int], list[GrantedFigures]]) -> tuple[int, list[GrantedFigures], str]:
    """Makes rounds, each judged by itself, until one is not VOID. The exit code, that round, and what to say of all."""
    runs, code, number = [], EXIT_VOID, 0
    while code == EXIT_VOID and number < plan.rounds:
        number += 1
        print(
            f"valve demo granted: round {number} of at most {plan.rounds} begins", file=sys.stderr
        )  # it takes minutes
        runs = make(number)
        code, problems = verdict(runs, plan)
        for problem in problems:
            print(f"valve demo granted: round {number} of at most {plan.rounds}: {problem}", file=sys.stderr)
    word = {0: "kept", EXIT_VOID: "VOID"}.get(code, "MISSED")
    again = f"; rounds made again because this machine spoilt them: {number - 1}"
    return code, runs, f"{word}, by round {number} of at most {plan.rounds}{again}"


def show(runs: list[GrantedFigures], plan: GrantedPlan) -> None:
    console = Console()
    title = f"A service that promises {plan.tpot_ms:g} ms a token; times in ms"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))  # a terminal has 80
    times = ("TPOT", "p99", "over\ntarget", "gap", "with\nprompt", "TTFT\np99")
    columns = ("consent", *times, "pauses", "granted", "offline")
    for name in columns:
        table.add_column(name, justify="left" if name == "consent" else "right")
    for run in runs:
        table.add_row(
            "yes" if run.consents else "no",
            f"{run.tpot_ms:.1f}",
            f"{run.tpot_p99_ms:.1f}",
            f"{run.missed(plan)}/{run.requests}",
            f"{run.longest_plain_ms:.0f}",
            f"{run.longest_ms:.0f}",
            f"{run.ttft_p99_ms:.1f}",
            str(run.pauses),
            f"{run.granted_s:.1f} s",
            f"{run.offline_share:.0%}",
        )
    console.print(table)
    for run in runs:
        console.print(f"valve status: {run.words}")
    console.print("Offline: its rate while requests came, as a share of its rate with the GPU to itself.")
    console.print(
        f"gap: the longest time between two tokens, without and with prompts in it ({plan.gap_ms:g} ms stated)."
    )
    consenting = runs[-1]
    console.print(f"{consenting.gaps_paused} of {consenting.gaps} gaps hold a pause. Time in which this machine stood")
    more = f"{consenting.gaps_spoilt} more of them were too long"
    console.print(f"still outside of pauses is not counted; with it {more}.")
    if consenting.cost_ms is not None and consenting.worth is not None:
        points = f"{100 * consenting.worth:.0f} points of a GPU"
        console.print(f"One pause cost {consenting.cost_ms:.2f} ms; the hook expected {points}.")


def main(argv: list[str]) -> int:
    usual = GrantedPlan()
    parser = argparse.ArgumentParser(prog="valve demo granted", description=__doc__)
    option(parser, "--requests", usual.requests, "The number of requests.", type=whole(1))
    option(parser, "--rate", usual.rate, "The online requests a second.", type=more_than_none)
    option(
        parser,
        "--tpot-ms",
        usual.tpot_ms,
        "The target that the service states for each further token, in milliseconds.",
        type=more_than_none,
    )
    gap = "The longest gap between two tokens that the service states, in milliseconds."
    option(parser, "--gap-ms", usual.gap_ms, gap, type=more_than_none)
    option(parser, "--rung", usual.rung, "How pauses are given.", choices=[rung.value for rung in Rung])
    option(parser, "--seed", usual.seed, "The seed of the drawn requests.")
    rounds = "How often a round is made at most; one that this machine spoilt is made again."
    option(parser, "--rounds", usual.rounds, rounds, type=whole(1))
    parser.add_argument("--json", action="store_true", help="Print the figures as JSON.")
    options = parser.parse_args(argv)
    plan = GrantedPlan(
        requests=options.requests, rate=options.rate, tpot_ms=options.tpot_ms, gap_ms=options.gap_ms,
        seed=options.seed, rung=options.rung, rounds=options.rounds,
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="valve-demo-") as scratch:
        code, runs, words = settled(plan, lambda number: perform(plan, Path(scratch) / str(number)))
    if options.json:
        print(json.dumps([asdict(run) for run in runs]))
    else:
        show(runs, plan)
    print(f"valve demo granted: {words}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
