"""`make demo-vllm`: a real vLLM answers requests while another works through a batch, on one emulated GPU with Valve.

The product's own binaries on both sides: preload library, engine plugin, valved. The two KV caches together do not
fit the pool, so memory has to move. Latency is measured by vLLM's own benchmark client; the batch's tokens are compared
with those of a run that nobody disturbed. Figures of a CPU say nothing about a GPU: they show that the parts work
together, and how Valve compares with sharing without it in the same minute.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from valve.v1 import node_pb2
from valve_tools.demo.node import EmulatedNode
from valve_tools.engines.mount import mount

CONFIG = """
[memory]
handle_mib = 2
pool_mib = {pool_mib}
spare_mib = 0
headroom_min_mib = 8
headroom_max_mib = 32
tau_s = 0.3
tau_min_s = 0.1
tick_ms = 10.0
"""
BLOCKS = 512  # of 32 tokens: 64 MiB, eight columns of 2 MiB handles
POOL_MIB = 88
PATIENCE_S = 600.0
LOOK_S = 0.1
RATE_S = 8.0
METRICS = ("mean_ttft_ms", "p99_ttft_ms", "mean_tpot_ms", "p99_tpot_ms")
ENGINE = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "passive",  # a thread that spins while parked would keep the other engine off the core
}
SHAPE = ["--dtype", "float32", "--enforce-eager", "--block-size", "32", "--max-model-len", "512"]


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


@dataclass(slots=True, kw_only=True)
class Demo:
    node: EmulatedNode
    folder: Path
    python: Path
    requests: int
    prompts: int
    rate: float
    port: int
    say: Any
    benches: list[dict[str, Any]] = field(default_factory=list)

    def environment(self) -> dict[str, str]:
        return {**ENGINE, "PYTHONPATH": str(self.folder / "mount")}

    def prepare(self) -> None:
        script = Path(__file__).with_name("tiny_model.py")
        subprocess.run([self.python, script, self.folder / "model"], check=True, capture_output=True)
        version = subprocess.run(
            [self.python, "-c", "import importlib.metadata as m; print(m.version('vllm-cpu'))"],
            check=True,
            capture_output=True,
            text=True,
        )
        mount(self.folder / "mount", version.stdout.strip())
        chance = random.Random(3)
        with (self.folder / "requests.jsonl").open("w") as file:
            for number in range(self.requests):
                words = " ".join(f"t{chance.randrange(3, 1024)}" for _ in range(chance.randrange(30, 150)))
                body = {
                    "model": "tiny",
                    "messages": [{"role": "user", "content": words}],
                    "temperature": 0,
                    "max_tokens": 200,
                    "ignore_eos": True,
                }
                line = {"custom_id": f"c{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}
                file.write(json.dumps(line) + "\n")

    def command(self, *arguments: str) -> list[str]:
        return [str(self.python), "-m", "vllm.entrypoints.cli.main", *arguments]

    def engine_flags(self) -> list[str]:
        model = str(self.folder / "model")
        return ["--model", model, "--served-model-name", "tiny", "--num-gpu-blocks-override", str(BLOCKS), *SHAPE]

    def start_server(self) -> subprocess.Popen[bytes]:
        argv = self.command("serve", *self.engine_flags(), "--port", str(self.port), "--max-num-seqs", "16")
        server = self.node.run("online", argv, name="server", env=self.environment())
        self.node.wait_for(lambda: self._answers(server), "the server answers", PATIENCE_S)
        return server

    def warm_up(self) -> None:
        """Again, where a busy valved missed the 50 ms that an online process gives it: that one runs untouched."""
        while True:
            self.say("starting the online server")
            server = self.start_server()
            self.bench("warm-up")
            self.benches.clear()
            if any(engine.role == node_pb2.ROLE_ONLINE for engine in self.node.status().memory.engines):
                return
            server.terminate()
            server.wait(PATIENCE_S)

    def _answers(self, server: subprocess.Popen[bytes]) -> bool:
        assert server.poll() is None, "the server ended; see server.log"
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def start_batch(self, role: str, name: str) -> subprocess.Popen[bytes]:
        files = ["-i", str(self.folder / "requests.jsonl"), "-o", str(self.folder / f"{name}.jsonl")]
        argv = self.command("run-batch", *files, *self.engine_flags(), "--max-num-seqs", "24")
        return self.node.run(role, argv, name=name, env=self.environment())

    def wait_for_work(self, batch: subprocess.Popen[bytes], name: str) -> None:
        """Until the batch makes progress: its engine takes longer to start than it works."""
        log = self.folder / f"{name}.log"
        self.node.wait_for(
            lambda: batch.poll() is not None or "Running batch:" in log.read_text(errors="replace"),
            f"{name} starts to work",
            PATIENCE_S,
        )

    def finish(self, batch: subprocess.Popen[bytes], name: str, began: float) -> Batch:
        code = batch.wait(PATIENCE_S)
        assert code == 0, f"{name} ended with {code}; see {name}.log"
        lines = [json.loads(line) for line in (self.folder / f"{name}.jsonl").read_text().splitlines()]
        tokens: dict[str, list[str]] = {}
        for line in lines:
            answer = line["response"]["body"]["choices"][0]["message"]["content"]
            tokens.setdefault(line["custom_id"], []).append(answer)
        return Batch(seconds=time.monotonic() - began, tokens=tokens)

    def bench(self, condition: str, batch: subprocess.Popen[bytes] | None = None) -> dict[str, Any]:
        self.say(f"[bold]{condition}[/]: {self.prompts} requests at {self.rate}/s")
        out = self.folder / f"bench-{len(self.benches)}.json"
        flags = ["--backend", "vllm", "--base-url", f"http://127.0.0.1:{self.port}", "--model", "tiny"]
        flags += ["--tokenizer", str(self.folder / "model"), "--dataset-name", "random", "--random-input-len", "128"]
        flags += ["--random-output-len", "48", "--num-prompts", str(self.prompts), "--request-rate", str(self.rate)]
        flags += ["--ignore-eos", "--percentile-metrics", "ttft,tpot", "--save-result", "--result-filename", str(out)]
        before = self.services()["server"].preemptions
        client = self.node.run("", self.command("bench", "serve", *flags), name="client", env=self.environment())
        looks = self.watch(lambda: client.poll() is not None)
        assert client.returncode == 0, "the benchmark client failed; see client.log"
        answer = json.loads(out.read_text())
        result: dict[str, Any] = {name: float(answer[name]) for name in METRICS}
        result |= {"condition": condition, "completed": int(answer["completed"])}
        result["stops"] = self.services()["server"].preemptions - before
        result["outlived"] = batch is None or batch.poll() is None
        result["share"] = share(looks)
        self.benches.append(result)
        return result

    def watch(self, is_over: Callable[[], bool]) -> list[Look]:
        """What valved says of both sides, some times a second: the client starts for longer than it sends."""
        looks = []
        while not is_over():
            seen = self.services()
            server, batch = seen["server"], seen.get("batch")
            tokens, ran_ns = (batch.useful_tokens, batch.harvest_ns) if batch else (0, 0)
            looks.append(
                Look(at_s=time.monotonic(), is_open=server.open_requests > 0, tokens=tokens, ran_s=ran_ns / 1e9)
            )
            time.sleep(LOOK_S)
        return looks

    def idle_rate(self, batch: subprocess.Popen[bytes]) -> float:
        """Tokens a second of a batch whose neighbour has no requests."""
        until = time.monotonic() + RATE_S
        looks = self.watch(lambda: time.monotonic() > until or batch.poll() is not None)
        return (looks[-1].tokens - looks[0].tokens) / (looks[-1].at_s - looks[0].at_s)

    def services(self) -> dict[str, Any]:
        return {service.name: service for service in self.node.status().services}

    def perform(self) -> tuple[Batch, Batch]:
        """Alone, ungated, alone, Valve, alone. Returns the undisturbed and Valve's batch."""
        self.warm_up()
        self.bench("alone")
        undisturbed = self.beside_batch("", "undisturbed", "ungated")
        self.bench("alone")
        ours = self.beside_batch("offline", "batch", "Valve")
        self.bench("alone")
        return undisturbed, ours

    def beside_batch(self, role: str, name: str, condition: str) -> Batch:
        self.say(f"starting the batch: {condition}")
        began = time.monotonic()
        batch = self.start_batch(role, name)
        self.wait_for_work(batch, name)
        result = self.bench(condition, batch)
        if role:
            result["idle tokens/s"] = self.idle_rate(batch)
        self.say("waiting for the batch to end")
        return self.finish(batch, name, began)


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


