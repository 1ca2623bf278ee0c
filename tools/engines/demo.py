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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
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
tick_ms = 10.0
"""
BLOCKS = 512  # of 32 tokens: 64 MiB, eight columns of 2 MiB handles
POOL_MIB = 88
PATIENCE_S = 600.0
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

    def start_server(self) -> None:
        argv = self.command("serve", *self.engine_flags(), "--port", str(self.port), "--max-num-seqs", "16")
        server = self.node.run("online", argv, name="server", env=self.environment())

        def answers() -> bool:
            assert server.poll() is None, "the server ended; see server.log"
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5) as answer:
                    return bool(answer.status == 200)
            except OSError:
                return False

        self.node.wait_for(answers, "the server answers", PATIENCE_S)

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

    def bench(self, condition: str) -> dict[str, Any]:
        self.say(f"[bold]{condition}[/]: {self.prompts} requests at {self.rate}/s")
        out = self.folder / f"bench-{len(self.benches)}.json"
        flags = ["--backend", "vllm", "--base-url", f"http://127.0.0.1:{self.port}", "--model", "tiny"]
        flags += ["--tokenizer", str(self.folder / "model"), "--dataset-name", "random", "--random-input-len", "128"]
        flags += ["--random-output-len", "48", "--num-prompts", str(self.prompts), "--request-rate", str(self.rate)]
        flags += ["--ignore-eos", "--percentile-metrics", "ttft,tpot", "--save-result", "--result-filename", str(out)]
        before = self.services()
        began = time.monotonic()
        client = self.node.run("", self.command("bench", "serve", *flags), name="client", env=self.environment())
        code = client.wait(PATIENCE_S)
        assert code == 0, "the benchmark client failed; see client.log"
        after = self.services()
        answer = json.loads(out.read_text())
        result: dict[str, Any] = {name: float(answer[name]) for name in METRICS}
        result |= {"condition": condition, "completed": int(answer["completed"])}
        result["stops"] = after["server"].preemptions - before["server"].preemptions
        if "batch" in after and "batch" in before:
            tokens = after["batch"].useful_tokens - before["batch"].useful_tokens
            result["offline tokens/s"] = round(tokens / (time.monotonic() - began), 1)
        self.benches.append(result)
        return result

    def services(self) -> dict[str, Any]:
        return {service.name: service for service in self.node.status().services}

    def perform(self) -> tuple[Batch, Batch]:
        """Alone, beside an ungated batch, with Valve, alone again. Returns the undisturbed and Valve's batch."""
        self.say("starting the online server")
        self.start_server()
        self.bench("warm-up")
        self.benches.clear()
        self.bench("alone")
        self.say("starting the batch without Valve")
        began = time.monotonic()
        plain = self.start_batch("", "undisturbed")
        self.wait_for_work(plain, "undisturbed")
        self.bench("ungated")
        undisturbed = self.finish(plain, "undisturbed", began)
        self.say("starting the batch with Valve")
        began = time.monotonic()
        batch = self.start_batch("offline", "batch")
        self.wait_for_work(batch, "batch")
        self.bench("Valve")
        self.say("waiting for the batch to end")
        ours = self.finish(batch, "batch", began)
        self.bench("alone")
        return undisturbed, ours


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
    for column in ("condition", *METRICS, "stops", "offline tokens/s"):
        table.add_column(column, justify="right" if column != "condition" else "left")
    for bench in demo.benches:
        cells = [f"{bench[name]:.1f}" for name in METRICS]
        table.add_row(bench["condition"], *cells, str(bench["stops"]), str(bench.get("offline tokens/s", "")))
    console.print(table)
    wanted = {f"c{number}" for number in range(demo.requests)}
    once = wanted == ours.tokens.keys() and all(len(answers) == 1 for answers in ours.tokens.values())
    same = sum(ours.tokens.get(name) == answer for name, answer in undisturbed.tokens.items())
    console.print(f"batch: {len(ours.tokens)} of {demo.requests} requests answered, each once: {once}")
    console.print(f"       {same} of {demo.requests} answers identical to the undisturbed run")
    console.print(f"       {undisturbed.seconds:.0f} s undisturbed, {ours.seconds:.0f} s with Valve, start-up included")
    said = events(demo.folder)
    told = {name: said.get(name, 0) for name in ("reclaimed", "lent", "gate", "wake") if said.get(name)}
    console.print(f"valved: {told}")
    return once and same == demo.requests


def main() -> int:
    parser = argparse.ArgumentParser(prog="make demo-vllm", description=__doc__)
    parser.add_argument("--engines", type=Path, default=Path(".venv-engines"), help="made by make test-engines")
    parser.add_argument("--requests", type=int, default=300, help="of the batch")
    parser.add_argument("--prompts", type=int, default=60, help="of each benchmark")
    parser.add_argument("--rate", type=float, default=3.0, help="online requests a second")
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
