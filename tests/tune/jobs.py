"""Tiny jobs: a model on disk, data in memory, controls that stop or kill at a given tile."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import torch
from valve_tune.train.batch import IGNORED, MicroBatch
from valve_tune.train.job import Trainer
from valve_tune.train.report import Answer, End, Outcome, TrainEvent
from valve_tune.train.spec import JobSpec

ADAPTER = "adapter_model.safetensors"


class Counting:
    """Rows that count upwards from a random start: easy to learn."""

    held_out: Any = None

    def __init__(self, spec: JobSpec, length: int = 12) -> None:
        self.spec, self.length, self.digest = spec, length, "counting"

    def rows(self, step: int) -> np.ndarray:
        count = self.spec.per_device_train_batch_size * self.spec.gradient_accumulation_steps
        start = np.random.default_rng([self.spec.seed, step]).integers(0, 50, (count, 1))
        return (start + np.arange(self.length)) % oracle.WIDTHS["vocab_size"]

    def step(self, step: int) -> Sequence[MicroBatch]:
        rows = self.rows(step)
        labels = rows.copy()
        labels[:, :2] = IGNORED
        one, where = np.ones_like(rows), np.tile(np.arange(self.length), (len(rows), 1))
        size = self.spec.per_device_train_batch_size
        return [
            MicroBatch(
                input_ids=rows[at : at + size],
                labels=labels[at : at + size],
                segments=one[at : at + size],
                positions=where[at : at + size],
            )
            for at in range(0, len(rows), size)
        ]


def model_folder(folder: Path, name: str = "llama") -> Path:
    if not folder.exists():
        torch.manual_seed(2)
        model = oracle.make(name, torch.float32)
        model.config._attn_implementation = "sdpa"
        model.save_pretrained(folder)
    return folder


def job(model: Path, out: Path, **more: Any) -> JobSpec:
    fields: dict[str, Any] = {
        "max_steps": 4,
        "lora_r": 4,
        "learning_rate": 5e-3,
        "gradient_accumulation_steps": 2,
        "max_length": 16,
        "save_steps": 2,
        "span": 8,
        "layers_per_tile": 2,
        "lora_dropout": 0.1,
        "warmup_steps": 1,
    }
    return JobSpec(model=str(model), data="none", out=str(out), **(fields | more))


class At:
    """Does something at one tile; counts all."""

    def __init__(self, tile: int = -1, act: Callable[[], Answer] = lambda: Answer.STOP) -> None:
        self.tile, self.act, self.asked, self.waits = tile, act, 0, 0

    def answer(self) -> Answer:
        self.asked += 1
        return self.act() if self.asked == self.tile else Answer.GO

    def wait(self) -> None:
        self.waits += 1


def kill() -> Answer:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("alive")


def train(spec: JobSpec, control: Any = None, events: list[TrainEvent] | None = None, **more: Any) -> Outcome:
    told = events if events is not None else []
    return Trainer(spec, Counting(spec), events=told.append, control=control, **more).run()


def finished(spec: JobSpec, **more: Any) -> bytes:
    outcome = train(spec, **more)
    assert outcome.end is End.DONE, outcome.message
    return adapter_bytes(spec)


def adapter_bytes(spec: JobSpec) -> bytes:
    return (Path(spec.out) / ADAPTER).read_bytes()


def in_child(work: Callable[[], None]) -> int:
    """Run in a forked process; its wait status."""
    child = os.fork()
    if not child:
        try:
            work()
        finally:
            os._exit(0)
    return os.waitpid(child, 0)[1]
