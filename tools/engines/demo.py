"""`make demo-vllm`: a real vLLM answers requests while another works through a batch, on one emulated GPU with Valve.

The product's own binaries on both sides: preload library, engine plugin, valved. The two KV caches together do not
fit the pool, and the requests come in bursts, so memory has to move. Latency is measured by vLLM's own benchmark
client; the batch's tokens are compared with those of an undisturbed run. A model step lasts as long as the
emulated card says: what is compared is the card's time, not how two engines share this machine's processors.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from valve.v1 import node_pb2
from valve_kube.options import more_than_none, option, whole
from valve_tools.demo.endings import EXIT_VOID, perform
from valve_tools.demo.node import EmulatedNode
from valve_tools.engines.benchmark import Client
from valve_tools.engines.figures import METRICS, ClientRun, EngineOutcome, RuleResult, StatusSample, report, share, show
from valve_tools.engines.sides import CONFIG, POOL_MIB, STEP_US, Sides, add_options, ending, has_engines, started

from valved.model.ids import Remap

LOOK_S = 0.1
RATE_S = 5.0
ONLINE = ["--dataset-name", "random", "--random-input-len", "384", "--random-output-len", "24"]
ONLINE += ["--burstiness", "0.4", "--ignore-eos", "--percentile-metrics", "ttft,tpot", "--save-result"]


@dataclass(slots=True, kw_only=True)
class EngineDemo:
    """Alone and beside the batch in turn: Valve in every round, ungated twice in the first."""

    sides: Sides
    rounds: int
    requests: int
    prompts: int
    rate: float
    say: Callable[[str], None]
    outcome: EngineOutcome = field(default_factory=EngineOutcome)
    client: Client | None = None

    @property
    def node(self) -> EmulatedNode:
        return self.sides.node

    def perform(self) -> None:
        self.sides.prepare()
        whole, *parts = self.sides.write_requests(self.requests, self.rounds)
        with ending(self.warm_up()):
            self.rounds_of(whole, parts)

    def rounds_of(self, whole: Path, parts: list[Path]) -> None:
        for number, part in enumerate(parts):
            self.bench("alone")
            self.beside_valve(f"batch-{number}", part)
            if not number:
                self.beside_ungated(whole)

    def warm_up(self) -> subprocess.Popen[bytes]:
        """Again, where a busy valved missed the 50 ms that an online process gives it: that one runs untouched."""
        while True:
            self.say("starting the online server and the benchmark client")
            server = self.sides.start_server()
            self.client = self.client or self.sides.start_client()
            self.sides.wait_for_server(server)
            self.bench("warm-up")
            self.outcome.benches.clear()
            if any(engine.role == node_pb2.ROLE_ONLINE for engine in self.node.status().memory.engines):
                return server
            with ending(server):
                pass

    def bench(self, condition: str, batch: subprocess.Popen[bytes] | None = None) -> ClientRun:
        self.say(f"[bold]{condition}[/]: {self.prompts} requests at {self.rate}/s")
        out = self.sides.folder / f"bench-{len(self.outcome.benches)}.json"
        flags = ["--backend", "vllm", "--base-url", f"http://127.0.0.1:{self.sides.port}", "--model", "tiny"]
        flags += ["--tokenizer", str(self.sides.folder / "model"), *ONLINE, "--num-prompts", str(self.prompts)]
        flags += ["--request-rate", str(self.rate), "--result-filename", str(out)]
        before, reclaims = self.sides.services()["server"].preemptions, self.node.status().memory.reclaims
        assert self.client is not None
        self.client.begin(flags)
        looks = self.watch(self.client.is_over)
        answer = json.loads(out.read_text())
        bench = ClientRun(
            condition=condition,
            latency={name: float(answer[name]) for name in METRICS},
            completed=int(answer["completed"]),
            stops=self.sides.services()["server"].preemptions - before,
            reclaims=self.node.status().memory.reclaims - reclaims,
            outlived=batch is None or batch.poll() is None,
            share=share(looks),
        )
        self.outcome.benches.append(bench)
        return bench

    def watch(self, is_over: Callable[[], bool]) -> list[StatusSample]:
        """What valved says of both sides, some times a second: the client starts for longer than it sends."""
        looks = []
        while not is_over():
            seen = self.sides.services()
            server, batch = seen["server"], next((seen[name] for name in seen if name.startswith("batch")), None)
            tokens, ran_ns = (batch.useful_tokens, batch.harvest_ns) if batch else (0, 0)
            looks.append(
                StatusSample(at_s=time.monotonic(), is_open=server.open_requests > 0, tokens=tokens, ran_s=ran_ns / 1e9)
            )
            time.sleep(LOOK_S)
        return looks

    def idle_rate(self, batch: subprocess.Popen[bytes]) -> float:
        """Tokens a second of a batch whose neighbour has no requests."""
        until = time.monotonic() + RATE_S
        looks = self.watch(lambda: time.monotonic() > until or batch.poll() is not None)
        looks = [look for look in looks if look.tokens] or looks
        return (looks[-1].tokens - looks[0].tokens) / max(looks[-1].at_s - looks[0].at_s, 1e-9)

    def beside_valve(self, name: str, requests: Path) -> None:
        self.say("starting a batch under Valve")
        began = time.monotonic()
        batch = self.sides.start_batch("offline", name, requests)
        self.sides.wait_for_work(batch, name)
        self.sides.wait_for_tokens(batch, name)
        bench = self.bench("Valve", batch)
        bench.idle_rate = self.idle_rate(batch)
        self.say("waiting for the batch to end")
        self.outcome.batches.append(self.sides.finish(batch, name, began))
        self.outcome.lost_tokens = self.node.status().memory.lost_tokens

    def beside_ungated(self, requests: Path) -> None:
        """All parts in one batch, without Valve: its answers are what Valve's are compared with."""
        self.say("starting the batch without Valve")
        began = time.monotonic()
        batch = self.sides.start_batch("", "undisturbed", requests)
        self.sides.wait_for_work(batch, "undisturbed")
        self.bench("ungated", batch)
        self.bench("ungated", batch)
        self.say("waiting for the batch to end")
        self.outcome.undisturbed = self.sides.finish(batch, "undisturbed", began)


