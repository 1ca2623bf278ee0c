"""The messages between trainers and the ledger."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


class LedgerRefused(Exception):
    """The ledger refuses what a trainer sent. The text says why."""


class Gone(LedgerRefused):
    """The ledger has given the trainer up. The trainer begins again at its last push."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    trainer: int
    version: int
    start: str  # blob of the version; empty: the adapter that the seed makes
    push: str  # blob of this trainer's last push in this round, or empty
    tokens: int  # in that push
    steps: int
    kept: int  # micro-batches of the job so far, of all trainers
    silent_s: float  # a trainer that is silent for this long is given up
    given_up: tuple[int, ...] = ()  # former trainers of the same name


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundStanding:
    """The state of a job's round at one moment. Another trainer may end the round at any time."""

    version: int
    tokens: int  # of a usual micro-batch
    is_done: bool
    queued_s: float | None  # when the oldest waiting micro-batch was queued; None: none is handed out now
    parts: list[dict[str, Any]] | None  # the last push of each trainer; None: the round is not complete yet


@dataclass(frozen=True, slots=True, kw_only=True)
class Push:
    """What a trainer sends. `blob` and `tokens` cover the round so far. `numbers` names the micro-batches new in this
    push."""

    numbers: Sequence[int]
    tokens: int
    steps: int
    blob: bytes | memoryview
