"""The job inside an engine's process: its thread, its folder, its end. Whatever it does, the engine goes on.

`running` until it ends by itself; `failed` with its error; parked where a tile hangs or the engine's side of the lane
failed: no tile begins any more, and its thread is left to itself. What it had saved is whole in every case.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from valve_tune.engine.refusals import why_not_job, why_not_threads
from valve_tune.engine.turns import TileTurns
from valve_tune.engine.watched import TileProgress, WatchedModel
from valve_tune.model.interface import TileModel
from valve_tune.serve import flags, registry
from valve_tune.serve.control import FolderControl
from valve_tune.serve.folder import JobFolder
from valve_tune.serve.recorder import Recorder
from valve_tune.serve.runner import Runs, carry_out, rows_of
from valve_tune.train.batch import Dataset
from valve_tune.train.report import Control, TrainEvent
from valve_tune.train.spec import JobSpec, SpecError

log = logging.getLogger("valve")
END_S = 10.0
"""How long an engine that ends waits for the tile in work and the last checkpoint."""


class Tenant:
    """`open_model` makes the base; what runs a job is `serve.runner.carry_out`, as on the command line."""

    def __init__(
        self,
        job: dict[str, Any] | str,
        *,
        turns: TileTurns,
        stuck_s: float,
        cores: set[int] | None = None,
        open_model: Callable[[JobSpec], TileModel] | None = None,
        inside: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        """`inside` is around all that the job's thread does."""
        self.job, self.turns, self.progress = job, turns, TileProgress()
        self._stuck_s, self._cores, self._open, self._inside = stuck_s, cores, open_model, inside
        self.parked = ""
        """Why no tile begins any more."""
        self._control: FolderControl | None = None
        self._over = threading.Event()
        self._folder: JobFolder | None = None
        self._thread = threading.Thread(target=self._run, name="valve-tune", daemon=True)
        self._watch = threading.Thread(target=self._watched, name="valve-tune-watch", daemon=True)

    def start(self) -> None:
        self._thread.start()
        self._watch.start()

    @property
    def is_over(self) -> bool:
        """It trains no more, or never again here."""
        return self._over.is_set() or bool(self.parked)

    def wait(self, seconds: float) -> bool:
        return self._over.wait(seconds)

    def park(self, why: str) -> None:
        """Never waits for the job's thread, which may hang."""
        if self.is_over:
            return
        self.parked = why
        if self._control is not None:
            self._control.stop()
        self.turns.stop()
        log.error("valve: the job in this engine is parked: %s; the engine goes on", why)

    def close(self) -> bool:
        """The engine ends: so does the job, with its last checkpoint. False: its thread hangs."""
        if self._control is not None:
            self._control.stop()
        self.turns.stop()
        self._thread.join(END_S)
        return not self._thread.is_alive()

    # ---- its threads ----

    def _watched(self) -> None:
        """Looks for a tile that hangs, and writes its end: the tile's thread hangs, and the engine's serves."""
        while not self._over.wait(self._stuck_s / 4):
            if self.turns.running_s() > self._stuck_s:
                self.park(f"one tile has taken longer than {self._stuck_s:g} s")
            if self.parked and self._folder is not None:
                self._folder.say("failed", self._folder.status().step, f"parked: {self.parked}")
                return

    def _run(self) -> None:
        try:
            if self._cores:
                os.sched_setaffinity(threading.get_native_id(), self._cores)  # the engine's thread is bound to one
            with self._inside():
                self._work()
        except BaseException as error:
            log.exception("valve: the job in this engine failed; the engine goes on")
            self._say_failed(error)
        finally:
            self._over.set()
            self.turns.stop()
            self.turns.close()

    def _say_failed(self, error: BaseException) -> None:
        try:
            if self._folder is not None:
                said = f"{type(error).__name__}: {error}"
                self._folder.say(
                    "failed", self._folder.status().step, f"parked: {self.parked}" if self.parked else said
                )
        except OSError:
            log.exception("valve: the folder of the failed job cannot be written")

    def _work(self) -> None:
        values = json.loads(Path(self.job).read_text()) if isinstance(self.job, str) else self.job
        if why := why_not_job(values):
            raise SpecError("engine", why)
        spec, rows = rows_of(values, flags.DEFAULT_PASSES)
        folder = JobFolder(spec.out)
        with folder.claimed(spec):
            registry.remember(folder)
            self._folder, self._control = folder, FolderControl(folder)
            if self.parked:
                return
            recorder = Recorder(folder, spec, waited=lambda: self._control.waited_s if self._control else 0.0)
            carry_out(folder, spec, rows, self._control, recorder, make=self._trainer)
            if self.parked:
                folder.say("failed", recorder.step, f"parked: {self.parked}")

    def _trainer(
        self, spec: JobSpec, dataset: Dataset, *, events: Callable[[TrainEvent], None], control: Control
    ) -> Runs:
        from valve_tune.train.build import open_model
        from valve_tune.train.job import Trainer

        make = self._open or open_model
        return Trainer(
            spec,
            dataset,
            events=events,
            control=control,
            make_model=lambda spec: WatchedModel(make(spec), self.turns, self.progress),
            settle=check_threads,
        )


def check_threads(spec: JobSpec) -> None:
    """Nothing of torch's process-wide settings is touched: they are the engine's, and decide what it computes."""
    import torch

    if why := why_not_threads(spec.threads, torch.get_num_threads()):
        raise SpecError("engine", why)
