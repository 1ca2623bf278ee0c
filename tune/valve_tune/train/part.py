"""A trainer's part of a fleet job: the micro-batches it is handed, from one version of the adapter on.

A micro-batch's sums are added once, with its last tile. Its number says its data and its dropout, so every trainer
computes the same. An optimizer step ends with as many micro-batches as the job's steps have, or with the round.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from valve_tune.model.adapter import Gradients
from valve_tune.model.interface import TileModel
from valve_tune.train import average
from valve_tune.train.average import FROZEN_A, Part, pairs_bytes, pairs_from, parcel, unparcel
from valve_tune.train.batch import Dataset
from valve_tune.train.build import open_model
from valve_tune.train.job import Trainer, set_process
from valve_tune.train.optimizer import Optimizer
from valve_tune.train.report import Control, TrainEvent
from valve_tune.train.spec import JobSpec
from valve_tune.train.state import JobState, job_digest

ADAPTER, MOMENTS, RESIDUAL = "adapter", "moments", "residual"


class PartTrainer(Trainer):
    def __init__(
        self,
        spec: JobSpec,
        dataset: Dataset,
        method: str,
        *,
        control: Control | None = None,
        events: Callable[[TrainEvent], None] = lambda event: None,
        make_model: Callable[[JobSpec], TileModel] = open_model,
    ) -> None:
        super().__init__(spec, dataset, control=control, events=events, make_model=make_model)
        set_process(spec)
        self.method = method
        self.digest = job_digest(spec, dataset.digest)
        self.model = make_model(spec)
        self.state = JobState(spec, self.model.adapter, base=self.model.weights.digest, job=self.digest)
        self._first = average.pairs_of(self.model.adapter)  # as the seed makes it
        self._residual = b""
        self.begin(b"", b"", 0, 0)

    def begin(self, start: bytes, push: bytes, tokens: int, steps: int) -> None:
        """A round: from its version, with new moments; from this trainer's own last push, if there is one."""
        files = unparcel(start) if start else {}
        average.put(self.model.adapter, pairs_from(files[ADAPTER]) if files else self._first)
        self._residual = files.get(RESIDUAL, b"")
        frozen = ".lora_A." if self.method == FROZEN_A else ""
        self.state.optimizer = Optimizer(self.spec, self.model.adapter, frozen=frozen)
        if push:
            there = unparcel(push)
            average.put(self.model.adapter, pairs_from(there[ADAPTER]))
            self.state.optimizer.load(there[MOMENTS])
        self.tokens, self.steps = tokens, steps
        self.since_push: list[int] = []  # micro-batches that are in the adapter and in no push
        self.steps_since_push = 0
        self._clear()

    def _clear(self) -> None:
        self._begin(self.state.cursor.step)
        self._open: list[int] = []
        self._labels = self._open_tokens = 0

    def ask(self) -> None:
        """Between two micro-batches: see `Trainer._ask`."""
        self._ask("between two micro-batches")

    def compute(self, number: int) -> None:
        step, sequence = divmod(number, self.spec.gradient_accumulation_steps)
        batch = self.dataset.step(step)[sequence]
        self.state.cursor = dataclasses.replace(self.state.cursor, step=step, sequence=sequence)

        def tiles() -> tuple[float, Gradients]:
            return self._tiles(batch, sequence, 1.0)

        loss, gradients = self._whole(f"micro-batch {number}", tiles)
        self.state.sums.add(loss, gradients)
        self._open.append(number)
        self._labels += batch.label_count
        self._open_tokens += batch.tokens
        if len(self._open) == self.spec.gradient_accumulation_steps:
            self.step()

    def step(self) -> None:
        """With what was added up; nothing if that is nothing."""
        if not self._open:
            return
        if not self._labels:  # nothing to learn from, and no other trainer need look at them again
            self._done(0)
            return
        sums = self.state.sums
        for pair in sums.gradients.values():
            pair.a /= self._labels
            pair.b /= self._labels
        sums.loss /= self._labels
        step = self.state.cursor.step
        loss, norm, rate = self._update(step)
        self.events(
            TrainEvent(
                kind="step",
                step=step + 1,
                loss=loss,
                tokens=self._open_tokens,
                labels=self._labels,
                lr=rate,
                grad_norm=norm,
            )
        )
        self._done(1)

    def _done(self, steps: int) -> None:
        self.since_push += self._open
        self.tokens += self._open_tokens
        self.steps += steps
        self.steps_since_push += 1
        self._clear()

    def pushed(self) -> None:
        self.since_push, self.steps_since_push = [], 0

    def document(self) -> bytes:
        """What a push holds."""
        self.model.weights.check()
        pairs = pairs_bytes(average.pairs_of(self.model.adapter))
        return parcel({ADAPTER: pairs, MOMENTS: self.state.optimizer.to_bytes()})

    def averaged(self, parts: list[tuple[bytes, int]]) -> bytes:
        """The next version, of the last push of each trainer and its tokens."""
        residual = pairs_from(self._residual) if self._residual else {}
        taken = [Part(pairs=pairs_from(unparcel(document)[ADAPTER]), tokens=tokens) for document, tokens in parts]
        pairs, left = average.average(taken, self.method, residual)
        return parcel({ADAPTER: pairs_bytes(pairs), **({RESIDUAL: pairs_bytes(left)} if left else {})})
