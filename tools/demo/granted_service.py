"""A small serving engine that asks for pauses as a real one's hook does: the service of `valve demo granted`.

Requests come when they will and are decoded together, a step at a time, as kernels of the emulated GPU. All that it
knows of granted time is `valve_hook.grants`. Run it under `valve run --online --slo ... --grant`; its last line is a
summary.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from valve_hook.grants import LOOK_S, Asking
from valve_hook.link import Link, process_link
from valve_hook.policy.granting import EngineFacts, GrantSettings
from valve_hook.policy.misses import MissSettings
from valve_kube.options import option
from valve_tools.demo.stalls import Span
from valve_tools.emulator.device import Device

MS, US = 1_000_000, 1_000
MOST = 64
"""Requests that are decoded together."""
KV_TOKENS = 1_000_000
HASTY = GrantSettings(grants_per_s=18.0, least_worth=-1.0, misses=MissSettings(trial=0))
"""It asks from the first step on, for tests: nothing of its own load has to be learnt."""


@dataclass(slots=True, kw_only=True)
class OpenRequest:
    """One request, and when its tokens came (CLOCK_MONOTONIC ns)."""

    name: str
    prompt: int
    tokens: int
    arrived_ns: int
    first_ns: int = 0
    last_ns: int = 0
    made: int = 0
    longest_ns: int = 0
    gaps: list[list[Span]] = field(default_factory=list)
    """Of each gap the spans in which no prompt was computed: a pause could have made these too long."""
    pauses: list[list[Span]] = field(default_factory=list)
    """Of each gap the spans in which the hook meant to pause: a stall in these made it no longer."""

    def token(self, now_ns: int, prompts: list[Span], pauses: list[Span]) -> None:
        """`prompts`: the steps of prompts since the last one that decoded; `pauses`: those since then."""
        if self.made:
            self.longest_ns = max(self.longest_ns, now_ns - self.last_ns)
            within = [span for span in prompts if span[0] >= self.last_ns]
            begins, ends = [self.last_ns, *(end for _, end in within)], [*(begin for begin, _ in within), now_ns]
            self.gaps.append(list(zip(begins, ends, strict=True)))
            self.pauses.append([span for span in pauses if span[0] >= self.last_ns])
        self.first_ns, self.last_ns = self.first_ns or now_ns, now_ns
        self.made += 1

    def row(self) -> dict[str, Any]:
        return {
            "arrived_s": self.arrived_ns / 1e9,
            "ttft_ms": (self.first_ns - self.arrived_ns) / MS,
            "tpot_ms": (self.last_ns - self.first_ns) / MS / max(1, self.made - 1),
            "longest_ms": self.longest_ns / MS,
            "gaps": self.gaps,
            "pauses": self.pauses,
            "made": self.made,
            "first_ns": self.first_ns,
            "last_ns": self.last_ns,
        }


@dataclass(slots=True, kw_only=True)
class GrantedService:
    """The engine's loop. `inbox` is its only input; code that puts something there notifies `news`."""

    options: argparse.Namespace
    device: Device
    link: Link | None
    grants: Asking | None
    news: threading.Condition = field(default_factory=threading.Condition)
    inbox: deque[OpenRequest] = field(default_factory=deque)
    batch: list[OpenRequest] = field(default_factory=list)
    done: list[OpenRequest] = field(default_factory=list)
    is_last: bool = False
    tokens: int = 0
    prompts: list[Span] = field(default_factory=list)
    """The steps of prompts since the last one that decoded."""
    pauses: list[Span] = field(default_factory=list)
    """The pauses since then, each to the end that the hook gave its last wait, or to what came earlier."""
    due_ns: int = 0

    def arrive(self) -> None:
        """A thread: clients that come when they will."""
        options, chance = self.options, random.Random(self.options.seed)
        due_ns = time.monotonic_ns()
        for number in range(options.requests):
            due_ns += int(chance.expovariate(options.rate) * 1e9)
            time.sleep(max(0, due_ns - time.monotonic_ns()) / 1e9)
            tokens = max(2, int(chance.expovariate(1 / options.out_tokens)))
            asked = OpenRequest(
                name=f"r{number}", prompt=options.in_tokens, tokens=tokens, arrived_ns=time.monotonic_ns()
            )
            with self.news:
                self.inbox.append(asked)
                self.hint()
                self.news.notify()
        with self.news:
            self.is_last = True
            self.news.notify()

    def hint(self) -> None:
        if self.link is not None:
            self.link.lifecycle.tell(len(self.inbox) + len(self.batch), len(self.done), self.tokens)

    def wait(self, seconds: float) -> bool:
        """For a pause: True as soon as a request is there."""
        if self.options.say_pauses and seconds > 2 * LOOK_S:
            print("pause", flush=True)
        self.due_ns = time.monotonic_ns() + int(seconds * 1e9)
        with self.news:
            return self.news.wait_for(lambda: bool(self.inbox), seconds)

    def serve(self) -> None:
        while True:
            with self.news:
                if not self.inbox and not self.batch:
                    self.hint()
                    self.news.wait_for(lambda: self.inbox or self.is_last)
                    if self.grants is not None:
                        self.grants.rested(time.monotonic_ns())
                if not self.inbox and not self.batch:
                    return
                new = [self.inbox.popleft() for _ in range(min(len(self.inbox), MOST - len(self.batch)))]
            self.step(new)
            if self.grants is not None:
                self.pause(self.grants)

    def step(self, new: list[OpenRequest]) -> None:
        """Prompts alone, or a token for every request."""
        grants = self.grants if self.grants is not None and self.grants.follows else None
        if grants is not None:
            for asked in new:
                grants.arrived(asked.name, asked.prompt, asked.arrived_ns)
        begin_ns = time.monotonic_ns()
        options, served = self.options, new or self.batch
        each_us = options.prefill_us * sum(asked.prompt for asked in new) if new else options.sequence_us * len(served)
        self.device.spin(each_us + (0 if new else options.decode_us))
        now_ns = time.monotonic_ns()
        for asked in served:
            asked.token(now_ns, self.prompts, self.pauses)
        self.prompts = [*self.prompts, (begin_ns, now_ns)] if new else []
        self.pauses = self.pauses if new else []
        self.tokens += len(served)
        if self.grants is not None:
            self.grants.stepped(begin_ns, now_ns, len(served), prefill=bool(new))
        if grants is not None:
            grants.delivered([(asked.name, 1, asked.made >= asked.tokens) for asked in served], now_ns)
        ended = [asked for asked in served if asked.made >= asked.tokens]
        with self.news:
            self.batch = [asked for asked in [*self.batch, *new] if asked.made < asked.tokens]
            self.done += ended
            self.hint()

    def pause(self, grants: Asking) -> None:
        """Here nothing is in flight: each step was waited for."""
        kept = sum(asked.prompt + asked.made for asked in self.batch)
        facts = EngineFacts(
            running=len(self.batch), prefilling=len(self.batch) - grants.readers, waiting=len(self.inbox),
            kv_used=kept, kv_pool=KV_TOKENS, kv_mapped=KV_TOKENS, max_num_seqs=MOST,
        )  # fmt: skip
        resume_ns = grants.wants(time.monotonic_ns(), facts)
        if resume_ns:
            begun_ns = self.due_ns = time.monotonic_ns()
            grants.pause(resume_ns, self.wait, is_done=True)
            self.pauses.append((begun_ns, min(self.due_ns, time.monotonic_ns())))

    def summary(self) -> dict[str, Any]:
        sums = self.grants.sums if self.grants is not None else None
        return {
            "requests": [asked.row() for asked in self.done],
            "given": sums.given if sums else 0,
            "ended_early": sums.ended_early if sums else 0,
            "paused_s": sums.paused_ns / 1e9 if sums else 0.0,
            "longest_pause_ms": sums.longest_ns / MS if sums else 0.0,
            "answers": {str(one and one.name): n for one, n in self.grants.answers.items()} if self.grants else {},
            "reasons": {one.name: n for one, n in self.grants.reasons.items()} if self.grants else {},
            "cost_ms": self.grants.policy.cost.total_ms if self.grants and self.grants.policy else None,
            "worth": self.grants.policy.expected_worth() if self.grants and self.grants.policy else None,
        }


