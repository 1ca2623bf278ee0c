"""One job from its job file to its outcome, on the command line and in a worker of the service alike."""

from __future__ import annotations

import dataclasses
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from valve_tune.serve.folder import STOP, FolderError, JobFolder
from valve_tune.train.batch import Dataset
from valve_tune.train.data import Rows, load
from valve_tune.train.lines import DataError
from valve_tune.train.report import Control, End, Outcome, TrainEvent
from valve_tune.train.spec import JobSpec, SpecError


class Runs(Protocol):
    """What `train.job.Trainer` is."""

    def run(self) -> Outcome: ...


class MakesTrainer(Protocol):
    def __call__(
        self, spec: JobSpec, dataset: Dataset, *, events: Callable[[TrainEvent], None], control: Control
    ) -> Runs: ...


class JobListener(Protocol):
    """What hears a job's events and its state."""

    step: int

    def __call__(self, event: TrainEvent) -> None: ...

    def state(self, state: str, message: str) -> None: ...


def real_trainer(spec: JobSpec, dataset: Dataset, *, events: Callable[[TrainEvent], None], control: Control) -> Runs:
    from valve_tune.train.job import Trainer

    return Trainer(spec, dataset, events=events, control=control)


def tokenizer_of(model: str) -> Any:
    from transformers import AutoTokenizer

    if not Path(model).is_dir():
        raise SpecError("model", f"{model} is no folder")
    if not (Path(model) / "config.json").is_file():
        raise SpecError("model", f"{model} holds no config.json: a base is a folder as transformers saves it")
    try:
        tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
    except Exception as error:
        raise SpecError("model", f"{model} has no tokenizer that loads: {error}") from None
    if not tokenizer.is_fast:
        raise SpecError("model", f"{model}: its tokenizer has no tokenizer.json, which says where each token stands")
    return tokenizer


def rows_of(values: dict[str, Any], passes: float | None = None) -> tuple[JobSpec, Rows]:
    """The job and its data. Without `max_steps` the data says how many steps `passes` over it take."""
    spec = JobSpec.from_values({"max_steps": 10_000_000, **values})
    rows = load(spec, tokenizer_of(spec.model))
    if "max_steps" not in values:
        if passes is None or not 0 < passes <= 10_000:
            raise SpecError("num_train_epochs", f"must be above 0 and at most 10000, not {passes}")
        spec = dataclasses.replace(spec, max_steps=max(1, round(passes * rows.steps_per_pass)))
    return spec, rows


def carry_out(
    folder: JobFolder,
    spec: JobSpec,
    rows: Rows,
    control: Control,
    watcher: JobListener,
    make: MakesTrainer = real_trainer,
) -> Outcome:
    """Run or resume the job in its folder, which the caller has claimed. Every end is said in the folder."""
    held_out = rows.held_out.digest if rows.held_out is not None else ""
    folder.same_data(rows.digest, held_out, decides=bool(spec.early_stopping_patience))
    watcher.state("running", "")
    try:
        outcome = make(spec, rows, events=watcher, control=control).run()
    except (SpecError, DataError, FolderError) as error:
        outcome = Outcome(end=End.FAILED, step=watcher.step, message=str(error))
    except sqlite3.Error:  # of the service's database, and no fault of the job's
        raise
    except MemoryError:
        outcome = Outcome(
            end=End.FAILED, step=watcher.step, message="out of memory; take a smaller max_length or batch"
        )
    except Exception as error:
        outcome = Outcome(end=End.FAILED, step=watcher.step, message=f"{type(error).__name__}: {error}")
    watcher.state(state_after(outcome, folder), outcome.message)
    return outcome


def state_after(outcome: Outcome, folder: JobFolder) -> str:
    if outcome.end is End.STOPPED:
        return "cancelled" if folder.wanted() == STOP else "stopped"
    return "succeeded" if outcome.end is End.DONE else "failed"
