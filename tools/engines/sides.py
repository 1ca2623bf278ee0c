"""The two sides of `make demo-vllm`: a real `vllm serve` and a real `vllm run-batch` on one emulated node."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from valve_kube.options import option
from valve_tools.demo.node import EmulatedNode, NodeError, demo_folder
from valve_tools.engines.benchmark import Client
from valve_tools.engines.figures import BatchRun
from valve_tools.engines.mount import mount

CONFIG = """
[memory]
handle_mib = 2
remap = "{remap}"
order_s = 10.0
pool_mib = {pool_mib}
spare_mib = 0
headroom_min_mib = 8
headroom_max_mib = 16
tau_s = 0.3
tau_min_s = 0.1
window_s = 60.0
target_per_hour = 1200.0
tick_ms = 10.0
"""
HEAD_DIM = 128  # 16 KiB of KV a token: an online request of 400 tokens fills most of a column
BLOCKS = 160  # of 32 tokens: 80 MiB, ten columns of four 2 MiB handles
POOL_MIB = 88
STEP_US = "20000,200"  # of the emulated card: a decoding step of a large model, and a prompt's tokens
PATIENCE_S = 600.0
SEED = 3
ENGINE = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the worker inside EngineCore, as on one GPU
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "passive",  # a thread that spins while parked would keep the other engine off the core
}
SHAPE = ["--dtype", "float32", "--enforce-eager", "--block-size", "32", "--max-model-len", "512"]
SHAPE += ["--max-num-batched-tokens", "512", "--max-num-seqs", "16", "--num-gpu-blocks-override", str(BLOCKS)]


@dataclass(slots=True, kw_only=True)
class Sides:
    node: EmulatedNode
    folder: Path
    python: Path
    port: int = 0
    step_us: str = "0,0"

    def environment(self) -> dict[str, str]:
        return {**ENGINE, "PYTHONPATH": str(self.folder / "mount"), "VALVE_EMU_STEP_US": self.step_us}

    def prepare(self) -> None:
        script = str(Path(__file__).with_name("tiny_model.py"))
        model = [str(self.python), script, str(self.folder / "model"), str(HEAD_DIM)]
        subprocess.run(model, check=True, capture_output=True)
        version = subprocess.run(
            [self.python, "-c", "import importlib.metadata as m; print(m.version('vllm-cpu'))"],
            check=True,
            capture_output=True,
            text=True,
        )
        mount(self.folder / "mount", version.stdout.strip())

    def write_requests(self, count: int, parts: int = 1) -> list[Path]:
        """Batch files with shared beginnings and answers of 70 to 110 tokens: one with all, then one for each part."""
        lines = batch_lines(count)
        files = {"all": lines, **{f"part-{part}": lines[part::parts] for part in range(parts)}}
        paths = []
        for name, some in files.items():
            paths.append(self.folder / f"{name}.requests.jsonl")
            paths[-1].write_text("".join(f"{json.dumps(line)}\n" for line in some))
        return paths

    def command(self, *arguments: str) -> list[str]:
        return [str(self.python), "-m", "vllm.entrypoints.cli.main", *arguments]

    def engine_flags(self) -> list[str]:
        return ["--model", str(self.folder / "model"), "--served-model-name", "tiny", "--enable-prefix-caching", *SHAPE]

    # ---- online ----

    def start_server(self) -> subprocess.Popen[bytes]:
        """What is taken from its prefix cache shows in the latencies."""
        flags = ["--port", str(self.port)]
        argv = self.command("serve", *self.engine_flags(), *flags)
        return self.node.run("online", argv, name="server", env=self.environment())

    def wait_for_server(self, server: subprocess.Popen[bytes]) -> None:
        self.node.wait_for(lambda: self._answers(server), "the server answers", PATIENCE_S)

    def _answers(self, server: subprocess.Popen[bytes]) -> bool:
        if server.poll() is not None:
            raise self._failure("server", server)
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

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

    # ---- offline ----

    def start_batch(self, role: str, name: str, requests: Path) -> subprocess.Popen[bytes]:
        files = ["-i", str(requests), "-o", str(self.folder / f"{name}.jsonl")]
        return self.node.run(
            role, self.command("run-batch", *files, *self.engine_flags()), name=name, env=self.environment()
        )

    def wait_for_work(self, batch: subprocess.Popen[bytes], name: str) -> None:
        """Until the batch works: its engine takes longer to start than it works."""
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

    def finish(self, batch: subprocess.Popen[bytes], name: str, began: float = 0.0) -> BatchRun:
        if batch.wait(PATIENCE_S):
            raise self._failure(name, batch)
        lines = [json.loads(line) for line in (self.folder / f"{name}.jsonl").read_text().splitlines()]
        tokens: dict[str, list[str]] = {}
        for line in lines:
            answer = line["response"]["body"]["choices"][0]["message"]["content"]
            tokens.setdefault(line["custom_id"], []).append(answer)
        return BatchRun(seconds=time.monotonic() - began, tokens=tokens)

    def _failure(self, name: str, process: subprocess.Popen[bytes]) -> NodeError:
        last = (self.folder / f"{name}.log").read_text(errors="replace")[-2000:]
        return NodeError(f"{name} ended with {process.returncode}. With --keep FOLDER its log stays. Its end:\n{last}")

    def services(self) -> dict[str, Any]:
        return {service.name: service for service in self.node.status().services}


def batch_lines(count: int) -> list[dict[str, Any]]:
    chance = random.Random(SEED)
    heads = [[f"t{chance.randrange(3, 1024)}" for _ in range(70)] for _ in range(3)]
    lines = []
    for number in range(count):
        words = heads[number % 3] * (number % 4 != 3)
        words = words + [f"t{chance.randrange(3, 1024)}" for _ in range(chance.randrange(20, 100))]
        body = {
            "model": "tiny",
            "messages": [{"role": "user", "content": " ".join(words)}],
            "temperature": 0,
            "max_tokens": 70 + number % 9 * 5,
            "ignore_eos": True,
        }
        lines.append({"custom_id": f"c{number}", "method": "POST", "url": "/v1/chat/completions", "body": body})
    return lines


def add_options(parser: argparse.ArgumentParser, port: int) -> None:
    option(parser, "--engines", Path(".venv-engines"), "The environment that make test-engines made.")
    option(parser, "--port", port, "The port of the online server.")
    parser.add_argument("--keep", type=Path, help="Leave logs and outputs in this folder. Default: keep none.")


def has_engines(options: argparse.Namespace) -> bool:
    if python_of(options).exists():
        return True
    print(f"{options.engines}: no engines here; make test-engines installs them", file=sys.stderr)
    return False


def python_of(options: argparse.Namespace) -> Path:
    return Path(options.engines).resolve() / "bin" / "python"


@contextlib.contextmanager
def started(options: argparse.Namespace, config: str, step_us: str) -> Iterator[Sides]:
    """A node with valved, for the engines that the options name."""
    with demo_folder(options.keep) as folder, EmulatedNode(folder, config=config) as node:
        favour(node.start_valved())
        yield Sides(node=node, folder=folder, python=python_of(options), port=options.port, step_us=step_us)


@contextlib.contextmanager
def ending(server: subprocess.Popen[bytes]) -> Iterator[None]:
    """Only a demo that goes on lets a server end by itself: one that is told so while it starts may not hear it, and
    one that serves answers all its requests first."""
    try:
        yield
    except BaseException:
        server.kill()
        raise
    server.terminate()
    server.wait(PATIENCE_S)


def favour(valved: subprocess.Popen[bytes]) -> None:
    """A node's daemon goes first; here two engines fill two cores, an online process waits 50 ms for it."""
    with contextlib.suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, valved.pid, -10)
