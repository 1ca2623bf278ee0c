"""Quantiles of the latest samples, computed anew now and then: a step must not pay for a sort."""

from __future__ import annotations

import numpy as np


class Recent:
    """The latest `size` samples. `value` is their quantile `q` as of the last `every` samples."""

    __slots__ = ("_at", "_due", "_every", "_kept", "_q", "count", "value")

    def __init__(self, q: float, *, size: int = 512, every: int = 64, start: float = 0.0) -> None:
        self._kept = np.zeros(size)
        self._q = q
        self._every = every
        self._at = 0
        self._due = 1
        self.count = 0
        self.value = start

    def add(self, sample: float) -> None:
        self._kept[self._at] = sample
        self._at = (self._at + 1) % self._kept.size
        self.count += 1
        self._due -= 1
        if self._due <= 0:
            # The first samples count at once; a full ring changes slowly.
            self._due = min(self._every, self.count)
            self.value = self.quantile(self._q)

    def quantile(self, q: float) -> float:
        """The quantile of what is kept, the larger neighbour where it falls between two."""
        held = min(self.count, self._kept.size)
        if not held:
            return self.value
        rank = min(held - 1, int(np.ceil(q * (held - 1))))
        return float(np.partition(self._kept[:held], rank)[rank])
