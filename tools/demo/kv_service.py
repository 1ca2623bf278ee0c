"""An online service without a model, with content-checked KV: the service of `valve demo memory`.

Requests come from a trace, are prefilled one by one and decoded together, with host gaps between the steps. A request
enters when there are blocks for it; the waits are counted. Prints what valve-demo-online prints: a JSON line for each
request, and a summary.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import random
import sys
import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from valve_kube.options import option
from valve_tools.bench.row import percentile
from valve_tools.demo.kv_engine import KvEngine, kv_options
from valve_tools.demo.kv_memory import BLOCK_TOKENS, KvSequence, blocks_for

POLL_S, POLL_BLOCKED_S = 0.01, 0.0005  # while nothing runs: valved may want something, or give what is waited for
GAP_SIGMA = 0.5
COMMAND = [sys.executable, "-m", "valve_tools.demo.kv_service"]


@dataclass(slots=True, kw_only=True)
class KvRequest:
    """Times are seconds since the start; 0: not yet."""

    id: int
    arrival_s: float
    in_tokens: int
    out_tokens: int
    first_s: float = 0.0
    done_s: float = 0.0
    made: int = 0
    sequence: KvSequence | None = None

    @property
    def ttft_ms(self) -> float:
        return (self.first_s - self.arrival_s) * 1e3

    @property
    def tpot_ms(self) -> float:
        return (self.done_s - self.first_s) * 1e3 / max(1, self.out_tokens - 1)


def requests_of(trace: Path, limit_s: float) -> list[KvRequest]:
    """Lines "t_s,in_tokens,out_tokens" after a header; arrivals from `limit_s` (if not 0) on are left out."""
    with trace.open(newline="", encoding="utf-8") as file:
        rows = [[float(cell) for cell in row] for row in list(csv.reader(file))[1:]]
    return [
        KvRequest(id=number, arrival_s=at_s, in_tokens=max(1, int(prompt)), out_tokens=max(1, int(answer)))
        for number, (at_s, prompt, answer) in enumerate(rows)
        if not limit_s or at_s < limit_s
    ]


class KvServing(KvEngine):
    def __init__(self, options: argparse.Namespace) -> None:
        self.requests = requests_of(options.trace, options.duration)
        self.to_come = deque(self.requests)
        self.batch: list[KvRequest] = []
        self.finished = self.wrong = self.taken = self.most = 0
        self.blocked: tuple[KvRequest, float] | None = None  # the request that waits for memory, and since when
        self.waits_s: list[float] = []
        self.random = random.Random(options.seed)
        super().__init__("demo-online", options, rows=options.batch)

    def discard(self, running: Mapping[str, int], left: Collection[str]) -> dict[str, Sequence[int]]:
        """An online engine is never reclaimed from; what a new valved cannot vouch for is counted."""
        self.taken += len(running)
        return {}

    def forget(self, blocks: object) -> int:
        return 0

    def most_tokens(self, request: KvRequest) -> int:
        """A prompt that never fits is cut."""
        return min(request.in_tokens + request.out_tokens, (self.blocks - 1) * BLOCK_TOKENS)

    def due(self) -> list[KvRequest]:
        """Requests that have come and were not let in."""
        found, now_s = [], self.elapsed_s
        for request in self.to_come:
            if request.arrival_s > now_s:
                break
            found.append(request)
        return found

    def gauges(self) -> tuple[int, int, int, int]:
        used, waiting = self.held_blocks(), self.due()
        wanted = used + sum(blocks_for(self.most_tokens(each)) for each in waiting)
        return used, min(wanted, self.blocks), len(self.batch), len(waiting)

    def hint(self) -> None:
        tokens = sum(each.made for each in self.requests)
        self.link.lifecycle.tell(len(self.batch) + len(self.due()), self.finished, tokens)

    # ---- steps ----

    def compute(self, requests: Sequence[KvRequest], us: float) -> None:
        sequences = [each.sequence for each in requests if each.sequence is not None]
        self.wrong += sum(self.memory.compute(sequences, us))
        self.hook.sync()
        for request, sequence in zip(requests, sequences, strict=True):
            request.made += 1
            sequence.tokens = min(sequence.tokens + 1, self.most_tokens(request))

    def enter(self, request: KvRequest) -> bool:
        most = self.most_tokens(request)
        self.hook.sync()
        request.sequence = self.begin(f"r{request.id}", request.id + 1, min(request.in_tokens, most), most)
        if request.sequence is None:
            self.blocked = self.blocked or (request, time.monotonic())
            return False
        if self.blocked is not None:
            self.waits_s.append(time.monotonic() - self.blocked[1])
            self.blocked = None
        return True

    def admit(self) -> None:
        """New requests enter while there is room; each is prefilled at once, which makes its first token."""
        due = self.due()
        if due and not self.batch:
            self.hint()  # as the real engines' hooks: offline work stops before the first step is chosen
        for request in due[: self.options.batch - len(self.batch)]:
            if not self.enter(request):
                break  # it waits, and those behind it
            self.to_come.popleft()
            self.batch.append(request)
            self.hint()
            self.compute([request], request.in_tokens * self.options.prefill_us)
            request.first_s = self.elapsed_s
            self.finish_all()

    def decode(self) -> None:
        options = self.options
        self.compute(self.batch, options.decode_us + options.sequence_us * len(self.batch))
        self.finish_all()
        time.sleep(self.random.lognormvariate(math.log(options.gap_ms), GAP_SIGMA) / 1e3)

    def finish_all(self) -> None:
        """Those whose answers are complete."""
        for request in [each for each in self.batch if each.made >= each.out_tokens]:
            request.done_s = self.elapsed_s
            self.finished += 1
            self.batch.remove(request)
            assert request.sequence is not None
            self.end(request.sequence)
            if not self.options.quiet:
                line = {"request": request.id, "arrival_s": request.arrival_s, "in": request.in_tokens}
                line |= {"out": request.out_tokens, "ttft_ms": request.ttft_ms, "tpot_ms": request.tpot_ms}
                print(json.dumps(line), flush=True)
        self.hint()

    def run(self) -> None:
        while not self.stopped and (self.to_come or self.batch):
            self.admit()
            self.hook.sync()
            self.most = max(self.most, self.held_blocks())
            self.publish()
            if self.batch:
                self.decode()
            elif self.to_come:
                until_s = max(0.0, self.to_come[0].arrival_s - self.elapsed_s)
                time.sleep(POLL_BLOCKED_S if self.blocked is not None else min(until_s, POLL_S))

    def summary(self) -> dict[str, object]:
        done = [each for each in self.requests if each.done_s]
        kv = {
            "tables": self.tables,
            "most_blocks": self.most,
            "waits": len(self.waits_s),
            "waited_ms": sum(self.waits_s) * 1e3,
            "longest_wait_ms": max(self.waits_s, default=0.0) * 1e3,
            "wrong_words": self.wrong,
            "taken": self.taken,
        }
        return {
            "summary": "online",
            "requests": len(self.requests),
            "finished": self.finished,
            "tokens": sum(each.made for each in self.requests),
            "start_s": self.start_s,
            "wall_s": self.elapsed_s,
            "ttft_ms": distribution([each.ttft_ms for each in done]),
            "tpot_ms": distribution([each.tpot_ms for each in done if each.out_tokens > 1]),
            "kv": kv,
        }


def distribution(values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {"n": 0}
    ordered = sorted(values)
    shown = {"p50": percentile(ordered, 0.5), "p99": percentile(ordered, 0.99), "max": ordered[-1]}
    return {"n": len(ordered), "mean": sum(ordered) / len(ordered), **shown}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    kv_options(parser, prefill_us=40.0)
    parser.add_argument("--trace", type=Path, required=True, help="A CSV file of arrivals: t_s,in_tokens,out_tokens.")
    option(parser, "--batch", 64, "The largest number of requests that are decoded together.")
    option(parser, "--decode-us", 10_000.0, "The GPU time of a decode step, in microseconds.")
    option(parser, "--sequence-us", 50.0, "The GPU time that each request adds to a step, in microseconds.")
    option(parser, "--gap-ms", 0.5, "The median host gap between steps (lognormal), in milliseconds.")
    option(parser, "--seed", 1, "The seed of the gaps.")
    parser.add_argument("--quiet", action="store_true", help="Print only the summary.")
    service = KvServing(parser.parse_args(argv))
    service.run()
    print(json.dumps(service.summary()), flush=True)
    return 1 if service.wrong or service.taken else 0


if __name__ == "__main__":
    raise SystemExit(main())
