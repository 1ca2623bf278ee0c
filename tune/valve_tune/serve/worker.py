"""One process per base: all jobs of that base, one thread each, one at work at a time. It dies with the service, or
ends when nothing is left to do; another takes every job up where its last checkpoint stands.

What the jobs share: one copy of the base's weights per dtype (Llama family; other families read one each), and the
process. A crash of it interrupts them all.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import fcntl
import hashlib
import json
import os
import signal
import sqlite3
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from valve_tune.serve.folder import GO, JobFolder
from valve_tune.serve.receipt import TrainedTokens, process_link
from valve_tune.serve.recorder import Recorder
from valve_tune.serve.runner import MakesTrainer, Runs, carry_out, rows_of
from valve_tune.serve.store import Row, TuneStore
from valve_tune.serve.turns import StepTurns
from valve_tune.train.batch import Dataset
from valve_tune.train.report import Answer, Control, End, Outcome, TrainEvent
from valve_tune.train.spec import JobSpec

LOOK_S = 0.1  # how soon a wish is heard
IDLE_LOOKS = 50  # looks with nothing to do until the process ends
DEATHS = 5  # of workers at one step of a job, which fails then: it may be what kills them
DATABASE_S = 1.0  # until a job that could not write to the database is begun again
NO_DATABASE = 75  # exit code (EX_TEMPFAIL): no job and no base is to blame
AT_ONCE = 8  # jobs in training; the next wait in line
PR_SET_PDEATHSIG = 1


class TurnControl:
    """Answers a trainer: its owner's wish first, then whether it is its turn (by waiting for it)."""

    def __init__(self, job: str, turns: StepTurns, weight: float) -> None:
        self.wanted = "go"
        self.is_leaving = False  # the process ends; the job does not
        self._job, self._turns, self._weight = job, turns, weight

    def _wish(self) -> Answer:
        if self.is_leaving or self.wanted == "cancel":
            return Answer.STOP
        return Answer.PAUSE if self.wanted == "pause" else Answer.GO

    def answer(self) -> Answer:
        wish = self._wish()
        if wish is Answer.GO and self._turns.enter(self._job, lambda: self._wish() is not Answer.GO):
            return Answer.GO
        self._turns.leave(self._job, self._weight)
        return self._wish()

    def step_done(self) -> None:
        self._turns.border(self._job, self._weight)

    def wait(self) -> None:
        time.sleep(LOOK_S)


class JobWatcher:
    """Writes what a trainer says into the job's folder and into the database."""

    def __init__(self, store: TuneStore, job: str, recorder: Recorder, control: TurnControl) -> None:
        self._store, self._job, self._recorder, self._control = store, job, recorder, control
        self._losses: dict[str, float | None] = {}
        self.step = recorder.step

    def __call__(self, event: TrainEvent) -> None:
        self.step = event.step
        self._recorder(event)
        if event.kind == "step":
            self._losses = {"train_loss": event.loss}
            data = {"step": event.step, "train_loss": event.loss, "learning_rate": event.lr, "tokens": event.tokens}
            said = "-" if event.loss is None else f"{event.loss:.4f}"
            self._store.stepped(self._job, event.step, event.tokens, f"Step {event.step}: training loss {said}", data)
            self._control.step_done()
        elif event.kind == "checkpoint":
            self._store.saved(self._job, event.step, {"step": event.step, **self._losses})
        elif event.kind == "evaluated":
            self._losses["full_valid_loss"] = event.loss
            self._store.say(self._job, f"Step {event.step}: validation {event.message}")
        elif event.kind == "paused":
            self._store.move(self._job, "paused", ("running",))
        else:
            level = "warn" if event.kind in ("warning", "lost") else "info"
            self._store.say(self._job, f"{event.kind} at step {event.step} {event.message}".rstrip(), level)
        if event.kind != "paused" and self._control.wanted == "go":
            self._store.move(self._job, "running", ("paused",))

    def state(self, state: str, message: str) -> None:
        self._recorder.state(state, message)


class Bases:
    """One copy of the weights per base and dtype, for all jobs of this process."""

    def __init__(self) -> None:
        self._copies: dict[tuple[str, str], Any] = {}
        self._lock = threading.Lock()

    def trainer(
        self, spec: JobSpec, dataset: Dataset, *, events: Callable[[TrainEvent], None], control: Control
    ) -> Runs:
        from valve_tune.train.job import Trainer

        return Trainer(spec, dataset, events=events, control=control, make_model=self._model)

    def _model(self, spec: JobSpec) -> Any:
        """A family whose tiles are written out takes weights that are there; any other reads a copy of its own."""
        import torch
        from transformers import AutoConfig

        from valve_tune.base.own import OwnCopy
        from valve_tune.model.family import obstacle
        from valve_tune.train.build import open_model

        config = AutoConfig.from_pretrained(spec.model, local_files_only=True)
        if obstacle(config, spec.max_length):
            return open_model(spec)
        with self._lock:
            if (spec.model, spec.dtype) not in self._copies:
                device = "cuda" if torch.cuda.is_available() else "cpu"
                dtype = getattr(torch, spec.dtype)
                copy = OwnCopy.read(Path(spec.model), config.num_hidden_layers, dtype, device)
                self._copies[spec.model, spec.dtype] = copy
        return open_model(spec, weights=self._copies[spec.model, spec.dtype])


