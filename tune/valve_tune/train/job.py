"""The trainer: walks a job tile by tile, asks between any two whether it may go on, and can be killed anywhere."""

from __future__ import annotations

import dataclasses
import errno
import math
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from valve_tune.base.consent import NotShared
from valve_tune.base.memory import NoRoom, StashLost
from valve_tune.base.weights import BadBase, BaseChanged
from valve_tune.model.adapter import BadAdapter, Gradients
from valve_tune.model.dropout import Draw
from valve_tune.model.interface import TileModel
from valve_tune.model.names import BadTarget
from valve_tune.tiles.cursor import ForeignCursor
from valve_tune.tiles.grid import Grid, Phase, TileShape
from valve_tune.tiles.orders import layer_major, whole
from valve_tune.train.batch import Dataset, MicroBatch
from valve_tune.train.build import open_model
from valve_tune.train.guard import stand
from valve_tune.train.report import Answer, Control, End, Going, Outcome, TrainEvent
from valve_tune.train.spec import JobSpec
from valve_tune.train.state import JobState, StepSums, job_digest

Result = TypeVar("Result")
LOOK_S = 0.02  # how often a job without room for its stash looks for more


class Stopped(Exception):
    """The control said stop, between two tiles."""


class Hopeless(Exception):
    """The job cannot go on; what is on disk is whole."""


