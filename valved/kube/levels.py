"""A job's own run at several memory limits, for the curve of its OfflineProfile. Pure.

An offline engine that is being profiled is lent a quarter of its KV memory, then half, then three quarters, then all.
Only upwards: growing costs it nothing, while taking memory away for a measurement would cost work. What it does just
after a step is left out. Where a level cannot be reached, as online work has that memory, the last one is what there
is.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from valved.kube.cgroup import pod_of

SHARES = (0.25, 0.5, 0.75, 1.0)
"""Of its columns; three levels make a profile, so one may be missed."""
WARM_S = 60.0  # at the start: compiling, an empty cache
SETTLE_S = 15.0  # after a step: requests that waited come in
LEVEL_S = 75.0  # the controller asks for 60
REACH_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMemory:
    """An engine's memory now."""

    limit_mib: float  # per GPU: what it has or could have, but for what its level withholds
    short: int  # columns up to its level; negative when it has more
    can_grow: bool  # there is memory that nobody uses


@dataclass(slots=True, kw_only=True)
class MemoryLevel:
    limit_mib: float = 0.0  # mean over the time
    runnable_s: float = 0.0
    tokens: int = 0


@dataclass(slots=True, kw_only=True)
class Series:
    """One pod's."""

    levels: tuple[MemoryLevel, ...] = field(default_factory=lambda: tuple(MemoryLevel() for _ in SHARES))
    at: int = 0
    skip_s: float = WARM_S
    waited_s: float = 0.0

    @property
    def is_over(self) -> bool:
        return self.at >= len(SHARES)

    @property
    def share(self) -> float:
        """How much of its memory the engine may have now."""
        return 1.0 if self.is_over else SHARES[self.at]

    def end(self) -> None:
        self.at = len(SHARES)

    def note(self, memory: EngineMemory, runnable_s: float, tokens: int) -> None:
        """What came since the last look, in seconds in which it could run, not of the clock."""
        if self.is_over:
            return
        is_last = self.at == len(SHARES) - 1
        if memory.short > 0 and (memory.can_grow or not is_last):
            self.waited_s += runnable_s
            if self.waited_s >= REACH_S:  # measured with what there is
                self.at = len(SHARES) if is_last else len(SHARES) - 1
                self.waited_s = 0.0
        elif memory.short < 0 and not is_last:  # it had its memory before we were told
            self.at += 1
        elif self.skip_s > 0:
            self.skip_s -= runnable_s
        else:
            self._count(self.levels[self.at], memory.limit_mib, runnable_s, tokens)

    def _count(self, level: MemoryLevel, limit_mib: float, runnable_s: float, tokens: int) -> None:
        whole_s = level.runnable_s + runnable_s
        if whole_s > 0:
            level.limit_mib += (limit_mib - level.limit_mib) * runnable_s / whole_s
        level.runnable_s = whole_s
        level.tokens += tokens
        if whole_s >= LEVEL_S:
            self.at += 1
            self.skip_s, self.waited_s = SETTLE_S, 0.0


@dataclass(slots=True)
class LevelBook:
    """The pods that the cluster wants profiled, and what they have shown. A series ends with the daemon, too: an engine
    that had all its memory meanwhile cannot begin again from below."""

    _wanted: frozenset[str] = frozenset()
    _series: dict[str, Series] = field(default_factory=dict)
    _kept: dict[str, tuple[MemoryLevel, ...]] = field(default_factory=dict)  # of a predecessor

    def want(self, uids: Collection[str]) -> None:
        """Exactly these. What a pod has shown stays in the report as long as the pod lives."""
        self._wanted = frozenset(uids)
        for uid, one in self._series.items():
            if uid not in self._wanted:
                one.end()

    def series(self, uid: str) -> Series | None:
        if uid in self._wanted and uid not in self._kept:
            return self._series.setdefault(uid, Series())
        return self._series.get(uid)

    def share_of(self, cgroup: str) -> float:
        """Of its columns, which an offline engine in this control group may have now."""
        group = pod_of(cgroup)
        one = self.series(group.uid) if group is not None else None
        return one.share if one is not None else 1.0

    def seed(self, report: Mapping[str, Any]) -> None:
        for entry in report.get("offline") or []:
            if entry.get("levels") and entry["podUID"] not in self._series:
                self._kept.setdefault(entry["podUID"], tuple(map(_read, entry["levels"])))

    def of(self, uid: str) -> tuple[MemoryLevel, ...]:
        """What a series has shown, once it is over: the speed at the highest level is the job's own."""
        one = self._series.get(uid)
        if one is None:
            return self._kept.get(uid, ())
        return tuple(level for level in one.levels if level.runnable_s > 0) if one.is_over else ()

    def under_way(self) -> tuple[str, ...]:
        """Pods that are lent their memory in steps just now."""
        return tuple(sorted(uid for uid, one in self._series.items() if not one.is_over))

    def keep(self, live: Collection[str]) -> None:
        """The others are forgotten."""
        self._series = {uid: one for uid, one in self._series.items() if uid in live}
        self._kept = {uid: levels for uid, levels in self._kept.items() if uid in live}


def _read(level: Mapping[str, Any]) -> MemoryLevel:
    return MemoryLevel(
        limit_mib=float(level["limitMiB"]),
        runnable_s=float(level.get("runnableSeconds", 0.0)),
        tokens=int(level.get("usefulTokens", 0)),
    )
