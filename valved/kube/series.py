"""Keeps an hour of this node in buckets of ten seconds and a day in buckets of ten minutes: when work was busy, what
memory was free and what online work used.

Busy is what the gate knows (an online service holds the GPU), not what the card reports: utilisation counts offline
work as well. Free memory counts only while no online service holds the GPU, because offline work cannot use
the memory that is free at other times. The memory of online work counts only while it holds the GPU: a job must leave
room for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from valve_scheduler.model import HISTOGRAM_BINS

WINDOWS_S = {"1m": 60, "10m": 600, "1h": 3600, "24h": 86400}
SHORTEST_S, HOUR_S = 60, 3600
SEEN_SHARE = 0.5  # a window is reported once this share of it was seen; the shortest one from its first bucket on
TABLES = ("beats", "elapsed", "left", "free", "online")
YOUNG_TABLES = ("online",)
"""Files of older releases lack these tables: they begin empty."""
Floats = NDArray[np.float64]
Saved = dict[str, NDArray[np.float64]]


class Ring:
    """Sums per bucket of time. A bucket is emptied when its time begins."""

    def __init__(self, bucket_s: int, buckets: int, gpus: int) -> None:
        self.bucket_s, self.buckets = bucket_s, buckets
        self.bucket = -1
        self.tables = {
            "beats": np.zeros((buckets, gpus, gpus)),  # samples in which both were busy; the diagonal: one
            "elapsed": np.zeros((buckets, gpus)),
            "left": np.zeros((buckets, gpus)),
            "free": np.zeros((buckets, gpus, HISTOGRAM_BINS)),
            "online": np.zeros((buckets, gpus, HISTOGRAM_BINS)),
        }

    def row(self, at_s: float) -> int:
        """The bucket of now; those that were skipped or are a whole round old are emptied on the way."""
        bucket = int(at_s // self.bucket_s)
        if self.bucket < 0:
            self.bucket = bucket
        for stale in range(max(self.bucket + 1, bucket - self.buckets + 1), bucket + 1):
            for table in self.tables.values():
                table[stale % self.buckets] = 0.0
        self.bucket = max(self.bucket, bucket)
        return bucket % self.buckets

    def sum(self, table: str, gpu: int, window_s: int) -> float:
        count = min(window_s // self.bucket_s, self.buckets)
        rows = np.arange(self.bucket - count + 1, self.bucket + 1) % self.buckets
        return float(self.tables[table][rows, gpu].sum())


class NodeSeries:
    """Fed with `beat` (the busy services, many times a second) and `book` (time accounts and memory, about once)."""

    def __init__(self, gpus: int) -> None:
        self.gpus = gpus
        self._hour, self._day = Ring(10, 360, gpus), Ring(600, 144, gpus)

    def beat(self, at_s: float, busy: Sequence[bool]) -> None:
        mask = np.array(busy, dtype=np.float64)
        for ring in (self._hour, self._day):
            row = ring.row(at_s)
            if mask.any():
                ring.tables["beats"][row] += np.outer(mask, mask)

    def book(self, at_s: float, seen_s: Sequence[float], left_s: Sequence[float]) -> None:
        """For each GPU: how much of the time since the last call was observed, and how much of that online work left
        idle.

        A longer silence counts as not observed. As one sum it would count for the minutes in which it ended.
        """
        seen = np.array(seen_s)
        seen = np.where(seen > SHORTEST_S, 0.0, seen)
        for ring in (self._hour, self._day):
            row = ring.row(at_s)
            ring.tables["elapsed"][row] += seen
            ring.tables["left"][row] += np.clip(np.array(left_s), 0.0, seen)

    def memory(self, at_s: float, gpu: int, free: int, total: int, *, is_held: bool = False) -> None:
        """`free`: all memory but that of online work and of the card itself; `is_held`: an online service has the
        GPU."""
        if total > 0:
            bytes_ = min(total, max(0, total - free if is_held else free))
            bin_ = min(HISTOGRAM_BINS - 1, bytes_ * HISTOGRAM_BINS // total)
            for ring in (self._hour, self._day):
                ring.tables["online" if is_held else "free"][ring.row(at_s), gpu, bin_] += 1.0

    def idle(self, gpu: int, window_s: int) -> float:
        """Share of the window in which no online service was busy. If less was seen, the share of the time that was
        seen."""
        seen_s = self.seen_s(gpu, window_s)
        return self._ring(window_s).sum("left", gpu, window_s) / seen_s if seen_s > 0 else 0.0

    def seen_s(self, gpu: int, window_s: int) -> float:
        """How much of the window was seen."""
        return self._ring(window_s).sum("elapsed", gpu, window_s)

    def windows(self, gpu: int) -> Mapping[str, float]:
        """Only windows that were seen for long enough: seconds are not published as an hour."""
        return {
            name: round(self.idle(gpu, window_s), 4)
            for name, window_s in WINDOWS_S.items()
            if self.seen_s(gpu, window_s) > (0.0 if window_s == SHORTEST_S else SEEN_SHARE * window_s)
        }

    def histogram(self, gpu: int) -> list[float]:
        """Free memory of the last hour; of the day if the hour has no sample, for instance after a long pause."""
        for ring in (self._hour, self._day):
            counts = ring.tables["free"][:, gpu].sum(axis=0)
            if counts.sum() > 0:
                break
        return _shares(counts)

    def online_memory(self, gpu: int) -> dict[str, list[float]]:
        """Histograms of what online used while it held the GPU; only windows in which it did."""
        rings = {"1h": self._hour, "24h": self._day}
        sums = {window: ring.tables["online"][:, gpu].sum(axis=0) for window, ring in rings.items()}
        return {window: _shares(counts) for window, counts in sums.items() if counts.sum() > 0}

    def alignment(self) -> list[float]:
        """|i and j busy| / |i or j busy| over the hour, upper triangle by rows; 1 where both were always idle."""
        both = self._hour.tables["beats"].sum(axis=0)
        alone = np.diagonal(both)
        either = alone[:, None] + alone[None, :] - both
        pairs = np.divide(both, either, out=np.ones_like(both), where=either > 0)
        return [float(value) for value in pairs[np.triu_indices(self.gpus, 1)].round(4)]

    def _ring(self, window_s: int) -> Ring:
        return self._hour if window_s <= HOUR_S else self._day

    # Across restarts of the daemon

    def saved(self) -> Saved:
        """Copies: they may be written elsewhere while this goes on."""
        found: Saved = {}
        for name, ring in (("hour", self._hour), ("day", self._day)):
            found[f"{name}-bucket"] = np.array([float(ring.bucket)])
            found |= {f"{name}-{table}": ring.tables[table].copy() for table in TABLES}
        return found

    def restore(self, saved: Saved, at_s: float) -> bool:
        """Returns False and changes nothing if the file is of another node, or of another run of the clock."""
        rings = (("hour", self._hour), ("day", self._day))
        for name, ring in rings:
            bucket = saved.get(f"{name}-bucket")
            if bucket is None or bucket.shape != (1,) or not -1 <= bucket[0] <= at_s // ring.bucket_s:
                return False
            for table in TABLES:
                found = saved.get(f"{name}-{table}")
                if found is None and table in YOUNG_TABLES:
                    continue
                if found is None or found.shape != ring.tables[table].shape or not np.isfinite(found).all():
                    return False
        for name, ring in rings:
            ring.bucket = int(saved[f"{name}-bucket"][0])
            empty = ring.tables
            ring.tables = {
                table: np.maximum(saved.get(f"{name}-{table}", np.zeros_like(empty[table])), 0.0) for table in TABLES
            }
        return True


def _shares(counts: Floats) -> list[float]:
    total = counts.sum()
    return [float(share) for share in (counts / total if total > 0 else counts).round(4)]
