"""`make demo-granted-vllm`: a real vLLM ahead of its stated target, beside another that works through a batch.

The same requests come in pairs of rounds, without the owner's consent and with it, beside the same batch, on one
emulated GPU and under the product's own binaries. Judged are counts: grants, requests over the target, answers. The
answers of both sides are compared with those of engines that nothing paused.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from valve_hook.policy.misses import MissSettings
from valve_kube.options import option, whole
from valve_tools.bench.row import percentile
from valve_tools.demo.endings import EXIT_VOID, DemoError, perform
from valve_tools.demo.granted import DRIVER, MOST_OVER, launch
from valve_tools.engines.figures import RuleResult
from valve_tools.engines.sides import CONFIG, STEP_US, Sides, add_options, ending, has_engines, started

from valved.model.rungs import Rung

POOL_MIB = 256  # both KV caches and more: no memory moves
PROMPTS, PROMPT_TOKENS = 11, 24
JUDGED = """\
ok: no time without consent, pauses with it, at most 1 % (and one) over the target, the batch faster with consent, all
answers those of undisturbed engines. VOID: without consent, too, this server misses its target on this machine, or a
batch was over before the requests."""
UNSEEN = MissSettings().trial + 12  # requests that only teach the hook that the service keeps its target


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmGrantPlan:
    rounds: int = 2
    requests: int = 110
    rate: float = 8.0
    tokens: int = 12
    tpot_ms: float = 150.0
    gap_ms: float = 400.0
    batch: int = 160


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamedAnswer:
    prompt: int
    text: str
    tpot_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmRound:
    """One condition of one round, of the requests after the first."""

    consents: bool
    answers: list[StreamedAnswer]
    grants: int
    broken: int
    granted_s: float
    batch_tokens_s: float
    outlived: bool
    """The batch had work all the while."""

    def over(self, plan: VllmGrantPlan) -> int:
        return sum(answer.tpot_ms > plan.tpot_ms for answer in self.answers)


@dataclass(slots=True, kw_only=True)
class VllmGrantOutcome:
    pairs: list[tuple[VllmRound, VllmRound]] = field(default_factory=list)
    """Without consent and with it."""
    batches: list[dict[str, list[str]]] = field(default_factory=list)
    undisturbed: dict[str, list[str]] = field(default_factory=dict)

    def wrongs(self) -> list[str]:
        """What must never be, on however noisy a machine: time without consent, another answer."""
        found = [
            f"round {number}: time was granted without consent"
            for number, (without, _) in enumerate(self.pairs, 1)
            if without.grants
        ]
        texts: dict[int, set[str]] = {}
        for answer in (answer for pair in self.pairs for served in pair for answer in served.answers):
            texts.setdefault(answer.prompt, set()).add(answer.text)
        changed = sum(len(each) > 1 for each in texts.values())
        if changed:
            found.append(f"{changed} of {len(texts)} prompts were not answered the same every time")
        for number, batch in enumerate(self.batches, 1):
            other = sum(batch.get(name) != text for name, text in self.undisturbed.items())
            if other or len(batch) != len(self.undisturbed):
                found.append(f"batch {number}: {other} answers are not those of an undisturbed one")
        return found

    def doubts(self, plan: VllmGrantPlan) -> list[str]:
        """Why this machine says nothing about the rest."""
        found = []
        for number, (without, with_it) in enumerate(self.pairs, 1):
            if without.over(plan) > MOST_OVER * len(without.answers) + 1:
                found.append(f"round {number}: {without.over(plan)} requests are over the target without any grant")
            if not (without.outlived and with_it.outlived):
                found.append(f"round {number}: the batch was over before the requests")
        return found

    def misses(self, plan: VllmGrantPlan) -> list[str]:
        found = []
        for number, (without, with_it) in enumerate(self.pairs, 1):
            if not with_it.grants:
                found.append(f"round {number}: nothing was granted with consent")
            if with_it.over(plan) > MOST_OVER * len(with_it.answers) + 1:
                found.append(f"round {number}: {with_it.over(plan)} requests over the target with consent")
            if with_it.batch_tokens_s <= without.batch_tokens_s:
                found.append(f"round {number}: the batch was no faster with consent")
        return found

    def verdict(self, plan: VllmGrantPlan) -> RuleResult:
        if self.wrongs():
            return RuleResult.BROKEN
        if self.doubts(plan):
            return RuleResult.VOID
        return RuleResult.BROKEN if self.misses(plan) else RuleResult.KEPT


@dataclass(slots=True, kw_only=True)
class VllmGrantDemo:
    sides: Sides
    plan: VllmGrantPlan
    say: Callable[[str], None]
    outcome: VllmGrantOutcome = field(default_factory=VllmGrantOutcome)

    def perform(self) -> None:
        self.say(f"{self.plan.rounds} rounds of two servers each, about two minutes a server")
        self.sides.prepare()
        requests = self.sides.write_requests(self.plan.batch)[0]
        for number in range(self.plan.rounds):
            order = (False, True) if number % 2 == 0 else (True, False)
            served = {consents: self.serve(requests, consents=consents) for consents in order}
            self.outcome.pairs.append((served[False], served[True]))
        self.say("the batch once more, without Valve")
        alone = self.sides.start_batch("", "undisturbed", requests)
        self.outcome.undisturbed = self.sides.finish(alone, "undisturbed").tokens

    def serve(self, requests: Path, *, consents: bool) -> VllmRound:
        """The batch starts when the hook has seen the service keep its target: an idle card ends it in no time."""
        sides, plan, name = self.sides, self.plan, f"batch-{len(self.outcome.batches)}"
        self.say(f"a server whose owner {'consents' if consents else 'does not consent'}")
        command = sides.command("serve", *sides.engine_flags(), "--port", str(sides.port))
        argv = [*launch("server", plan, consents=consents), *command]
        server = sides.node.run("", argv, name="server", env=sides.environment())
        with ending(server):
            sides.wait_for_server(server)
            clients = OpenClients(port=sides.port, plan=plan)
            clients.send(UNSEEN)
            self.say("a batch under Valve")
            batch = sides.start_batch("offline", name, requests)
            sides.wait_for_work(batch, name)
            sides.wait_for_tokens(batch, name)
            self.say(f"{plan.requests} requests beside it")
            served = self.judged(clients, name, batch, consents=consents)
            self.say("waiting for the batch to end")
            self.outcome.batches.append(sides.finish(batch, name).tokens)
        return served

    def judged(self, clients: OpenClients, name: str, batch: subprocess.Popen[bytes], *, consents: bool) -> VllmRound:
        begun_s, before = time.monotonic(), self.tokens(name)
        answers = clients.send(self.plan.requests)
        passed_s, granted = time.monotonic() - begun_s, self.sides.services()["server"].granted
        return VllmRound(
            consents=consents,
            answers=answers,
            grants=granted.grants,
            broken=granted.broken,
            granted_s=granted.granted_ns / 1e9,
            batch_tokens_s=(self.tokens(name) - before) / passed_s,
            outlived=batch.poll() is None,
        )

    def tokens(self, name: str) -> int:
        """0 when the batch is over: then nothing is judged."""
        batch = self.sides.services().get(name)
        return int(batch.useful_tokens) if batch is not None else 0


class OpenClients:
    """They come when they will, the same for each server."""

    def __init__(self, *, port: int, plan: VllmGrantPlan) -> None:
        self._port, self._plan = port, plan
        self._chance = random.Random(5)
        self._prompts = [[self._chance.randrange(10, 900) for _ in range(PROMPT_TOKENS)] for _ in range(PROMPTS)]

    def send(self, count: int) -> list[StreamedAnswer]:
        answers: list[StreamedAnswer] = []
        threads = []
        for number in range(count):
            time.sleep(self._chance.expovariate(self._plan.rate))
            threads.append(threading.Thread(target=self._ask, args=(number % PROMPTS, answers), daemon=True))
            threads[-1].start()
        for thread in threads:
            thread.join()
        if len(answers) != count:
            raise DemoError(
                f"{count - len(answers)} of {count} requests failed. With --keep FOLDER the server's log stays"
            )
        return answers

    def _ask(self, prompt: int, answers: list[StreamedAnswer]) -> None:
        body = {
            "model": "tiny", "prompt": self._prompts[prompt], "max_tokens": self._plan.tokens, "temperature": 0.0,
            "ignore_eos": True, "stream": True,
        }  # fmt: skip
        request = urllib.request.Request(
            f"http://127.0.0.1:{self._port}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        text, came_s = "", []
        with urllib.request.urlopen(request, timeout=600) as stream:
            for line in stream:
                if line.startswith(b"data: {"):
                    came_s.append(time.monotonic())
                    text += json.loads(line[6:])["choices"][0]["text"]
        tpot_ms = 1e3 * (came_s[-1] - came_s[0]) / max(1, self._plan.tokens - 1)
        answers.append(StreamedAnswer(prompt=prompt, text=text, tpot_ms=tpot_ms))


def show(console: Console, outcome: VllmGrantOutcome, plan: VllmGrantPlan) -> RuleResult:
    title = f"A vLLM that promises {plan.tpot_ms:g} ms a token; times in ms, the batch in tokens/s"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))  # a terminal has 80
    for name in ("round", "consent", "TPOT", "p99", "over\ntarget", "grants", "broken", "granted", "batch"):
        table.add_column(name, justify="left" if name == "consent" else "right")
    for number, pair in enumerate(outcome.pairs, 1):
        for one in pair:
            tokens_ms = sorted(answer.tpot_ms for answer in one.answers)
            table.add_row(
                str(number),
                "yes" if one.consents else "no",
                f"{sum(tokens_ms) / len(tokens_ms):.1f}",
                f"{percentile(tokens_ms, 0.99):.1f}",
                f"{one.over(plan)}/{len(one.answers)}",
                str(one.grants),
                str(one.broken),
                f"{one.granted_s:.1f} s",
                f"{one.batch_tokens_s:.0f}",
            )
    console.print(table)
    console.print(f"Load of this machine: {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors.")
    verdict = outcome.verdict(plan)
    console.print("broken: the server launched into a pause, which ended it. batch: its rate while the requests came.")
    console.print(JUDGED)
    for line in (*outcome.wrongs(), *outcome.doubts(plan), *outcome.misses(plan)):
        console.print(line)
    console.print(f"[bold]{verdict.value}[/]")
    return verdict


def main() -> int:
    return perform("make demo-granted-vllm", play)


def play() -> int:
    usual = VllmGrantPlan()
    parser = argparse.ArgumentParser(prog="make demo-granted-vllm", description=__doc__)
    rounds = "The number of rounds. A round is one server without consent and one with it."
    option(parser, "--rounds", usual.rounds, rounds, type=whole(1))
    option(parser, "--requests", usual.requests, "The requests of each server that are judged.", type=whole(1))
    option(parser, "--batch", usual.batch, "The requests of each batch.", type=whole(1))
    option(parser, "--rung", Rung.GATE.value, "How pauses are given.", choices=[rung.value for rung in Rung])
    add_options(parser, port=18241)
    chosen = parser.parse_args()
    if not has_engines(chosen):
        return 2
    plan = VllmGrantPlan(rounds=chosen.rounds, requests=chosen.requests, batch=chosen.batch)
    console = Console()
    config = CONFIG.format(pool_mib=POOL_MIB, remap="helper")
    config += f'\n[granted]\nrung = "{chosen.rung}"\nprobed_driver = "{DRIVER}"\n'
    with started(chosen, config, STEP_US) as sides:
        demo = VllmGrantDemo(sides=sides, plan=plan, say=console.print)
        demo.perform()
    verdict = show(console, demo.outcome, plan)
    return {RuleResult.KEPT: 0, RuleResult.BROKEN: 1, RuleResult.VOID: EXIT_VOID}[verdict]


if __name__ == "__main__":
    raise SystemExit(main())
