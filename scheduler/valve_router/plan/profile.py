"""Predicts how long a task takes on one stage, from measured pairs of size and time.

The law is t = t0 + b C l + q C l^2 for a batch of C sequences of l tokens. LeMix's own law keeps the last term alone
(`printed_law`). For short chat requests it is wrong by a multiple, because they mostly read the weights once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from valve_router.plan.task import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Law:
    """Seconds on one stage."""

    fixed_s: float = 0.0
    per_token_s: float = 0.0
    per_square_s: float = 0.0

    def __post_init__(self) -> None:
        parts = (self.fixed_s, self.per_token_s, self.per_square_s)
        if not all(np.isfinite(parts)) or min(parts) < 0:
            raise ValueError(f"a law has finite terms of at least 0, not {parts}")

    def seconds(self, task: Task) -> float:
        tokens = task.new_tokens
        return self.fixed_s + task.batch * tokens * (self.per_token_s + self.per_square_s * tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One task as it ran."""

    batch: int
    tokens: int
    took_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """The stages of one replica, and the cost of forward and backward on each stage."""

    stages: int
    forward: Law
    backward: Law
    stop_s: float | None = None  # a forward stops training within this time; with None it waits for the whole backward

    def __post_init__(self) -> None:
        if self.stages < 1 or (self.stop_s is not None and self.stop_s < 0):
            raise ValueError(f"a replica has at least one stage and a stop of at least 0 s: {self}")

    def alone_s(self, task: Task) -> float:
        """The response of an idle replica."""
        return self.stages * self.forward.seconds(task)

    def whole_s(self, task: Task) -> float:
        """The response of an idle replica to a training task, its backward pass included."""
        back_s = self.stages * self.backward.seconds(task) if task.is_training else 0.0
        return self.alone_s(task) + back_s


def fit(measured: Sequence[Measured]) -> Law:
    """The law with the least squared *relative* error whose terms are not negative."""
    if not measured or any(one.took_s <= 0 for one in measured):
        raise ValueError("a law is fitted to at least one measurement, each longer than 0 s")
    took = np.array([one.took_s for one in measured])
    sizes = np.array([[1.0, one.batch * one.tokens, one.batch * one.tokens**2] for one in measured])
    best, best_error = (0.0, 0.0, 0.0), np.inf
    for count in (1, 2, 3):
        for terms in combinations(range(3), count):
            columns = sizes[:, terms] / took[:, None]
            scale = np.abs(columns).max(axis=0)
            if (scale == 0).any():
                continue
            found = np.linalg.lstsq(columns / scale, np.ones(len(took)), rcond=None)[0] / scale
            error = float(((columns @ found - 1) ** 2).sum())
            if (found >= 0).all() and error < best_error - 1e-12:
                values = np.zeros(3)
                values[list(terms)] = found
                best, best_error = (float(values[0]), float(values[1]), float(values[2])), error
    return Law(fixed_s=best[0], per_token_s=best[1], per_square_s=best[2])


def printed_law(measured: Sequence[Measured]) -> Law:
    """As LeMix's code fits it: the mean of t / (C l^2)."""
    ratios = [one.took_s / (one.batch * one.tokens**2) for one in measured]
    return Law(per_square_s=float(np.mean(ratios)))


def relative_error(law: Law, measured: Sequence[Measured]) -> float:
    """Mean |predicted - measured| / measured."""
    predicted = [law.seconds(Task(arrival_s=0.0, tokens=one.tokens, batch=one.batch)) for one in measured]
    return float(np.mean([abs(p - one.took_s) / one.took_s for p, one in zip(predicted, measured, strict=True)]))