def show(console: Console, demo: Demo, undisturbed: Batch, ours: Batch) -> bool:
    table = Table(title="online latency by vLLM's benchmark client")
    for column in ("condition", *METRICS, "stops"):
        table.add_column(column, justify="right" if column != "condition" else "left")
    for bench in demo.benches:
        cells = [f"{bench[name]:.1f}" for name in METRICS]
        table.add_row(bench["condition"], *cells, str(bench["stops"]))
    console.print(table)
    outlived = all(bench["outlived"] for bench in demo.benches)
    console.print(f"the batch worked during the whole of each benchmark beside it: {outlived}")
    for bench in demo.benches:
        if bench.get("idle tokens/s"):
            console.print(progress(bench["share"], bench["idle tokens/s"]))
    wanted = {f"c{number}" for number in range(demo.requests)}
    once = wanted == ours.tokens.keys() and all(len(answers) == 1 for answers in ours.tokens.values())
    same = sum(ours.tokens.get(name) == answer for name, answer in undisturbed.tokens.items())
    console.print(f"batch: {len(ours.tokens)} of {demo.requests} requests answered, each once: {once}")
    console.print(f"       {same} of {demo.requests} answers identical to the undisturbed run")
    console.print(f"       {undisturbed.seconds:.0f} s undisturbed, {ours.seconds:.0f} s with Valve, start-up included")
    said = events(demo.folder)
    told = {name: said.get(name, 0) for name in ("reclaimed", "lent", "gate", "wake") if said.get(name)}
    console.print(f"valved: {told}")
    return outlived and once and same == demo.requests


