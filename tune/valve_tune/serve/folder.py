"""The folder of a job (`--out`): job file, its worker, the wanted state. Whole after a crash at any moment."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from valve_tune.train.checkpoint import named
from valve_tune.train.spec import HOW, LOOKS, JobSpec, SpecError

JOB, STATUS, LOCK, WANTED = "job.json", "status.json", "lock", "wanted"
METRICS, PAGE, DATA = "metrics.jsonl", "training.html", "data.sha256"
FLEET = "fleet"  # names the fleet job that this is a part of
GO, PAUSE, STOP = b"g", b"p", b"s"


class FolderError(Exception):
    """Why this folder cannot be used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStatus:
    """What the last worker here said. `state` is new, running, paused, stopped,
    succeeded, failed or cancelled.
    """

    state: str
    step: int = 0
    message: str = ""
    pid: int = 0
    updated: float = 0.0


def replace_file(path: Path, content: str) -> None:
    """Old or new, never half: a full disk leaves the old one. A file has one writer, so what a kill leaves beside it is
    the next one's to overwrite."""
    beside = path.with_name(f".{path.name}.new")
    try:
        with named(path), beside.open("w", encoding="utf-8") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


class JobFolder:
    def __init__(self, path: Path | str) -> None:
        self.path = Path(path).absolute()
        self.metrics, self.page = self.path / METRICS, self.path / PAGE

    def exists(self) -> bool:
        return (self.path / JOB).is_file()

    def spec(self) -> JobSpec:
        try:
            document = (self.path / JOB).read_text(encoding="utf-8")
        except OSError as error:
            raise FolderError(f"{self.path}: no job is here ({error.strerror})") from None
        try:
            return JobSpec.from_json(document)
        except SpecError as error:
            raise FolderError(f"{self.path / JOB}: {error}") from None

    @contextlib.contextmanager
    def claimed(self, spec: JobSpec, fleet: str = "") -> Iterator[None]:
        """This process alone works here, on this very job. The lock ends with the process, however it ends. A part of
        the job `fleet` is another job than one of the same fields that one node trains alone.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        with (self.path / LOCK).open("a+") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise FolderError(f"{self.path}: process {self.status().pid} works on this job") from None
            self._check_way(fleet)
            self._same(spec, fleet)
            yield

    @property
    def fleet(self) -> str:
        """Of which fleet job this is a part; empty: of none."""
        try:
            return (self.path / FLEET).read_text(encoding="utf-8").strip()
        except OSError:
            return ""

    def _check_way(self, fleet: str) -> None:
        if self.fleet == fleet:
            return
        if self.fleet:
            raise FolderError(
                f"{self.path}: holds a part of the fleet job {self.fleet}; it goes on with the command that began it "
                "(valve tune fleet ...)"
            )
        if self.checkpoints():
            raise FolderError(f"{self.path}: holds a job of this node alone; choose another --out")

    def _mark(self, fleet: str) -> None:
        if self.fleet != fleet:
            replace_file(self.path / FLEET, fleet + "\n")

    def _same(self, spec: JobSpec, fleet: str) -> None:
        if not self.exists():
            strange = sorted(each.name for each in self.path.iterdir() if each.name not in (LOCK, WANTED, FLEET))
            if "adapter_config.json" in strange:
                raise FolderError(f"{self.path}: holds an adapter that is not of this command; choose another --out")
            self._mark(fleet)
            replace_file(self.path / JOB, spec.to_json())
            return
        there = self.spec()
        may_differ = {"out", *HOW} | (set() if spec.early_stopping_patience or there.early_stopping_patience else LOOKS)
        differing = spec.differs(there)
        if other := {name: pair for name, pair in differing.items() if name not in may_differ}:
            said = ", ".join(f"{name} ({there!r} there, {here!r} here)" for name, (here, there) in other.items())
            raise FolderError(f"{self.path}: holds another job; it differs in {said}")
        self._mark(fleet)
        if differing:
            replace_file(self.path / JOB, spec.to_json())

    def same_data(self, digest: str, held_out: str = "", *, decides: bool = False) -> None:
        """A resumed job must see the batches it began with. Held-out data may come or go where it does not decide when
        the job ends, and is never exchanged."""
        path = self.path / DATA
        wanted = [digest, held_out] if held_out else [digest]
        there = path.read_text(encoding="utf-8").split() if path.exists() else wanted
        may_come = not decides and (len(there) == 1 or not held_out)
        if there != wanted and not (there[0] == digest and may_come):
            raise FolderError(
                f"{self.path}: the data or its tokenizer changed since this job began; choose another --out"
            )
        replace_file(path, " ".join(wanted) + "\n")

    def status(self) -> JobStatus:
        try:
            return JobStatus(**json.loads((self.path / STATUS).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return JobStatus(state="new")

    def say(self, state: str, step: int, message: str = "") -> None:
        status = JobStatus(state=state, step=step, message=message, pid=os.getpid(), updated=time.time())
        replace_file(self.path / STATUS, json.dumps(asdict(status)) + "\n")

    def is_worked_on(self) -> bool:
        """Whether a process holds the lock at this moment."""
        try:
            with (self.path / LOCK).open("r") as lock:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def want(self, word: bytes) -> None:
        """One byte, read by the trainer from a shared mapping between any two tiles."""
        descriptor = os.open(self.path / WANTED, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            with named(self.path / WANTED):
                os.pwrite(descriptor, word, 0)
        finally:
            os.close(descriptor)

    def wanted(self) -> bytes:
        try:
            return (self.path / WANTED).read_bytes()[:1] or GO
        except OSError:
            return GO

    def checkpoints(self) -> list[tuple[int, Path]]:
        found = []
        for path in self.path.glob("checkpoint-*"):
            number = path.name.removeprefix("checkpoint-")
            if number.isdigit() and (path / "adapter_model.safetensors").is_file():
                found.append((int(number), path))
        return sorted(found)