def options_of(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    option(parser, "--requests", 200, "The number of requests.")
    option(parser, "--rate", 4.0, "The drawn requests a second.")
    option(parser, "--in-tokens", 400, "The tokens of each prompt.")
    option(parser, "--out-tokens", 40.0, "The mean number of tokens of the drawn answers.")
    option(parser, "--prefill-us", 40, "The GPU time per prompt token, in microseconds.")
    option(parser, "--decode-us", 10_000, "The GPU time of a decode step, in microseconds.")
    option(parser, "--sequence-us", 50, "The GPU time that each request adds to a step, in microseconds.")
    option(parser, "--seed", 1, "The seed of the drawn requests.")
    parser.add_argument("--hasty", action="store_true", help="Ask for pauses from the first step on.")
    parser.add_argument("--stay", action="store_true", help="After the summary wait for SIGTERM.")
    parser.add_argument("--say-pauses", action="store_true", help="Print a line as each pause begins.")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    options, link = options_of(argv), process_link()
    grants = Asking(link, settings=HASTY if options.hasty else None) if link is not None else None
    service = GrantedService(options=options, device=Device(), link=link, grants=grants)
    service.device.spin(1)
    threading.Thread(target=service.arrive, daemon=True).start()
    service.serve()
    told: list[int] = []
    if options.stay:
        signal.signal(signal.SIGTERM, lambda number, _: told.append(number))
    print(json.dumps(service.summary()), flush=True)
    while options.stay and not told:
        time.sleep(0.01)  # in one wait without end, a signal that comes just before it is never heard
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
