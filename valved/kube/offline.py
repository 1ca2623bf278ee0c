"""What each offline pod got since its start: counters that only rise, across its processes and across our restarts.

A service ends with its processes and a container that restarts brings a new one; the pod is the same. A successor
begins with what its predecessor last reported.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from valved.kube.levels import EngineMemory, LevelBook
from valved.kube.status import OfflineFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One service's accounts now; they start at zero with the service."""

    pod_uid: str
    service: int
    harvest_s: float
    gpus: int
    tokens: int | None
    has_work: bool  # there is something to run, and nobody but online services keeps it from running
    gated_s: float = 0.0  # since the last reading
    stops: int = 0
    lost: int | None = None  # tokens to be made again, since its engine began; None: no engine is attached
    memory: EngineMemory | None = None  # of an engine whose memory can be lent


@dataclass(slots=True)
class OfflineBook:
    _totals: dict[str, OfflineFacts] = field(default_factory=dict)
    levels: LevelBook = field(default_factory=LevelBook)
    _last: dict[int, tuple[float, int]] = field(default_factory=dict)  # service -> harvest, tokens
    _lost: dict[int, int | None] = field(default_factory=dict)  # service -> tokens; None: a predecessor's, not met yet
    _seen_s: float | None = None

    def seed(self, report: Mapping[str, Any]) -> None:
        """Take over what stands in the node's own report. Only for pods not met yet."""
        for entry in report.get("offline") or []:
            self._totals.setdefault(
                entry["podUID"],
                OfflineFacts(
                    pod_uid=entry["podUID"],
                    harvest_s=float(entry.get("harvestSeconds", 0.0)),
                    runnable_s=float(entry.get("runnableSeconds", 0.0)),
                    demand_s=float(entry.get("demandSeconds", 0.0)),
                    gated_s=float(entry.get("gatedSeconds", 0.0)),
                    preemptions=int(entry.get("preemptions", 0)),
                    useful_tokens=entry.get("usefulTokens"),
                    tokens_lost=entry.get("tokensLost"),
                ),
            )
        self.levels.seed(report)

    def adopt(self, service: int, harvest_s: float, tokens: int) -> None:
        """A service of a predecessor: what it had so far is in that one's report already."""
        self._last.setdefault(service, (harvest_s, tokens))
        self._lost.setdefault(service, None)

    def read(self, readings: Iterable[Reading], now_s: float) -> None:
        passed_s = 0.0 if self._seen_s is None else max(0.0, now_s - self._seen_s)
        self._seen_s = now_s
        last: dict[int, tuple[float, int]] = {}
        lost: dict[int, int | None] = {}
        working: set[str] = set()
        for one in readings:
            totals = self._totals.setdefault(one.pod_uid, OfflineFacts(pod_uid=one.pod_uid))
            harvest_s, tokens = self._last.get(one.service, (0.0, 0))
            gained_s = max(0.0, one.harvest_s - harvest_s)
            made = 0 if one.tokens is None else max(0, one.tokens - tokens)
            totals.harvest_s += gained_s
            totals.runnable_s += gained_s / max(1, one.gpus)
            totals.gated_s += one.gated_s
            totals.preemptions += one.stops
            if one.tokens is not None:
                totals.useful_tokens = (totals.useful_tokens or 0) + made
            lost[one.service] = self._count_lost(totals, one)
            series = self.levels.series(one.pod_uid)
            if one.memory is not None and series is not None:
                series.note(one.memory, gained_s / max(1, one.gpus), made)
            if one.has_work:
                working.add(one.pod_uid)
            last[one.service] = (one.harvest_s, one.tokens or 0)
        self._last, self._lost = last, lost
        for uid in working:
            self._totals[uid].demand_s += passed_s

    def _count_lost(self, totals: OfflineFacts, one: Reading) -> int | None:
        """An engine goes on counting when it attaches again, and a new one begins at zero."""
        before = self._lost.get(one.service, 0)
        if one.lost is None:
            return before
        grown = 0 if before is None else one.lost - before if one.lost >= before else one.lost
        totals.tokens_lost = (totals.tokens_lost or 0) + grown
        return one.lost

    def facts(self, live: Collection[str]) -> tuple[OfflineFacts, ...]:
        """Of pods that still live; the others are forgotten."""
        self._totals = {uid: totals for uid, totals in self._totals.items() if uid in live}
        self.levels.keep(live)
        return tuple(replace(totals, levels=self.levels.of(uid)) for uid, totals in sorted(self._totals.items()))