def progress(share: Share, idle_rate: float) -> str:
    """What the batch made of the time in which no online request was open."""
    rate = share.tokens / max(share.seconds, 1e-9)
    could = idle_rate * share.idle_s
    return (
        f"with Valve: online idle {share.idle_s:.1f} of {share.seconds:.1f} s, offline allowed to run"
        f" {share.ran_s:.1f} s; {rate:.0f} offline tokens/s, {idle_rate:.0f} beside an idle neighbour:"
        f" {100 * share.tokens / max(could, 1e-9):.0f} % of what the idle time was worth"
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="make demo-vllm", description=__doc__)
    parser.add_argument("--engines", type=Path, default=Path(".venv-engines"), help="made by make test-engines")
    parser.add_argument("--requests", type=int, default=600, help="of the batch")
    parser.add_argument("--prompts", type=int, default=30, help="of each benchmark")
    parser.add_argument("--rate", type=float, default=1.0, help="online requests a second")
    parser.add_argument("--port", type=int, default=18231)
    parser.add_argument("--keep", type=Path, help="leave logs and outputs in this folder")
    options = parser.parse_args()
    python = options.engines.resolve() / "bin" / "python"
    if not python.exists():
        print(f"{options.engines}: no engines here; make test-engines installs them", file=sys.stderr)
        return 2
    console = Console()
    with tempfile.TemporaryDirectory(prefix="valve-vllm-") as scratch:
        folder = options.keep.resolve() if options.keep else Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        with EmulatedNode(folder, config=CONFIG.format(pool_mib=POOL_MIB)) as node:
            node.start_valved()
            demo = Demo(
                node=node,
                folder=folder,
                python=python,
                requests=options.requests,
                prompts=options.prompts,
                rate=options.rate,
                port=options.port,
                say=console.print,
            )
            demo.prepare()
            undisturbed, ours = demo.perform()
        return 0 if show(console, demo, undisturbed, ours) else 1


if __name__ == "__main__":
    raise SystemExit(main())
