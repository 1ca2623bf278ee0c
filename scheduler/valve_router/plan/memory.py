"""Decides whether a task's memory fits a replica, and what leaves the card for it.

Every task ends: done, or with a reason.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from valve_router.plan.task import Task, TaskKind


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLaw:
    """Bytes that a task holds: KV of a request, activations of a training task."""

    fixed: float = 0.0
    per_token: float = 0.0
    per_square: float = 0.0  # attention that keeps its scores

    def bytes(self, task: Task) -> int:
        return round(self.fixed + task.batch * task.tokens * (self.per_token + self.per_square * task.tokens))


class FitVerdict(enum.Enum):
    FITS = "fits"
    WAIT = "wait"  # others give back enough, in time
    OFFLOAD = "offload"  # or it has waited long enough: these go to the host
    NEVER = "never"  # it is larger than the card


@dataclass(frozen=True, slots=True, kw_only=True)
class Resident:
    """What one task holds on the card."""

    name: str
    bytes: int
    kind: TaskKind
    since_s: float
    is_parked: bool = False  # nothing computes on it now


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    verdict: FitVerdict
    offload: tuple[str, ...] = ()


def fits_memory(need: int, capacity: int, held: Sequence[Resident], waited_s: float, limit_s: float) -> Fit:
    """Waits up to `limit_s` for room, then sends away parked training first and the oldest decode's KV next."""
    if need > capacity:
        return Fit(verdict=FitVerdict.NEVER)
    missing = need + sum(one.bytes for one in held) - capacity
    if missing <= 0:
        return Fit(verdict=FitVerdict.FITS)
    if waited_s < limit_s:
        return Fit(verdict=FitVerdict.WAIT)
    parked = [one for one in held if one.is_parked]
    parked.sort(key=lambda one: (one.kind is not TaskKind.TRAINING, one.since_s))
    names = []
    for one in parked:
        if missing <= 0:
            break
        names.append(one.name)
        missing -= one.bytes
    # Nothing is taken from a task that computes. It ends by itself, and then there is room.
    return Fit(verdict=FitVerdict.WAIT) if missing > 0 else Fit(verdict=FitVerdict.OFFLOAD, offload=tuple(names))
