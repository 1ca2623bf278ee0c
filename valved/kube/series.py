"""An hour of this node in buckets of ten seconds: who was busy when, and how much memory was free.

Busy is what the gate knows (an online service holds the GPU), not what the card reports: utilisation counts offline
work as well. Memory counts only while offline work may run; what is free while online computes is of no use to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from valve_scheduler.model import HISTOGRAM_BINS

BUCKET_S = 10
BUCKETS = 360
WINDOWS_S = {"1m": 60, "10m": 600, "1h": 3600}
Floats = NDArray[np.float64]


class NodeSeries:
    """Fed with `beat` (who is busy, many times a second) and `book` (time accounts and memory, about once)."""

    def __init__(self, gpus: int) -> None:
        self.gpus = gpus
        self._bucket = -1
        self._beats = np.zeros((BUCKETS, gpus, gpus))  # samples in which both were busy; the diagonal: one
        self._elapsed = np.zeros((BUCKETS, gpus))
        self._open = np.zeros((BUCKETS, gpus))
        self._free = np.zeros((BUCKETS, gpus, HISTOGRAM_BINS))

    def beat(self, at_s: float, busy: Sequence[bool]) -> None:
        row = self._row(at_s)
        mask = np.array(busy, dtype=np.float64)
        if mask.any():
            self._beats[row] += np.outer(mask, mask)

    def book(self, at_s: float, seen_s: Sequence[float], left_s: Sequence[float]) -> None:
        """Of each GPU: the time since the last call in which anybody could tell, and how much of it online left."""
        row = self._row(at_s)
        self._elapsed[row] += np.array(seen_s)
        self._open[row] += np.clip(np.array(left_s), 0.0, np.array(seen_s))

    def memory(self, at_s: float, gpu: int, free: int, total: int) -> None:
        if total > 0:
            bin_ = min(HISTOGRAM_BINS - 1, max(0, free) * HISTOGRAM_BINS // total)
            self._free[self._row(at_s), gpu, bin_] += 1.0

    def idle(self, gpu: int, window_s: int) -> float:
        """Share of the window in which no online service was busy; of the time seen, if that is shorter."""
        rows = self._last(window_s)
        elapsed = float(self._elapsed[rows, gpu].sum())
        return float(self._open[rows, gpu].sum()) / elapsed if elapsed > 0 else 0.0

    def windows(self, gpu: int) -> Mapping[str, float]:
        return {name: round(self.idle(gpu, window_s), 4) for name, window_s in WINDOWS_S.items()}

    def histogram(self, gpu: int) -> list[float]:
        counts = self._free[:, gpu].sum(axis=0)
        total = counts.sum()
        return [float(share) for share in (counts / total if total > 0 else counts).round(4)]

    def alignment(self) -> list[float]:
        """|i and j busy| / |i or j busy| over the hour, upper triangle by rows; 1 where both were always idle."""
        both = self._beats.sum(axis=0)
        alone = np.diagonal(both)
        either = alone[:, None] + alone[None, :] - both
        pairs = np.divide(both, either, out=np.ones_like(both), where=either > 0)
        return [float(value) for value in pairs[np.triu_indices(self.gpus, 1)].round(4)]

    def _row(self, at_s: float) -> int:
        """The bucket of now; those that were skipped or are an hour old are emptied on the way."""
        bucket = int(at_s // BUCKET_S)
        if self._bucket < 0:
            self._bucket = bucket
        for stale in range(max(self._bucket + 1, bucket - BUCKETS + 1), bucket + 1):
            for table in (self._beats, self._elapsed, self._open, self._free):
                table[stale % BUCKETS] = 0.0
        self._bucket = max(self._bucket, bucket)
        return bucket % BUCKETS

    def _last(self, window_s: int) -> NDArray[np.intp]:
        count = min(window_s // BUCKET_S, BUCKETS)
        return np.arange(self._bucket - count + 1, self._bucket + 1) % BUCKETS
