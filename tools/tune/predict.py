"""`python tools/tune/predict.py`: how well a step of a real vLLM on this CPU is predicted, beside how well the
step repeats itself.

Readers of three contexts are there from the start; each batch is some of them, with or without a prompt. A third of
the batches is held out: the predictor never hears how long they took. Its error there is compared with what remains
if each batch's own median is known. CPU time on one thread. Needs the engines' environment and the exported hook.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from fused import ENGINE_ENVIRONMENT, make
from valve_tune.options import option

READERS, CONTEXTS, PROMPTS = (1, 2, 4, 8, 12), (32, 256, 1024), (0, 24, 96, 256)
MARK = 1.3


class Batch(NamedTuple):
    readers: int
    context: int
    prompt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """Relative, absolute values."""

    mean: float
    p95: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Errors:
        ordered = sorted(values)
        return cls(mean=statistics.fmean(ordered), p95=ordered[int(0.95 * (len(ordered) - 1))], most=ordered[-1])


def held_out(seed: int) -> set[Batch]:
    every = [Batch(*each) for each in ((r, c, p) for r in READERS for c in CONTEXTS for p in PROMPTS)]
    return set(random.Random(seed).sample(every, len(every) // 3))


def judged(steps: Sequence[tuple[Batch, float, float]]) -> tuple[Errors, Errors]:
    """(of the predictor, of the step itself) over (batch, measured, predicted). A step is compared with the median of
    the other steps of its batch.
    """
    by_batch: dict[Batch, list[float]] = defaultdict(list)
    for batch, ms, _ in steps:
        by_batch[batch].append(ms)
    own = []
    for values in by_batch.values():
        for number, value in enumerate(values):
            others = values[:number] + values[number + 1 :]
            own.append(abs(value / statistics.median(others) - 1.0))
    return Errors.of([abs(ms / said - 1.0) for _, ms, said in steps]), Errors.of(own)


class MeasuredEngine:
    """A vLLM in this process whose steps are told to a predictor as the lane in its worker tells them."""

    def __init__(self, model: str) -> None:
        from transformers import AutoConfig
        from valve_hook.cotrain.idle import Idle
        from valve_tune.engine.fitted import FittedPredictor
        from valve_tune.engine.lane import StepView
        from valve_tune.engine.planners import laws_of, machine
        from valve_tune.model.family import shape_of
        from vllm import LLM

        self.llm = LLM(
            model=model,
            dtype="float32",
            enforce_eager=True,
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
            max_model_len=2048,
            max_num_batched_tokens=2048,
            max_num_seqs=64,
            block_size=32,
            num_gpu_blocks_override=1200,
            disable_log_stats=True,
        )
        self.core = self.llm.llm_engine.engine_core.engine_core
        self._worker = self.core.model_executor.driver_worker.worker
        self._execute, self._sample = self._worker.execute_model, self._worker.sample_tokens
        self._worker.execute_model, self._worker.sample_tokens = self._began, self._ended
        self.predictor = FittedPredictor(laws_of(shape_of(AutoConfig.from_pretrained(model)), 32, *machine()))
        self.view, self._planner, self._ms = StepView(), Idle(), 0.0
        self.readers: dict[int, list[Any]] = {}
        self._chance, self._number = random.Random(1), 0

    def _began(self, output: Any) -> Any:
        self.view.scheduled(output, time.monotonic() * 1e3, self._planner)
        self._since = time.process_time()
        return self._execute(output)

    def _ended(self, grammar: Any) -> Any:
        made = self._sample(grammar)
        self._ms = (time.process_time() - self._since) * 1e3
        return made

    def _add(self, tokens: int, answer: int) -> None:
        from vllm import SamplingParams

        self._number += 1
        prompt = {"prompt_token_ids": [self._chance.randrange(3, 2048) for _ in range(tokens)]}
        how = SamplingParams(temperature=0.0, max_tokens=answer, ignore_eos=True, detokenize=False)
        self.llm.llm_engine.add_request(str(self._number), prompt, how)

    def begin(self) -> None:
        scheduler = self.core.scheduler
        for context in CONTEXTS:
            scheduler.running = []
            for _ in range(max(READERS)):
                self._add(context, 900)
            while len(scheduler.running) < max(READERS) or any(not r.num_output_tokens for r in scheduler.running):
                self.llm.llm_engine.step()
            self.readers[context] = list(scheduler.running)

    def step(self, batch: Batch) -> float:
        """ms of one step of this batch. Another before it, of the same readers, settles the runner's own lists."""
        scheduler = self.core.scheduler
        scheduler.running = self.readers[batch.context][: batch.readers]
        self.llm.llm_engine.step()
        if batch.prompt:
            self._add(batch.prompt, 1)
        self.llm.llm_engine.step()
        if self.view.state.running != batch.readers or self.view.state.prompt_tokens != batch.prompt:
            raise RuntimeError(f"vLLM made another batch than {batch}: {self.view.state}")
        return self._ms


def measure(engine: MeasuredEngine, rounds: int, seed: int) -> list[tuple[Batch, float, float]]:
    """(batch, ms, what was said before) of the held-out batches; the others are what the predictor learns from."""
    from valve_hook.cotrain.interface import ALONE

    out, found = held_out(seed), []
    every = [Batch(r, c, p) for r in READERS for c in CONTEXTS for p in PROMPTS]
    chance = random.Random(seed)
    for number in range(rounds + 1):
        chance.shuffle(every)
        for batch in every:
            ms = engine.step(batch)
            if batch not in out:
                engine.predictor.observe(engine.view.state, ALONE, ms)
            elif number:  # the first round teaches alone
                found.append((batch, ms, engine.predictor.ms(engine.view.state, ALONE)))
    return found


def row(name: str, errors: Errors) -> str:
    return f"| {name} | {errors.mean:.1%} | {errors.p95:.1%} | {errors.most:.1%} |"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python tools/tune/predict.py", description=__doc__)
    option(parser, "--hidden", 512, "The width of the model, a number of elements.")
    option(parser, "--layers", 8, "The number of layers.")
    option(parser, "--rounds", 6, "The number of rounds.")
    option(parser, "--seed", 0, "The seed of the drawn batches.")
    asked = parser.parse_args(arguments)
    os.environ |= ENGINE_ENVIRONMENT
    with tempfile.TemporaryDirectory() as work:
        make(Path(work), asked.hidden, asked.layers, "float32")
        engine = MeasuredEngine(f"{work}/model")
    engine.begin()
    before = os.getloadavg()[0]
    steps = measure(engine, asked.rounds, asked.seed)
    said, own = judged(steps)
    whole = f"{len(steps)} steps of {len({batch for batch, _, _ in steps})} held-out batches"
    print(f"{whole}, CPU time on one thread, load {before:.1f} to {os.getloadavg()[0]:.1f}\n")
    print("| | mean | p95 | max |\n|---|---|---|---|")
    print("\n".join([row("error of the predictor", said), row("the step against its own median", own)]))
    ratios = said.mean / own.mean, said.p95 / own.p95
    kept = "kept" if max(ratios) <= MARK else "MISSED"
    print(f"\nratio: mean {ratios[0]:.2f}, p95 {ratios[1]:.2f}; mark {MARK}: {kept}")
    sys.stdout.flush()
    os._exit(0)  # vLLM's readers are still there


if __name__ == "__main__":
    main()