def options() -> Any:
    parser = argparse.ArgumentParser(prog="make demo-vllm", description=__doc__)
    option(parser, "--rounds", 5, "The rounds of alone and Valve. Ungated runs twice, in the first.", type=whole(1))
    option(parser, "--requests", 300, "The requests of the batch. Each round takes a part.", type=whole(1))
    option(parser, "--prompts", 30, "The requests of each benchmark.", type=whole(1))
    option(parser, "--rate", 1.5, "The online requests a second.", type=more_than_none)
    option(parser, "--step-us", STEP_US, "The microseconds that a model step takes, and each token in it.")
    option(parser, "--remap", "helper", "How memory is taken.", choices=[way.value for way in Remap])
    parser.add_argument(
        "--report", type=Path, help="Write what was measured to this file, as Markdown. Default: only print it."
    )
    add_options(parser, port=18231)
    return parser.parse_args()


def main() -> int:
    return perform("make demo-vllm", play)


def play() -> int:
    chosen = options()
    if not has_engines(chosen):
        return 2
    console = Console(record=True, width=110)
    with started(chosen, CONFIG.format(pool_mib=POOL_MIB, remap=chosen.remap), chosen.step_us) as sides:
        counts = {"rounds": chosen.rounds, "requests": chosen.requests, "prompts": chosen.prompts}
        demo = EngineDemo(sides=sides, rate=chosen.rate, say=console.print, **counts)
        demo.perform()
    console.export_text()  # the story so far stays out of the report
    verdict = show(console, demo.outcome)
    if chosen.report:
        arguments = " ".join(f"--{name} {value}" for name, value in {**counts, "remap": chosen.remap}.items())
        chosen.report.write_text(report(f"{arguments} --rate {chosen.rate} --report FILE", console.export_text()))
    return {RuleResult.KEPT: 0, RuleResult.BROKEN: 1, RuleResult.VOID: EXIT_VOID}[verdict]


if __name__ == "__main__":
    raise SystemExit(main())
