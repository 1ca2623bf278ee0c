"""What is written down about a reclaim while it goes on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from valved.kv.journey import Pause
from valved.kv.victims import Victims
from valved.model.ids import GpuIndex, Remap, ServiceId


@dataclass(slots=True, kw_only=True)
class Need:
    """Handles that somebody waits for."""

    service: ServiceId
    handles: dict[GpuIndex, int]
    asked_ns: int
    is_waited_for: Callable[[], bool]  # by a request, now; else it is for the reserve
    ready: Pause = field(default_factory=Pause)  # all that could be taken is free
    served: Pause = field(default_factory=Pause)  # the reclaim for it is through, or goes on by itself
    given: Pause = field(default_factory=Pause)  # and has arrived, or will not


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
    let_ns: int = 0  # offline work ran beside online for it
    victims: list[Victims] = field(default_factory=list)
    freed: int = 0
    late: int = 0
    reason: str = ""

    def account(self, handle_bytes: int) -> dict[str, Any]:
        """The details of its event."""
        stopped_ns = max(self.stopped_ns, self.began_ns)
        phases = {}
        if self.taken_ns:
            phases = {
                "gate_ns": stopped_ns - self.began_ns,
                "select_ns": self.selected_ns - self.chose_ns,
                "tell_ns": self.told_ns - stopped_ns,
                "take_ns": self.taken_ns - self.told_ns,
                "give_ns": self.given_ns - self.taken_ns,
                **({"let_ns": self.let_ns} if self.let_ns else {}),
            }
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
            **phases,
        }
