"""What trainers tell the ledger and what it tells them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


class LedgerRefused(Exception):
    """Why the ledger does not take this."""


class Gone(LedgerRefused):
    """The trainer was given up: it begins again at its last push."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    trainer: int
    version: int
    start: str  # blob of the version; empty: the adapter as its seed makes it
    push: str  # blob of this trainer's last push in this round, or empty
    tokens: int  # in that push
    steps: int
    kept: int  # micro-batches of the job so far, of all trainers
    silent_s: float  # a trainer that says nothing for so long is given up
    given_up: tuple[int, ...] = ()  # the trainers that had its name


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundStanding:
    """Of a job at one moment: another trainer may end the round at any other."""

    version: int
    tokens: int  # of a usual micro-batch
    is_done: bool
    queued_s: float | None  # when what waits longest was first queued, if any of it is handed out now
    parts: list[dict[str, Any]] | None  # the last push of each trainer, when there is nothing more to wait for


@dataclass(frozen=True, slots=True, kw_only=True)
class Push:
    """Cumulative within a round: adapter, moments and tokens since the version, and the micro-batches new in it."""

    numbers: Sequence[int]
    tokens: int
    steps: int
    blob: bytes | memoryview
