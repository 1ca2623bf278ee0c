"""What a trainer and the process that watches it say to each other: events out, orders in, an outcome at the end."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainEvent:
    """One optimizer step (kind "step"), or something worth a line ("evaluated", "resumed", "checkpoint", "paused",
    "lost").
    """

    kind: str
    step: int
    message: str = ""
    loss: float | None = None
    tokens: int = 0
    labels: int = 0
    seconds: float = 0.0
    lr: float | None = None
    grad_norm: float | None = None


class ControlAnswer(enum.Enum):
    GO = "go"
    PAUSE = "pause"
    STOP = "stop"


Answer = ControlAnswer


class Control(Protocol):
    """Asked between any two tiles, so it must be cheap."""

    def answer(self) -> Answer: ...

    def wait(self) -> None:
        """For a moment: between two of them a paused job gives back memory that is asked of it."""
        ...


class Going:
    """A control that never interrupts."""

    def answer(self) -> Answer:
        return Answer.GO

    def wait(self) -> None:
        return


class End(enum.Enum):
    DONE = "done"
    STOPPED = "stopped"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a run ended. A failed run names its cause; the newest checkpoint is whole in every case."""

    end: End
    step: int
    message: str = ""
    adapter: Path | None = None
    checkpoint: Path | None = None