class Trainer:
    """One job. The same spec, data and base give the same bytes, however often it was paused, stopped or killed."""

    def __init__(
        self,
        spec: JobSpec,
        dataset: Dataset,
        *,
        events: Callable[[TrainEvent], None] = lambda event: None,
        control: Control | None = None,
        make_model: Callable[[JobSpec], TileModel] = open_model,
        settle: Callable[[JobSpec], None] | None = None,
    ) -> None:
        """`settle` replaces what is set for the whole process, where the process is not the trainer's."""
        self.spec, self.dataset, self.events = spec, dataset, events
        self.control = control or Going()
        self._make_model, self._settle = make_model, settle or set_process
        self._waited = 0.0
        self._needs = 0  # bytes that a micro-batch was seen not to do without

    def run(self) -> Outcome:
        """Until done, stopped or failed. Run again with the same `out` it takes up the newest whole checkpoint."""
        self._settle(self.spec)
        try:
            self.model = self._make_model(self.spec)
            held_out = self.dataset.held_out
            job = job_digest(self.spec, self.dataset.digest, held_out.digest if held_out else "")
            self.state = JobState(self.spec, self.model.adapter, base=self.model.weights.digest, job=job)
            self._resume()
            guard = stand(self.spec, self.model.weights)
        except (BadBase, NotShared, BadTarget, BadAdapter, ForeignCursor, OSError, Hopeless) as error:
            return Outcome(end=End.FAILED, step=0, message=said(error, self.spec.out))
        try:
            with guard:
                return self._guarded()
        except BaseChanged as error:  # seen at the end of a job that failed of something else, perhaps of just that
            return self._outcome(End.FAILED, str(error))

    def _guarded(self) -> Outcome:
        try:
            self._judge()  # a job that was stopped in an evaluation owes it
            while self.state.cursor.step < self.spec.max_steps and not self._has_converged():
                self._step()
                self._judge()
                if self.state.cursor.step % self.spec.save_steps == 0 and self.state.cursor.step < self.spec.max_steps:
                    self._save()
            self._save()
            adapter = self.state.finish()
        except Stopped:
            return self._ended(End.STOPPED, "stopped")
        except Hopeless as error:
            return self._ended(End.FAILED, str(error))
        except torch.OutOfMemoryError as error:
            return self._ended(End.FAILED, f"out of memory: {error}; lower max_length or per_device_train_batch_size")
        except (OSError, BadBase, NotShared) as error:
            return self._outcome(End.FAILED, said(error, self.spec.out))
        return self._outcome(End.DONE, "", adapter)

    def _ended(self, end: End, message: str) -> Outcome:
        """Keep what is done, then leave."""
        try:
            self._save()
        except (OSError, BadBase) as error:
            return self._outcome(End.FAILED, said(error, self.spec.out))
        return self._outcome(end, message)

    def _outcome(self, end: End, message: str, adapter: Path | None = None) -> Outcome:
        last = getattr(self, "_checkpoint", None)
        return Outcome(end=end, step=self.state.cursor.step, message=message, adapter=adapter, checkpoint=last)

    def _resume(self) -> None:
        self._checkpoint, faults = self.state.resume()
        for fault in faults:
            self._say("lost", f"{fault}; taking an older checkpoint")
        if self._checkpoint:
            self._say("resumed", self._checkpoint.name)

    def _step(self) -> None:
        """One optimizer step. Its loss is divided by all labels of the step, whatever micro-batch they are in."""
        step, began, waited = self.state.cursor.step, time.monotonic(), self._waited
        batches = self.dataset.step(step)
        labels = sum(batch.label_count for batch in batches)
        if not labels:
            raise Hopeless(f"step {step + 1} has no label: nothing to learn from")
        for sequence in range(self.state.cursor.sequence, len(batches)):
            self._micro_batch(batches[sequence], sequence, 1 / labels)
        loss, norm, rate = self._update(step)
        self.events(
            TrainEvent(
                kind="step",
                step=step + 1,
                loss=loss,
                tokens=sum(batch.tokens for batch in batches),
                labels=labels,
                seconds=time.monotonic() - began - (self._waited - waited),
                lr=rate,
                grad_norm=norm,
            )
        )

    def _has_converged(self) -> bool:
        return self.state.judged.is_over(self.spec.early_stopping_patience)

    def _judge(self) -> None:
        """Where an evaluation is due: the loss of what is held out, tile by tile, no dropout. It changes no byte."""
        step, held_out = self.state.cursor.step, self.dataset.held_out
        if held_out is None or not self.state.judged.is_due(step, self.spec.eval_steps, self.spec.max_steps):
            return
        began, waited, loss, labels = time.monotonic(), self._waited, 0.0, 0
        for number, batch in enumerate(held_out.once()):
            loss += self._whole(f"evaluation, batch {number + 1}", partial(self._loss_of, batch))
            labels += batch.label_count
        loss /= max(1, labels)
        self.state.judge(loss)
        self.events(
            TrainEvent(
                kind="evaluated",
                step=step,
                message=self.state.judged.said(loss)
                + ("; the job ends with that adapter" if self._has_converged() else ""),
                loss=loss if math.isfinite(loss) else None,
                labels=labels,
                seconds=time.monotonic() - began - (self._waited - waited),
            )
        )

    def _loss_of(self, batch: MicroBatch) -> float:
        grid = grid_of(self.spec, self.model, batch.input_ids.shape[1])
        work = self.model.start(batch, scale=1.0, draw=Draw(seed=0, step=0, sequence=0), grid=grid)
        try:
            for tile in layer_major(grid, Phase.FORWARD):
                self._ask(f"in an evaluation, before layer {tile.layer}, token {tile.token}")
                work.border()
                work.run(tile, partial(self._ask, f"in an evaluation, in layer {tile.layer}"))
            return work.forward_loss()
        finally:
            work.close()

    def _update(self, step: int) -> tuple[float, float, float]:
        sums = self.state.sums
        norm = self.state.optimizer.norm(sums.gradients)
        if not (sums.is_finite and math.isfinite(norm)):
            self._begin(step)
            raise Hopeless(
                f"loss {sums.loss:g}, gradient norm {norm:g} at step {step + 1}: "
                f"the adapter is kept as it was after step {step}; try a lower learning_rate, with another out"
            )
        rate = self.state.optimizer.step(step)
        self._begin(step + 1)
        return sums.loss, norm, rate

    def _begin(self, step: int) -> None:
        self.state.sums = StepSums(self.model.adapter.zeros())
        self.state.cursor = dataclasses.replace(self.state.cursor, step=step, sequence=0)

    def _micro_batch(self, batch: MicroBatch, sequence: int, scale: float) -> None:
        """Its sums are added with its last tile and after the memory was found whole: never twice, never in part."""
        loss, gradients = self._whole(f"micro-batch {sequence + 1}", lambda: self._tiles(batch, sequence, scale))
        self.state.sums.add(loss, gradients)
        self.state.cursor = dataclasses.replace(self.state.cursor, sequence=sequence + 1)

    def _whole(self, what: str, work: Callable[[], Result]) -> Result:
        """Again until its memory was whole to the end."""
        while True:
            self._find_room()
            try:
                return work()
            except NoRoom as error:
                self._needs = max(self._needs, error.needs - self.model.weights.lent_bytes)
            except StashLost as error:
                self._say("lost", f"{what}: {error}; it is done again")

    def _tiles(self, batch: MicroBatch, sequence: int, scale: float) -> tuple[float, Gradients]:
        grid = grid_of(self.spec, self.model, batch.input_ids.shape[1])
        draw = Draw(seed=self.spec.seed, step=self.state.cursor.step, sequence=sequence, share=self.spec.lora_dropout)
        work = self.model.start(batch, scale=scale, draw=draw, grid=grid)
        try:
            for tile in whole(grid):
                self._ask(f"before {tile.phase.name.lower()} of layer {tile.layer}, token {tile.token}")
                work.border()
                work.run(tile, partial(self._ask, f"in {tile.phase.name.lower()} of layer {tile.layer}"))
            return work.gradients()
        finally:
            work.close()

    def _find_room(self) -> None:
        """A micro-batch begins when the memory that is lent is as much as one is known to need."""
        memory, weights = self.model.memory, self.model.weights
        if self._needs + weights.least_bytes > memory.limit():
            raise Hopeless(
                f"stash_mib: {memory.limit() >> 20} are too few for what one micro-batch keeps; ask for more"
            )

        def fits() -> bool:
            return weights.fit(self._needs) and memory.room() >= self._needs

        if fits():
            return
        self._say("waits", f"{memory.room() + weights.lent_bytes >> 20} MiB are lent, more are needed")
        began = time.monotonic()
        while not fits():
            self._ask("waiting for memory")
            time.sleep(LOOK_S)
            memory.border()
        self._waited += time.monotonic() - began

    def _ask(self, where: str) -> None:
        self.model.weights.permitted()
        answer = self.control.answer()
        if answer is Answer.GO:
            return
        if answer is Answer.PAUSE:
            self._say("paused", where)
            began = time.monotonic()
            while answer is Answer.PAUSE:
                self.control.wait()
                self.model.weights.permitted()
                self.model.memory.border()
                answer = self.control.answer()
            self._waited += time.monotonic() - began
        if answer is Answer.STOP:
            raise Stopped

    def _save(self) -> None:
        self.model.weights.check()
        self._checkpoint = self.state.save()
        self._say("checkpoint", self._checkpoint.name)

    def _say(self, kind: str, message: str) -> None:
        self.events(TrainEvent(kind=kind, step=self.state.cursor.step, message=message))


def said(error: Exception, out: str) -> str:
    """For the one who reads why a job ended; `out`: where it writes, if the error names no file."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"disk full: {error.filename or out}; free some space and run again"
    return str(error)


def grid_of(spec: JobSpec, model: TileModel, tokens: int) -> Grid:
    if spec.span and not model.spans:
        raise Hopeless("span: this model's tiles are whole sequences; leave span at 0")
    shape = TileShape(layers=spec.layers_per_tile, span=spec.span)
    return Grid(layers=model.layers, tokens=tokens, forward=shape, backward=shape)


def set_process(spec: JobSpec) -> None:
    if spec.threads:
        torch.set_num_threads(spec.threads)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS is not deterministic
    torch.use_deterministic_algorithms(spec.deterministic)
