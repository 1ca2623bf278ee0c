"""All of a job that outlives a process: adapter, moments, cursor, and the sums of a step that was stopped in it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load as parse_tensors
from safetensors.torch import save as tensor_bytes

from valve_tune.model.adapter import Adapter, Gradients
from valve_tune.tiles.cursor import Cursor
from valve_tune.train import checkpoint
from valve_tune.train.judged import Judged
from valve_tune.train.optimizer import Optimizer
from valve_tune.train.spec import HOW, LOOKS, JobSpec

ADAPTER, CONFIG = "adapter_model.safetensors", "adapter_config.json"
CURSOR, MOMENTS, SUMS = "cursor.json", "optimizer.safetensors", "sums.safetensors"
JUDGED, BEST = "evaluations.json", "best.safetensors"
FREE = {"model", "data", "out", *HOW}  # places; their contents are in the digest


def job_digest(spec: JobSpec, data: str, held_out: str = "") -> str:
    """Of everything that decides the bytes of the adapter, beside the base: evaluations, where they may end it."""
    fields = {name: value for name, value in dataclasses.asdict(spec).items() if name not in FREE | LOOKS}
    ends = [spec.eval_steps, spec.early_stopping_patience, held_out] if spec.early_stopping_patience else []
    return hashlib.sha256(json.dumps([fields, data, *ends], sort_keys=True).encode()).hexdigest()


@dataclass(slots=True)
class StepSums:
    """What the finished micro-batches of one optimizer step have added up."""

    gradients: Gradients
    loss: float = 0.0
    sequence: int = 0

    def add(self, loss: float, gradients: Gradients) -> None:
        for path, pair in gradients.items():
            self.gradients[path].a += pair.a
            self.gradients[path].b += pair.b
        self.loss += loss
        self.sequence += 1

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.loss)


class JobState:
    """Saved as one checkpoint, loaded from the newest whole one."""

    def __init__(self, spec: JobSpec, adapter: Adapter, *, base: str, job: str) -> None:
        self.spec, self.adapter, self.out = spec, adapter, Path(spec.out)
        self.optimizer = Optimizer(spec, adapter)
        self.cursor = Cursor(base=base, job=job)
        self.sums = StepSums(adapter.zeros())
        self.judged = Judged()
        self._best = b""  # the adapter of the best evaluation, where that may end the job

    def judge(self, loss: float) -> None:
        """An evaluation of the adapter as it is now."""
        self.judged = self.judged.after(self.cursor.step, loss)
        if self.spec.early_stopping_patience and self.judged.best_step == self.cursor.step:
            self._best = self.adapter.to_bytes()

    def save(self) -> Path:
        files = self._adapter_files() | {MOMENTS: self.optimizer.to_bytes(), CURSOR: self.cursor.text().encode()}
        if self.cursor.sequence:
            files[SUMS] = self._sums_bytes()
        if self.judged.at:
            files[JUDGED] = self.judged.text().encode()
        if self._best:
            files[BEST] = self._best
        return checkpoint.save(self.out, self.cursor.step, files, self.spec.save_total_limit)

    def finish(self) -> Path:
        """The adapter itself, config last: an engine that sees a config may load."""
        self.out.mkdir(parents=True, exist_ok=True)
        files = self._adapter_files() | ({ADAPTER: self._best} if self._best else {})
        for name, content in files.items():
            checkpoint.write_file(self.out / name, content)
        return self.out

    def _adapter_files(self) -> dict[str, bytes]:
        config = self.adapter.config(self.spec.model, self.spec.lora_dropout)
        return {ADAPTER: self.adapter.to_bytes(), CONFIG: config.encode()}

    def _sums_bytes(self) -> bytes:
        named: dict[str, torch.Tensor] = {"loss": torch.tensor(self.sums.loss, dtype=torch.float64)}
        for path, pair in self.sums.gradients.items():
            named |= {f"{path}.a": pair.a.detach().cpu().contiguous(), f"{path}.b": pair.b.detach().cpu().contiguous()}
        document: bytes = tensor_bytes(named)
        return document

    def resume(self) -> tuple[Path | None, list[str]]:
        """(the checkpoint taken up, what was wrong with newer ones). A checkpoint of another job is refused."""
        self.out.mkdir(parents=True, exist_ok=True)
        folder, faults = checkpoint.newest(self.out)
        checkpoint.sweep(self.out)
        if folder is None:
            checkpoint.put_damaged_aside(self.out)
            return None, faults
        cursor = Cursor.parse((folder / CURSOR).read_text())
        cursor.check(base=self.cursor.base, job=self.cursor.job)
        checkpoint.put_damaged_aside(self.out)
        self.adapter.load((folder / ADAPTER).read_bytes())
        self.optimizer.load((folder / MOMENTS).read_bytes())
        self.cursor, self.sums = cursor, StepSums(self.adapter.zeros())
        if cursor.sequence:
            self._load_sums((folder / SUMS).read_bytes())
        if (folder / JUDGED).exists():
            self.judged = Judged.parse((folder / JUDGED).read_text())
        if (folder / BEST).exists():
            self._best = (folder / BEST).read_bytes()
        return folder, faults

    def _load_sums(self, document: bytes) -> None:
        named = parse_tensors(document)
        for path, pair in self.sums.gradients.items():
            pair.a.copy_(named[f"{path}.a"])
            pair.b.copy_(named[f"{path}.b"])
        self.sums.loss, self.sums.sequence = float(named["loss"]), self.cursor.sequence
