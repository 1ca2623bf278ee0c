"""metrics.jsonl: one line per event, appended. A reader takes the last one of each step: a resumed job repeats some."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from valve_tune.train.report import TrainEvent


class MetricsFile:
    """Appends whole lines. A disk that is full costs metrics, never the job: said once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._complained = False
        if is_torn(path):
            self._append("\n")

    def write(self, event: TrainEvent, **more: Any) -> None:
        values = {name: value for name, value in asdict(event).items() if value not in (None, "")}
        self._append(json.dumps({"time": round(time.time(), 3), **values, **more}) + "\n")

    def _append(self, text: str) -> None:
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            if not self._complained:
                print(f"valve tune: {self._path}: {error.strerror}; metrics are lost, the job goes on", file=sys.stderr)
            self._complained = True


def is_torn(path: Path) -> bool:
    """Whether a crash cut the last line short."""
    try:
        with path.open("rb") as file:
            if file.seek(0, os.SEEK_END) == 0:
                return False
            file.seek(-1, os.SEEK_END)
            return file.read(1) != b"\n"
    except OSError:
        return False


def lines(path: Path) -> Iterator[dict[str, Any]]:
    """Whole lines; one that a crash cut short is passed over."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return
    for line in text.splitlines():
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            yield value


def steps(path: Path, kind: str = "step") -> list[dict[str, Any]]:
    """One line per optimizer step, in order; or the last evaluation at each step that had one ("evaluated")."""
    by_step = {line["step"]: line for line in lines(path) if line.get("kind") == kind and "step" in line}
    return [by_step[step] for step in sorted(by_step)]
