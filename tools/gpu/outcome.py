"""What an experiment found, and the JSON line it is kept as. Pure."""

from __future__ import annotations

import enum
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


class LabVerdict(enum.Enum):
    OK = "OK"
    REFUSED = "REFUSED"  # the driver said no: the status is in the detail
    SILENT = "SILENT"  # the driver said yes, and the work went on
    PART = "PART"  # partly as hoped
    DIFFERS = "DIFFERS"  # a checksum, or the emulator, is not what it should be
    HANG = "HANG"  # a call did not return while the channels were off
    SLOW = "SLOW"
    BLIND = "BLIND"  # a CUDA program ran, and its channels were not seen
    BAD = "BAD"  # could not run
    SKIPPED = "skipped"
    SILICON = "needs silicon"  # the emulated GPU cannot answer this
    STOPPED = "STOPPED"  # a stop rule ended the session here

    @property
    def is_answer(self) -> bool:
        """Whether the question is settled, so that --resume does not ask it again."""
        return self not in {LabVerdict.BAD, LabVerdict.SKIPPED, LabVerdict.SILICON, LabVerdict.STOPPED}


def rank(ordered: Sequence[float], q: float) -> float:
    """The nearest-rank percentile: a value that was really measured."""
    return ordered[max(0, min(len(ordered) - 1, round(q * (len(ordered) - 1))))]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One measured distribution, in microseconds unless its name says otherwise."""

    samples: tuple[float, ...]

    def at(self, q: float) -> float:
        return rank(sorted(self.samples), q)

    def words(self) -> str:
        ordered = sorted(self.samples)
        return f"p50 {rank(ordered, 0.5):.0f} p99 {rank(ordered, 0.99):.0f} max {ordered[-1]:.0f}"

    def record(self) -> dict[str, Any]:
        ordered = sorted(self.samples)
        ranks = {f"p{q:g}": rank(ordered, q / 100) for q in (50, 90, 99, 99.9)}
        return {"n": len(ordered), "min": ordered[0], **ranks, "max": ordered[-1], "samples": list(self.samples)}


def figures(source: Mapping[str, Any], *names: str, prefix: str = "") -> dict[str, Figure]:
    """The columns of a program's answer that hold anything."""
    return {f"{prefix}{name}": Figure(samples=tuple(source[name])) for name in names if source.get(name)}


@dataclass(frozen=True, slots=True, kw_only=True)
class LabOutcome:
    """An experiment's answer. `answers` are small facts that later decisions read."""

    verdict: LabVerdict
    detail: str
    figures: Mapping[str, Figure] = field(default_factory=dict)
    answers: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class LabRow:
    """One line of a batch file: an outcome, and where and when it was found."""

    experiment: str
    batch: str
    verdict: LabVerdict
    detail: str
    dry_run: bool
    date: str
    seconds: float
    commit: str
    gpu: str
    driver: str
    figures: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    answers: Mapping[str, Any] = field(default_factory=dict)

    def as_json(self) -> str:
        record = {name: getattr(self, name) for name in self.__slots__}
        return json.dumps({**record, "verdict": self.verdict.value})


def read_rows(paths: Iterable[Path]) -> list[LabRow]:
    """Every row of the files, in order. A torn last line (the lab was killed while writing) is no row."""
    rows = []
    for path in paths:
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                record = json.loads(line)
            except ValueError:
                continue
            rows.append(LabRow(**{**record, "verdict": LabVerdict(record["verdict"])}))
    return rows


def latest(rows: Iterable[LabRow]) -> dict[str, LabRow]:
    """The newest row of each experiment."""
    return {row.experiment: row for row in rows}
