"""What is written down about reclaims, while they go on and afterwards."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

from valved.kv.first import First
from valved.kv.journey import all_of, start
from valved.kv.supply import Need
from valved.kv.victims import Victims, joined
from valved.model.events import Event, EventKind
from valved.model.ids import GpuIndex, Remap
from valved.state.journal import Journal
from valved.state.stats import RECLAIM_BOUNDS_US, Histogram, MemoryCounters

PHASES = ("gate", "select", "tell", "take", "give", "total", "let")
KEPT = 256  # reclaims that can be explained


@dataclass(slots=True, kw_only=True, eq=False)
class Reclaim:
    """The account of one: what `valve explain reclaim` and the histograms are made of. Times are CLOCK_MONOTONIC.

    Where an order was late, or the driver had less than it said, those who wait ask again. For them, and for whoever
    reads of it, all that is one reclaim: the account of the first try has the others in it.
    """

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
    first: First | None = None  # what was sent before it began, until that counts among its victims
    victims: list[Victims] = field(default_factory=list)
    freed: int = 0
    late: int = 0
    reason: str = ""
    again: list[Reclaim] = field(default_factory=list)

    def begin_with(self, first: First) -> None:
        self.first, self.began_ns = first, first.began_ns

    def lacking(self) -> dict[GpuIndex, int]:
        """That it has still to choose."""
        taken = self.first.handles if self.first is not None else {}
        return {gpu: count - taken.get(gpu, 0) for gpu, count in self.missing.items()}

    def count_first(self) -> None:
        first, self.first = self.first, None
        if first is not None:
            self.victims = joined(first.victims, self.victims)
            self.stopped_ns, self.told_ns = first.began_ns, first.told_ns

    @property
    def tries(self) -> list[Reclaim]:
        return [self, *self.again]

    def goes_on_with(self, later: Reclaim) -> bool:
        """All who wait for that one have waited for this one."""
        overs = [need.over for need in self.needs]
        return all(need.over in overs for need in later.needs)

    @property
    def why(self) -> str:
        return self.reason or "; ".join(victims.decision.reason for victims in self.victims) or "nothing to take"

    @property
    def all_freed(self) -> int:
        return sum(one.freed for one in self.tries)

    @property
    def all_late(self) -> int:
        return sum(one.late for one in self.tries)

    @property
    def all_missing(self) -> int:
        """Of the last try, and what came before it."""
        *before, last = self.tries
        return sum(one.freed for one in before) + sum(last.missing.values())

    @property
    def total_ns(self) -> int:
        return self.tries[-1].given_ns - self.began_ns

    def phases(self) -> dict[str, int]:
        """Nanoseconds of each step; empty if nothing was taken."""
        spent: Counter[str] = Counter()
        for one in self.tries:
            spent.update(one._phases())
        return dict(spent)

    def _phases(self) -> dict[str, int]:
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
        victims = [one for part in self.tries for one in part.victims]
        lets = sum(one.lets for one in self.tries)
        return {
            "how": self.how.value,
            "missing": self.all_missing,
            "freed": self.all_freed,
            "bytes": self.all_freed * handle_bytes,
            "columns": sum(len(one.columns) for one in victims),
            "cost": sum(one.decision.total_cost for one in victims),
            "from": ",".join(dict.fromkeys(str(one.engine.service) for one in victims)),
            "late": self.all_late,
            "total_ns": self.total_ns,
            "heard_ns": self.began_ns - min(need.rung_ns for need in self.needs),
            **{f"{name}_ns": spent_ns for name, spent_ns in self.phases().items()},
            **({"lets": lets} if lets else {}),
        }


class ReclaimTeller:
    """When a reclaim is told: once nobody asks more for it, and with all its tries as one."""

    def __init__(self, journal: Journal, log: ReclaimLog, handle_bytes: int) -> None:
        self._untold: list[Reclaim] = []  # whose needs may be asked again
        self._journal = journal
        self._log = log
        self._handle_bytes = handle_bytes

    def begin(self, reclaim: Reclaim) -> None:
        """Who asks again for what was late, or for what the driver had not, has its account in the first one."""
        if reclaim.missing:
            next((one.again for one in self._untold if one.goes_on_with(reclaim)), self._untold).append(reclaim)

    def end(self, reclaim: Reclaim) -> None:
        first = next((one for one in self._untold if reclaim in one.tries), None)
        if first is not None:
            start(self._tell(first, reclaim.needs))

    async def _tell(self, reclaim: Reclaim, needs: list[Need]) -> None:
        """Once those ask no more, and it has ended in all its tries."""
        await all_of([need.over for need in needs if need.given.is_set])
        if reclaim not in self._untold or not all(one.given_ns for one in reclaim.tries):
            return
        self._untold.remove(reclaim)
        event = self._journal.emit(
            EventKind.RECLAIMED,
            service=reclaim.needs[0].service,
            gpus=tuple(sorted({gpu for one in reclaim.tries for gpu in one.missing})),
            reason="; then ".join(one.why for one in reclaim.tries),
            t_ns=reclaim.tries[-1].given_ns,  # where its durations end: it is told when all who waited have gone on
            **reclaim.account(self._handle_bytes),
        )
        self._log.note(reclaim, event)


class ReclaimLog:
    """Those that have ended: their numbers, how long their steps took, and the last ones whole."""

    def __init__(self, counters: MemoryCounters) -> None:
        self.counters = counters
        self.phases = {name: Histogram(RECLAIM_BOUNDS_US) for name in PHASES}
        self._reclaims: deque[tuple[int, Reclaim]] = deque(maxlen=KEPT)

    def note(self, reclaim: Reclaim, event: Event) -> None:
        self.counters.reclaims += 1
        self.counters.reclaims_short += reclaim.all_freed < reclaim.all_missing
        self.counters.reclaimed_handles += reclaim.all_freed
        self.counters.late_orders += reclaim.all_late
        self._reclaims.append((event.seq, reclaim))
        phases = reclaim.phases()
        if phases:
            phases["total"] = reclaim.total_ns
        for name, spent_ns in phases.items():
            self.phases[name].add(spent_ns)

    def find(self, number: int) -> Reclaim | None:
        """By the number of its event."""
        return next((reclaim for seq, reclaim in self._reclaims if seq == number), None)

    def numbers(self) -> list[int]:
        return [seq for seq, _ in self._reclaims]
