"""`make demo-vllm`: a real vLLM answers requests while another works through a batch, on one emulated GPU with Valve.

The product's own binaries on both sides: preload library, engine plugin, valved. The two KV caches together do not
fit the pool, so memory has to move. Latency is measured by vLLM's own benchmark client; the batch's tokens are compared
with those of a run that nobody disturbed. Figures of a CPU say nothing about a GPU: they show that the parts work
together, and how Valve compares with sharing without it in the same minute.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from valve.v1 import node_pb2
from valve_tools.demo.node import EmulatedNode
from valve_tools.engines.benchmark import Client
from valve_tools.engines.figures import METRICS, Batch, Look, events, report, share, show
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
    client: Client | None = None

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
        heads = [[f"t{chance.randrange(3, 1024)}" for _ in range(70)] for _ in range(3)]
        with (self.folder / "requests.jsonl").open("w") as file:
            for number in range(self.requests):
                words = heads[number % 3] * (number % 4 != 3)
                words = words + [f"t{chance.randrange(3, 1024)}" for _ in range(chance.randrange(20, 100))]
                body = {
                    "model": "tiny",
                    "messages": [{"role": "user", "content": " ".join(words)}],
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
        """Without a prefix cache: every benchmark sends the same prompts at the same moments, and computes them."""
        flags = ["--port", str(self.port), "--max-num-seqs", "16", "--no-enable-prefix-caching"]
        server = self.node.run(
            "online", self.command("serve", *self.engine_flags(), *flags), name="server", env=self.environment()
        )
        self.node.wait_for(lambda: self._answers(server), "the server answers", PATIENCE_S)
        return server

    def start_client(self) -> Client:
        with (self.folder / "client.log").open("ab") as log:
            process = subprocess.Popen(
                [self.python, Path(__file__).with_name("client.py")],
                env=self.node.environment(self.environment()),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self.node.adopt(process)
        return Client(process)

    def warm_up(self) -> None:
        """Again, where a busy valved missed the 50 ms that an online process gives it: that one runs untouched."""
        self.client = self.start_client()
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

    def wait_for_tokens(self, batch: subprocess.Popen[bytes], name: str) -> None:
        self.node.wait_for(
            lambda: batch.poll() is not None or (name in (seen := self.services()) and seen[name].useful_tokens > 0),
            f"{name} makes progress",
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
        assert self.client is not None
        self.client.begin(flags)
        looks = self.watch(self.client.is_over)
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
        if role:
            self.wait_for_tokens(batch, name)
        result = self.bench(condition, batch)
        if role:
            result["idle tokens/s"] = self.idle_rate(batch)
        self.say("waiting for the batch to end")
        return self.finish(batch, name, began)


def favour(valved: subprocess.Popen[bytes]) -> None:
    """A node's daemon goes first; here two engines fill two cores, an online process waits 50 ms for it."""
    with contextlib.suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, valved.pid, -10)


def main() -> int:
    parser = argparse.ArgumentParser(prog="make demo-vllm", description=__doc__)
    parser.add_argument("--engines", type=Path, default=Path(".venv-engines"), help="made by make test-engines")
    parser.add_argument("--requests", type=int, default=600, help="of the batch")
    parser.add_argument("--prompts", type=int, default=30, help="of each benchmark")
    parser.add_argument("--rate", type=float, default=1.0, help="online requests a second")
    parser.add_argument("--port", type=int, default=18231)
    parser.add_argument("--report", type=Path, help="write what was measured to this file, as Markdown")
    parser.add_argument("--keep", type=Path, help="leave logs and outputs in this folder")
    options = parser.parse_args()
    python = options.engines.resolve() / "bin" / "python"
    if not python.exists():
        print(f"{options.engines}: no engines here; make test-engines installs them", file=sys.stderr)
        return 2
    console = Console(record=True, width=110)
    with tempfile.TemporaryDirectory(prefix="valve-vllm-") as scratch:
        folder = options.keep.resolve() if options.keep else Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        with EmulatedNode(folder, config=CONFIG.format(pool_mib=POOL_MIB)) as node:
            favour(node.start_valved())
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
        console.export_text()  # the story so far stays out of the report
        is_right = show(console, demo.benches, events(folder), undisturbed, ours)
        if options.report:
            arguments = f"--requests {options.requests} --prompts {options.prompts} --rate {options.rate} --report FILE"
            options.report.write_text(report(arguments, console.export_text()))
        return 0 if is_right else 1


if __name__ == "__main__":
    raise SystemExit(main())
