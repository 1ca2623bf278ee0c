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
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from fused import ENGINE_ENVIRONMENT, make
from fused_side import BLOCK_TOKENS, SteppedEngine
from valve_tune.options import option

READERS, CONTEXTS, PROMPTS = (1, 2, 4, 8, 12), (32, 256, 1024), (0, 24, 96, 256)
MARK = 1.3


class Batch(NamedTuple):
    readers: int
    context: int
    prompt: int


EVERY = [Batch(*each) for each in product(READERS, CONTEXTS, PROMPTS)]


class Errors(NamedTuple):
    """Of relative, absolute errors."""

    mean: float
    p95: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Errors:
        return cls(float(np.mean(values)), float(np.percentile(values, 95)), max(values))


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


class MeasuredEngine(SteppedEngine):  # type: ignore[misc]
    """Its steps are told to a predictor as the lane in its worker tells them."""

    def __init__(self, model: str) -> None:
        from transformers import AutoConfig
        from valve_hook.cotrain.idle import Idle
        from valve_tune.engine.fitted import FittedPredictor
        from valve_tune.engine.lane import StepView
        from valve_tune.engine.planners import laws_of, machine
        from valve_tune.model.family import shape_of

        super().__init__(model, "float32", 2048, 1200, max_num_seqs=64)
        self._execute, self._sample = self.worker.execute_model, self.worker.sample_tokens
        self.worker.execute_model, self.worker.sample_tokens = self._began, self._ended
        laws = laws_of(shape_of(AutoConfig.from_pretrained(model)), BLOCK_TOKENS, *machine())
        self.predictor = FittedPredictor(laws)
        self.view, self._planner, self._ms = StepView(), Idle(), 0.0
        self.readers: dict[int, list[Any]] = {}

    def _began(self, output: Any) -> Any:
        self.view.scheduled(output, time.monotonic() * 1e3, self._planner)
        self._since = time.process_time()
        return self._execute(output)

    def _ended(self, grammar: Any) -> Any:
        made = self._sample(grammar)
        self._ms = (time.process_time() - self._since) * 1e3
        return made

    def begin(self) -> None:
        scheduler = self.core.scheduler
        for context in CONTEXTS:
            scheduler.running = []
            for _ in range(max(READERS)):
                self.add(context, 900)
            while len(scheduler.running) < max(READERS) or any(not r.num_output_tokens for r in scheduler.running):
                self.llm.llm_engine.step()
            self.readers[context] = list(scheduler.running)

    def step(self, batch: Batch) -> float:
        """ms of one step of this batch. Another before it, of the same readers, settles the runner's own lists."""
        scheduler = self.core.scheduler
        scheduler.running = self.readers[batch.context][: batch.readers]
        self.llm.llm_engine.step()
        if batch.prompt:
            self.add(batch.prompt, 1)
        self.llm.llm_engine.step()
        if self.view.state.running != batch.readers or self.view.state.prompt_tokens != batch.prompt:
            raise RuntimeError(f"vLLM made another batch than {batch}: {self.view.state}")
        return self._ms


def measure(engine: MeasuredEngine, rounds: int, seed: int) -> list[tuple[Batch, float, float]]:
    """(batch, ms, what was said before) of the held-out batches; the others are what the predictor learns from."""
    from valve_hook.cotrain.interface import ALONE

    every, found = list(EVERY), []
    chance = random.Random(seed)
    out = set(chance.sample(every, len(every) // 3))
    for number in range(rounds + 1):
        chance.shuffle(every)
        for batch in every:
            ms = engine.step(batch)
            if batch not in out:
                engine.predictor.observe(engine.view.state, ALONE, ms)
            elif number:  # the first round teaches alone
                found.append((batch, ms, engine.predictor.ms(engine.view.state, ALONE)))
    return found


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
    for name, errors in (("error of the predictor", said), ("the step against its own median", own)):
        print(f"| {name} | {errors.mean:.1%} | {errors.p95:.1%} | {errors.most:.1%} |")
    ratios = said.mean / own.mean, said.p95 / own.p95
    kept = "kept" if max(ratios) <= MARK else "MISSED"
    print(f"\nratio: mean {ratios[0]:.2f}, p95 {ratios[1]:.2f}; mark {MARK}: {kept}")
    sys.stdout.flush()
    os._exit(0)  # vLLM's readers are still there


if __name__ == "__main__":
    main()