class BaseWorker:
    def __init__(self, store: TuneStore, base: str, model: str, make: MakesTrainer | None = None) -> None:
        self._store, self._base, self._model = store, base, model
        self._make = Bases().trainer if make is None else make
        self._turns = StepTurns(taken=self._took, left=self._let_go)
        self._threads: dict[str, threading.Thread] = {}
        self._controls: dict[str, TurnControl] = {}
        self._leaving = threading.Event()
        self._trained = TrainedTokens(process_link())

    def leave(self) -> None:
        self._leaving.set()

    def _took(self, job: str) -> None:
        self._store.hold(self._base, job)

    def _let_go(self, job: str) -> None:
        with contextlib.suppress(sqlite3.Error):  # the next holder is written over it; it must not cost the turn
            self._store.let_go(self._base, job)

    def run(self) -> None:
        """Until told to leave, or until there was nothing to do for a while."""
        idle, has_looked = 0, False
        while idle < IDLE_LOOKS and not self._leaving.is_set():
            try:
                idle = 0 if self._look() else idle + 1
                if not has_looked:
                    self._store.looked(self._base, os.getpid())
                    has_looked = True
            except sqlite3.Error as error:  # a full disk, a locked database: both pass
                print(f"valve tune: {self._base}: the database: {error}", file=sys.stderr)
            self._leaving.wait(LOOK_S)
        for control in self._controls.values():
            control.is_leaving = True
        for thread in self._threads.values():
            thread.join()

    def _look(self) -> bool:
        """Hear wishes, begin what waits. Whether there is anything to do."""
        # First: a row that is read while its thread still ends would begin the job that has just ended once more.
        for job in [job for job, thread in self._threads.items() if not thread.is_alive()]:
            del self._threads[job], self._controls[job]
        live = self._store.live(self._base)
        for row in live:
            job = row["id"]
            if job in self._threads:
                self._controls[job].wanted = row["wanted"]
            elif row["wanted"] == "cancel":
                self._store.move(job, "cancelled")
            elif row["wanted"] == "pause":
                self._store.move(job, "paused")
            elif len(self._threads) < AT_ONCE:
                self._begin(row)
        return bool(self._threads) or any(row["wanted"] != "pause" for row in live)

    def _begin(self, row: Row) -> None:
        job = row["id"]
        if row["deaths"] >= DEATHS and row["deaths_at"] == row["step"]:
            self._store.fail(job, f"the worker died {row['deaths']} times at step {row['step']}")
            return
        self._controls[job] = TurnControl(job, self._turns, row["weight"])
        self._threads[job] = threading.Thread(target=self._work, args=(row, self._controls[job]), name=job, daemon=True)
        self._threads[job].start()

    def _work(self, row: Row, control: TurnControl) -> None:
        job = row["id"]
        try:
            self._train(row, control)
        except sqlite3.Error as error:  # not the job's fault: the next look begins it at its last checkpoint
            print(f"valve tune: {job}: the database: {error}", file=sys.stderr)
            self._leaving.wait(DATABASE_S)
        except Exception as error:  # whatever is wrong with one job, the others go on
            with contextlib.suppress(sqlite3.Error):  # the next look begins it again, and it fails again
                self._store.fail(job, str(error))
        finally:
            self._turns.forget(job)

    def _train(self, row: Row, control: TurnControl) -> None:
        job, folder = row["id"], JobFolder(self._store.out(row["id"]))
        values = {**json.loads(row["wish"])["spec"], "model": self._model, "out": str(folder.path)}
        values["data"] = str(self._store.file_path(row["file"]))
        held_out = json.loads(row["wish"]).get("validation_file")
        values["eval_data"] = str(self._store.file_path(held_out)) if held_out else ""
        passes = json.loads(row["wish"])["passes"]
        control.answer()  # reading a file of examples takes time, too: in turn
        if folder.exists():
            values, passes = {**values, "max_steps": folder.spec().max_steps}, None
        spec, rows = rows_of(values, passes)
        self._store.move(job, "queued", ("validating_files",), spec=spec.to_json())
        with folder.claimed(spec):
            folder.want(GO)
            self._store.move(job, "running")
            watcher = JobWatcher(self._store, job, Recorder(folder, spec, trained=self._trained.add), control)
            outcome = carry_out(folder, spec, rows, control, watcher, self._make)
            self._conclude(job, folder, outcome, control)

    def _conclude(self, job: str, folder: JobFolder, outcome: Outcome, control: TurnControl) -> None:
        if outcome.end is End.FAILED:
            self._store.fail(job, outcome.message)
        elif outcome.end is End.DONE:
            if folder.metrics.exists():
                result = f"file-{hashlib.sha256(job.encode()).hexdigest()[:24]}"
                self._store.keep_result(job, result, folder.metrics)
            self._store.say(job, "The adapter is done.")
            self._store.move(job, "succeeded", adapter=str(outcome.adapter or folder.path))
        elif control.wanted == "cancel" and self._store.move(job, "cancelled"):
            self._store.say(job, f"Cancelled at step {outcome.step}; its checkpoints stay.")


def die_with_parent(parent: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(0)


@contextlib.contextmanager
def alone(folder: Path, base: str) -> Any:
    """One worker per base, whatever process started it. Held by the process, so it ends with it."""
    path = folder / "workers" / hashlib.sha256(base.encode()).hexdigest()[:16]
    with path.open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="The folder of the tune service.")
    parser.add_argument("--base", required=True, help="The name of the base that the worker trains.")
    parser.add_argument("--model", required=True, help="The folder of that base model.")
    parser.add_argument(
        "--parent", type=int, required=True, help="The process number of the service. The worker ends with it."
    )
    options = parser.parse_args(argv)
    die_with_parent(options.parent)
    try:
        with alone(options.folder, options.base):
            store = TuneStore(options.folder)
            worker = BaseWorker(store, options.base, options.model)
            signal.signal(signal.SIGTERM, lambda *_: worker.leave())
            worker.run()
            store.close()
    except BlockingIOError:
        return 0
    except sqlite3.Error as error:
        print(f"valve tune: {options.base}: the database: {error}", file=sys.stderr)
        return NO_DATABASE
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
