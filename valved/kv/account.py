"""What is written down about reclaims, while they go on and afterwards."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from valved.kv.supply import Need
from valved.kv.victims import Victims
from valved.model.events import Event
from valved.model.ids import GpuIndex, Remap
from valved.state.stats import RECLAIM_BOUNDS_US, Histogram, MemoryCounters

PHASES = ("gate", "select", "tell", "take", "give", "total", "let")
KEPT = 256  # reclaims that can be explained


@dataclass(slots=True, kw_only=True)
class Reclaim:
    """The account of one: what `valve explain reclaim` and the histograms are made of. Times are CLOCK_MONOTONIC."""

    needs: list[Need]
    missing: dict[GpuIndex, int]
    how: Remap
    began_ns: int
    chose_ns: int = 0
    stopped_ns: int = 0
    selected_ns: int = 0
    told_ns: int = 0
    taken_ns: int = 0
    given_ns: int = 0
    lets: int = 0  # times that an offline step was let end beside a waiting request, for this
    let_ns: int = 0
    victims: list[Victims] = field(default_factory=list)
    freed: int = 0
    late: int = 0
    reason: str = ""

    def phases(self) -> dict[str, int]:
        """Nanoseconds of each step; empty if nothing was taken."""
        if not self.taken_ns:
            return {}
        stopped_ns = max(self.stopped_ns, self.began_ns)
        return {
            "gate": stopped_ns - self.began_ns,
            "select": self.selected_ns - self.chose_ns,
            "tell": max(0, self.told_ns - stopped_ns),
            "take": self.taken_ns - self.told_ns,
            "give": self.given_ns - self.taken_ns,
            **({"let": self.let_ns} if self.let_ns else {}),
        }

    def account(self, handle_bytes: int) -> dict[str, Any]:
        """The details of its event."""
        return {
            "how": self.how.value,
            "missing": sum(self.missing.values()),
            "freed": self.freed,
            "bytes": self.freed * handle_bytes,
            "columns": sum(len(victims.columns) for victims in self.victims),
            "cost": sum(victims.decision.total_cost for victims in self.victims),
            "from": ",".join(str(victims.engine.service) for victims in self.victims),
            "late": self.late,
            "total_ns": self.given_ns - self.began_ns,
            "heard_ns": self.began_ns - min(need.rung_ns for need in self.needs),
            **{f"{name}_ns": spent_ns for name, spent_ns in self.phases().items()},
            **({"lets": self.lets} if self.lets else {}),
        }


class ReclaimLog:
    """Those that have ended: their numbers, how long their steps took, and the last ones whole."""

    def __init__(self, counters: MemoryCounters) -> None:
        self.counters = counters
        self.phases = {name: Histogram(RECLAIM_BOUNDS_US) for name in PHASES}
        self._reclaims: deque[tuple[int, Reclaim]] = deque(maxlen=KEPT)

    def note(self, reclaim: Reclaim, event: Event) -> None:
        self.counters.reclaims += 1
        self.counters.reclaims_short += reclaim.freed < sum(reclaim.missing.values())
        self.counters.reclaimed_handles += reclaim.freed
        self.counters.late_orders += reclaim.late
        self._reclaims.append((event.seq, reclaim))
        phases = reclaim.phases()
        if phases:
            phases["total"] = reclaim.given_ns - reclaim.began_ns
        for name, spent_ns in phases.items():
            self.phases[name].add(spent_ns)

    def find(self, number: int) -> Reclaim | None:
        """By the number of its event."""
        return next((reclaim for seq, reclaim in self._reclaims if seq == number), None)

    def numbers(self) -> list[int]:
        return [seq for seq, _ in self._reclaims]
