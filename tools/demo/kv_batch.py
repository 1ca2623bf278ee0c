"""Offline inference without a model, with content-checked KV: the batch of `valve demo memory`.

Each token of an answer is computed from what a kernel found in the request's KV blocks: their owner's tags give the
right token, anything else a wrong one. So the checksum of all answers proves that no block was lost, shared or
overwritten unnoticed, however often memory was taken away.

A request that lost a block goes back to waiting with the tokens it has, and the token of the step that was under way is
dropped: it may have been computed from nothing. It is prefilled again when there are blocks.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass

from valve_kube.options import option
from valve_tools.demo.kv_engine import KvEngine, kv_options
from valve_tools.demo.kv_memory import BLOCK_TOKENS, WORD, KvSequence, mix

IDLE_S = 0.001
COMMAND = [sys.executable, "-m", "valve_tools.demo.kv_batch"]


@dataclass(slots=True, kw_only=True)
class KvAnswer:
    """A request under way. It keeps its seat when it loses its memory."""

    id: int
    prompt: int
    length: int
    hash: int
    made: int = 0
    sequence: KvSequence | None = None


def length_of(number: int, salt: int, median: float, seed: int) -> int:
    draw = mix((number * 0x9E3779B97F4A7C15 + salt + seed * 77) & WORD) % 1024
    return 1 + int(median * (0.5 + draw / 512) * 0.8)  # 0.4 to 2 times the median


def token_of(number: int, position: int, wrong: int) -> int:
    return (mix(number << 24 ^ position) + wrong) & WORD


def right_answer(number: int, length: int) -> int:
    found = number
    for position in range(length):
        found = mix(found ^ token_of(number, position, 0))
    return found


class KvBatch(KvEngine):
    def __init__(self, options: argparse.Namespace) -> None:
        self.seats: list[KvAnswer | None] = [None] * options.kv_batch
        self.begun = self.finished = self.tokens = self.wrong = self.checksum = self.expected = 0
        self.in_step = False
        self.reported_s = 0.0
        super().__init__("demo-offline", options, rows=options.kv_batch)

    def answers(self) -> list[KvAnswer]:
        return [each for each in self.seats if each is not None]

    def lose(self, sequence: KvSequence) -> None:
        receipts = self.hook.receipts
        receipts.dropped_tokens += self.in_step
        for each in self.answers():
            if each.sequence is sequence:
                receipts.lost_tokens += each.prompt + each.made
                each.sequence = None

    def gauges(self) -> tuple[int, int, int, int]:
        used, waiting = self.held_blocks(), [each for each in self.answers() if each.sequence is None]
        wanted = used + sum((each.prompt + each.length) // BLOCK_TOKENS + 1 for each in waiting)
        return used, min(wanted, self.blocks), len(self.held), len(waiting)

    # ---- a step ----

    def wants_more(self) -> bool:
        most, limit_s = self.options.kv_requests, self.options.duration
        return not (self.stopped or (most and self.begun >= most) or (limit_s and self.elapsed_s >= limit_s))

    def sit_down(self) -> KvAnswer:
        most, seed = (self.blocks - 1) * BLOCK_TOKENS // 2, self.options.seed
        self.begun += 1
        length = min(length_of(self.begun, 2, self.options.out_tokens, seed), most - 1)  # else it would wait for ever
        prompt = min(length_of(self.begun, 1, self.options.in_tokens, seed), most - length)
        return KvAnswer(id=self.begun, prompt=prompt, length=length, hash=self.begun)

    def admit(self) -> int:
        """Seats are filled in their order. Tokens to prefill."""
        prefill = 0
        for place, answer in enumerate(self.seats):
            if answer is None and self.wants_more():
                answer = self.seats[place] = self.sit_down()
            if answer is None or answer.sequence is not None:
                continue
            tokens = answer.prompt + answer.made
            answer.sequence = self.begin(str(answer.id), answer.id, tokens, answer.prompt + answer.length)
            prefill += tokens if answer.sequence is not None else 0
        return prefill

    def run_step(self) -> bool:
        """False: no request could run."""
        prefill = self.admit()
        running = [(each, each.sequence) for each in self.answers() if each.sequence is not None]
        self.publish()
        if not running:
            return False
        self.in_step = True
        us = self.options.step_us + prefill * self.options.prefill_us
        wrong = self.memory.compute([sequence for _, sequence in running], us)
        self.hook.sync()  # before anything of the step is believed
        self.in_step = False
        for (answer, sequence), words in zip(running, wrong, strict=True):
            if answer.sequence is sequence:  # else it was hit while the step ran: its token is dropped
                self.believe(answer, sequence, words)
        return True

    def believe(self, answer: KvAnswer, sequence: KvSequence, wrong: int) -> None:
        self.wrong += wrong
        self.tokens += 1
        answer.hash = mix(answer.hash ^ token_of(answer.id, answer.made, wrong))
        answer.made += 1
        sequence.tokens += 1
        if answer.made == answer.length:
            self.end(sequence)
            self.checksum = (self.checksum + answer.hash) & WORD
            self.expected = (self.expected + right_answer(answer.id, answer.length)) & WORD
            self.finished += 1
            self.seats[self.seats.index(answer)] = None

    # ---- the run ----

    def run(self) -> None:
        while not self.stopped and (self.wants_more() or self.answers()):
            self.hook.sync()
            if self.step_ended is not None:
                self.step_ended()
            if not self.run_step():
                time.sleep(IDLE_S)
            self.print_progress()
        self.publish()

    def print_progress(self) -> None:
        if not self.options.report or self.elapsed_s - self.reported_s < self.options.report:
            return
        self.reported_s = self.elapsed_s
        line = {"t_s": self.reported_s, "now_s": time.monotonic(), "units": self.finished, "tokens": self.tokens}
        print(json.dumps({**line, "withheld": int(self.withheld.sum())}), flush=True)

    def summary(self) -> dict[str, object]:
        receipts = self.hook.receipts
        return {
            "summary": "offline",
            "units": self.finished,
            "tokens": self.tokens,
            "wall_s": self.elapsed_s,
            "checksum": f"{self.checksum:016x}",
            "expected": f"{self.expected:016x}",
            "wrong_words": self.wrong,
            "tables": self.tables,
            "lost_blocks": receipts.lost_blocks,
            "hit_requests": receipts.hit_requests,
            "lost_tokens": receipts.lost_tokens,
            "dropped_tokens": receipts.dropped_tokens,
            "ok": self.checksum == self.expected and not self.wrong,
        }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    kv_options(parser, prefill_us=5.0)
    option(parser, "--kv-requests", 0, "The number of requests to answer. 0 stands for no end until told to stop.")
    option(parser, "--kv-batch", 16, "The number of requests that are answered together.")
    option(parser, "--in-tokens", 200.0, "The median of the drawn prompts, in tokens.")
    option(parser, "--out-tokens", 60.0, "The median of the drawn answers, in tokens.")
    option(parser, "--step-us", 2000.0, "The GPU time of a step, in microseconds.")
    option(parser, "--report", 0.0, "The seconds between progress lines. 0 stands for none.")
    option(parser, "--seed", 1, "The seed of the drawn requests.")
    batch = KvBatch(parser.parse_args(argv))
    batch.run()
    print(json.dumps(batch.summary()), flush=True)
    return 0 if batch.summary()["ok"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
