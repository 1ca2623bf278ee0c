"""Bench `rungs`: what each way of taking KV memory costs an online service in time to first token, at three loads.

The same requests alone and beside offline work that fills the memory, once for each way (docs/memory.md), in an order
that turns from round to round. A round gives one ratio of mean TTFT for each way and load, to the run alone of that
round. The figure is the median of the ratios, with the interval of 95 % (or a little more) that their order gives; it
is judged by its worse end. A load is the mean number of open requests. Memory is much scarcer than on a card, so that
reclaims are many: how many there were for a request is in the note.

`sparse` is the same for that way alone, in a quarter of an hour: each round one pair, each of the two first in turn,
and every step of both engines twice as long, so that what the machine adds is half as much beside it.
"""

from __future__ import annotations

import json
import math
import os
import random
import signal
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from valve_tools.bench.row import Row
from valve_tools.demo import kv_batch, kv_service
from valve_tools.demo.memory import start_online
from valve_tools.demo.node import EmulatedNode
from valve_tools.demo.rounds import last_summary

WAYS = ("sparse", "helper", "cooperative")
BUDGET_PERCENT = {"sparse": 2.5}  # P5
BLOCKS, PLANES, BLOCK_KIB = 512, 2, 64  # 16 columns of two 2 MiB handles, 512 tokens each; the pool holds one more
CONFIG = """
[memory]
handle_mib = 2
pool_mib = 68
remap = "{way}"
order_s = 10.0
spare_mib = 0
headroom_min_mib = 12
headroom_max_mib = 16
window_s = 60.0
target_per_hour = 600
tau_s = 1.0
tau_min_s = 0.5
tau_max_s = 60.0
tick_ms = 10
"""
PREFILL_US, DECODE_US, STEP_US = 100, 10_000, 20_000  # of the service, and of the batch
FIRST_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Requests open on average, and how that is drawn: Poisson arrivals, prompts and answers of log-normal lengths."""

    open_requests: float
    rate: float
    requests: int
    slow: int = 1  # times as long: every step, and from request to request
    seed: int = 5

    def trace(self) -> str:
        chance = random.Random(self.seed)
        at_s, lines = FIRST_S, ["t_s,in_tokens,out_tokens"]
        for _ in range(self.requests):
            tokens = min(2000, round(chance.lognormvariate(math.log(400), 0.8)))
            out = min(120, round(chance.lognormvariate(math.log(40), 0.5)))
            lines.append(f"{at_s:.3f},{max(16, tokens)},{max(2, out)}")
            at_s += self.slow * chance.expovariate(self.rate)
        return "\n".join([*lines, ""])

    @property
    def service(self) -> list[str]:
        return ["--prefill-us", str(PREFILL_US * self.slow), "--decode-us", str(DECODE_US * self.slow)]

    @property
    def batch(self) -> list[str]:
        return ["--step-us", str(STEP_US * self.slow)]


LOADS = (
    Load(open_requests=0.5, rate=0.9, requests=12),
    Load(open_requests=1, rate=1.6, requests=14),
    Load(open_requests=8, rate=8.0, requests=40),
)
SLOW_LOADS = (
    Load(open_requests=0.5, rate=0.9, requests=7, slow=2),
    Load(open_requests=1, rate=1.6, requests=9, slow=2),
    Load(open_requests=8, rate=8.0, requests=28, slow=2),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class WayServed:
    mean_ttft_ms: float
    reclaims: int = 0
    lets: int = 0
    trials_passed: int = 0


def serve(load: Load, way: str, folder: Path) -> WayServed:
    """One run; no way: alone."""
    folder.mkdir(parents=True)
    requests = folder / "requests.csv"
    requests.write_text(load.trace())
    cache = ["--kv-planes", str(PLANES), "--block-kib", str(BLOCK_KIB), "--kv-blocks", str(BLOCKS)]
    argv = [*kv_service.COMMAND, *load.service, *cache, "--trace", str(requests), "--duration", "600", "--quiet"]
    with EmulatedNode(folder, config=CONFIG.format(way=way)) as node:
        if not way:
            node.run("", argv, name="chat", out=folder / "on").wait(600)
            return WayServed(mean_ttft_ms=_ttft(folder))
        node.start_valved()
        offline = node.run("offline", [*kv_batch.COMMAND, *load.batch, *cache], name="batch", out=folder / "off")
        node.wait_for(lambda: _is_full(node, way), "the offline engine has all the memory")
        start_online(node, argv, folder).wait(600)
        memory = node.status().memory
        offline.send_signal(signal.SIGTERM)
        offline.wait(60)
        _check(folder)
        return WayServed(
            mean_ttft_ms=_ttft(folder),
            reclaims=memory.reclaims,
            lets=memory.lets,
            trials_passed=memory.trials_passed,
        )


def _ttft(folder: Path) -> float:
    summary: Any = last_summary(folder / "on")
    assert summary["finished"] == summary["requests"] > 0, summary
    return float(summary["ttft_ms"]["mean"])


def _check(folder: Path) -> None:
    """A fast way that answers wrongly is none."""
    offline: Any = last_summary(folder / "off")
    online: Any = last_summary(folder / "on")
    assert offline["ok"], offline
    assert not offline["wrong_words"], offline
    assert not online["kv"]["wrong_words"], online


def _is_full(node: EmulatedNode, way: str) -> bool:
    memory = node.status().memory
    is_ready = way != "sparse" or memory.trials_passed > 0
    return is_ready and any(one.role == 2 and one.backed_blocks == BLOCKS for one in memory.engines)


@dataclass(slots=True)
class WayFound:
    """Of one way at one load."""

    ratios: list[float] = field(default_factory=list)
    requests: int = 0
    reclaims: int = 0
    lets: int = 0

    def add(self, served: WayServed, alone: WayServed, load: Load) -> None:
        self.ratios.append(served.mean_ttft_ms / alone.mean_ttft_ms)
        self.requests += load.requests
        self.reclaims += served.reclaims
        self.lets += served.lets


def interval(ratios: Sequence[float], confidence: float = 0.95) -> tuple[float, float, float]:
    """Median, and the innermost pair of order statistics around it that holds with that confidence."""
    ordered, n = sorted(ratios), len(ratios)
    below, rank = 0.0, 0
    while rank < n // 2 and below + math.comb(n, rank) / 2**n <= (1 - confidence) / 2:
        below += math.comb(n, rank) / 2**n
        rank += 1
    low = max(0, rank - 1)
    return statistics.median(ordered), ordered[low], ordered[n - 1 - low]


def campaign(
    rounds: int, say: Callable[[str], None], loads: Sequence[Load] = LOADS, ways: Sequence[str] = WAYS
) -> dict[tuple[float, str], WayFound]:
    found = {(load.open_requests, way): WayFound() for load in loads for way in ways}
    order = ["", *ways]
    for number in range(rounds):
        for load in loads:
            served: dict[str, WayServed] = {}
            for way in order[number % len(order) :] + order[: number % len(order)]:
                with tempfile.TemporaryDirectory(prefix="valve-rungs-") as folder:
                    served[way] = serve(load, way, Path(folder) / "node")
                told = {"round": number, "load": load.open_requests, "way": way or "alone", **asdict(served[way])}
                say(json.dumps({**told, "machine_load": round(os.getloadavg()[0], 1)}))
            for way in ways:
                found[load.open_requests, way].add(served[way], served[""], load)
    return found


def bench_rungs(rounds: int = 10) -> Iterator[Row]:
    yield from rows_of("rungs", campaign(rounds, say))


def bench_sparse(rounds: int = 10) -> Iterator[Row]:
    yield from rows_of("sparse", campaign(rounds, say, SLOW_LOADS, ("sparse",)))


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def rows_of(name: str, found: dict[tuple[float, str], WayFound]) -> Iterator[Row]:
    for (load, way), one in found.items():
        median, low, high = (100 * (ratio - 1) for ratio in interval(one.ratios))
        budget = BUDGET_PERCENT.get(way)
        note = f"interval {low:+.1f} to {high:+.1f} %; {one.reclaims / one.requests:.2f} reclaims a request"
        note += f"; {one.lets} steps let end" if one.lets else ""
        is_void = budget is not None and high - low > budget
        if is_void:
            note += "; void: the interval is wider than the mark"
        yield Row(
            name=name,
            metric=f"{way} at load {load:g}",
            unit="% of mean TTFT over alone",
            p50=median,
            p99=high,
            max=max(100 * (ratio - 1) for ratio in one.ratios),
            n=len(one.ratios),
            budget=budget,
            note=note,
            is_void=is_void,
        )


BENCHES: dict[str, Callable[[], Iterable[Row]]] = {"rungs": bench_rungs, "sparse": bench_sparse}
