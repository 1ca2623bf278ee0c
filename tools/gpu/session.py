"""Runs experiments one after the other under one rig, and writes each answer down before the next question is asked."""

from __future__ import annotations

import datetime
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from valve_tools.gpu.build import build
from valve_tools.gpu.errors import StopRule
from valve_tools.gpu.experiment import Experiment, ExperimentBatch
from valve_tools.gpu.leash import is_alive
from valve_tools.gpu.machine import Machine, commit
from valve_tools.gpu.outcome import LabOutcome, LabRow, LabVerdict, latest, read_rows
from valve_tools.gpu.rig import Rig
from valve_tools.gpu.table import line

PREFIX = "valve-lab-"
STALE_S = 1800.0  # twice what a guard lives at most


def batch_file(out: Path, batch: str, *, dry: bool) -> Path:
    """A rehearsal's file never has the name of a measurement's."""
    return out / (f"{batch}.dry.jsonl" if dry else f"{batch}.jsonl")


def sweep(base: Path) -> None:
    """Remove the folders of labs that were killed, once their guards must be gone, too."""
    for folder in base.glob(f"{PREFIX}*"):
        pid = folder.name.removeprefix(PREFIX).partition("-")[0]
        old = time.time() - folder.stat().st_mtime > STALE_S
        if pid.isdigit() and old and not is_alive(int(pid)) and folder.stat().st_uid == os.getuid():
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def scratch() -> Iterator[Path]:
    """A short-lived folder on tmpfs: the GPU writes into files there, and pages of a disk's file cannot be pinned."""
    base = Path("/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir())
    sweep(base)
    folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=base))
    folder.chmod(0o711)  # the unprivileged step finds the emulated card in it; what it needs of ours it has by then
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def programs_folder() -> Iterator[Path]:
    """Not on /dev/shm, from which some machines execute nothing."""
    known = os.environ.get("VALVE_LAB_BUILD")
    if known:
        yield Path(known)
        return
    with tempfile.TemporaryDirectory(prefix="valve-lab-bin-") as folder:
        yield Path(folder)


class LabSession:
    def __init__(self, machine: Machine, out: Path, say: Callable[[str], None], *, budget_s: float) -> None:
        self.machine = machine
        self.out = out
        self.say = say
        self._end_s = time.monotonic() + budget_s
        self._commit = commit()

    def settled(self, wanted: Sequence[tuple[ExperimentBatch, Experiment]]) -> dict[str, LabRow]:
        """Answers that an earlier session of this folder has given already."""
        files = {batch_file(self.out, batch.name, dry=self.machine.is_dry) for batch, _ in wanted}
        rows = latest(read_rows(sorted(path for path in files if path.exists())))
        return {name: row for name, row in rows.items() if row.verdict.is_answer}

    def run(self, wanted: Sequence[tuple[ExperimentBatch, Experiment]], folder: Path) -> list[LabRow]:
        """Every experiment, until one stops the session. The rows found."""
        rows: list[LabRow] = []
        self.out.mkdir(parents=True, exist_ok=True)
        with (
            programs_folder() as built,
            Rig(self.machine, build(built, emulated=self.machine.is_dry), folder, self.out) as rig,
        ):
            rig.path = str(self._known_path())
            for batch, experiment in wanted:
                row = self._one(rig, batch, experiment)
                rows.append(row)
                self._keep(row)
                if row.verdict is LabVerdict.STOPPED:
                    break
        return rows

    def _known_path(self) -> str:
        """How channels were reached in an earlier session of this folder."""
        contact = batch_file(self.out, "contact", dry=self.machine.is_dry)
        rows = latest(read_rows([contact] if contact.exists() else []))
        if "D4" in rows and rows["D4"].verdict is LabVerdict.OK:
            return "a"
        found = dict(rows["D4b"].answers) if "D4b" in rows else {}
        return next((path for path in "bc" if found.get(path) == LabVerdict.OK.value), "")

    def _one(self, rig: Rig, batch: ExperimentBatch, experiment: Experiment) -> LabRow:
        self.say(f"{experiment.name}: {experiment.question}")
        start = time.monotonic()
        outcome = self._outcome(rig, experiment, self._end_s - start)
        return LabRow(
            experiment=experiment.name,
            batch=batch.name,
            verdict=outcome.verdict,
            detail=outcome.detail,
            dry_run=self.machine.is_dry,
            date=datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
            seconds=round(time.monotonic() - start, 1),
            commit=self._commit,
            gpu=self.machine.gpu,
            driver=self.machine.driver,
            figures={name: figure.record() for name, figure in outcome.figures.items()},
            answers=dict(outcome.answers),
        )

    def _outcome(self, rig: Rig, experiment: Experiment, left_s: float) -> LabOutcome:
        if self.machine.is_dry and experiment.silicon:
            return LabOutcome(verdict=LabVerdict.SILICON, detail=experiment.silicon)
        if not self.machine.is_dry and left_s < experiment.seconds:
            return LabOutcome(
                verdict=LabVerdict.SKIPPED, detail=f"{left_s:.0f} s left, needs up to {experiment.seconds} s"
            )
        try:
            outcome = experiment.run(rig)
            rig.check()
        except StopRule as stop:
            return LabOutcome(verdict=LabVerdict.STOPPED, detail=str(stop))
        except Exception as error:  # one experiment that cannot run must not cost the others their minutes on a card
            rig.enable_all()
            return LabOutcome(verdict=LabVerdict.BAD, detail=f"could not run: {type(error).__name__}: {error}"[:600])
        return outcome

    def _keep(self, row: LabRow) -> None:
        path = batch_file(self.out, row.batch, dry=self.machine.is_dry)
        with path.open("a", encoding="utf-8") as file:
            file.write(row.as_json() + "\n")
        with (self.out / "table.txt").open("a", encoding="utf-8") as file:
            file.write(line(row) + "\n")
        self.say(line(row))
