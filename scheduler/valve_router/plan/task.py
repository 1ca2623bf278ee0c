"""What is placed: one request's prefill, or one training micro-batch."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class TaskKind(enum.Enum):
    INFERENCE = "inference"
    TRAINING = "training"


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    arrival_s: float
    tokens: int  # of the longest sequence
    batch: int = 1
    kind: TaskKind = TaskKind.INFERENCE
    cached_tokens: int = 0  # a prefix that the replica need not compute again
    enqueued_s: float | None = None  # training: when it was first offered; its age counts from here

    def __post_init__(self) -> None:
        if self.tokens < 1 or self.batch < 1 or not 0 <= self.cached_tokens <= self.tokens:
            raise ValueError(f"a task has at least one token and one sequence, and caches no more than it has: {self}")

    @property
    def is_training(self) -> bool:
        return self.kind is TaskKind.TRAINING

    @property
    def new_tokens(self) -> int:
        """A request whose whole prompt is cached still computes its last token."""
        return max(1, self.tokens - self.cached_tokens)

    @property
    def age_from_s(self) -> float:
        return self.arrival_s if self.enqueued_s is None else self.enqueued_s
