"""How long a step will take: measured before, else by a line through what was measured, else by the machine's shape.

Two stages. Alone, time is a line in batch and context for each share of the card's processors. Beside other work it is
that time times max(1, b * own share + k * other's share), fitted over all pairs without an intercept: below 1 the
other's work would speed ours up.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from enum import Enum
from math import log2

import numpy as np
from numpy.typing import NDArray

from .recent import Recent

TRUSTED = 3
"""Measurements after which a key is believed."""
OCTAVES = 4
"""Cells per doubling of batch or context."""
FORGET = 0.1
REFIT = 64
RIDGE = 1e-9


class Source(Enum):
    MEASURED = "measured"
    FITTED = "fitted"
    ROOFLINE = "roofline"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    ms: float
    source: Source


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorQuantiles:
    """Absolute error in ms of the predictions that were followed by a measurement."""

    p50: float
    p95: float
    p99: float
    samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """What the machine's shape says where nothing was measured: bytes over bandwidth or work over speed."""

    weights_bytes: float
    kv_bytes_per_token: float
    flops_per_token: float
    bandwidth_bytes_s: float
    flops_s: float

    def ms(self, batch: float, context: float) -> float:
        read = (self.weights_bytes + self.kv_bytes_per_token * context) / self.bandwidth_bytes_s
        return 1e3 * max(read, self.flops_per_token * batch / self.flops_s)


class Line:
    """Least squares of ms over (1, batch, context), refitted online; no coefficient is below zero."""

    def __init__(self) -> None:
        # Sums of (1, batch, context) times each other and times ms: plain numbers, a step adds to them.
        self._sums = [0.0] * 9
        self._due = TRUSTED
        self.samples = 0
        self.fixed_ms = 0.0
        self.batch_ms = 0.0
        self.context_ms = 0.0

    def add(self, batch: float, context: float, ms: float) -> None:
        products = (1.0, batch, context, batch * batch, batch * context, context * context)
        sums = self._sums
        for place, value in enumerate((*products, ms, batch * ms, context * ms)):
            sums[place] += value
        self.samples += 1
        self._due -= 1
        if self._due <= 0:
            self._due = min(REFIT, self.samples)
            self.fit()

    def fit(self) -> None:
        """The best line whose coefficients are not negative: of eight sets of columns the one with the least error."""
        if self.samples == 0:
            return
        one, b, c, bb, bc, cc, *target_sums = self._sums
        raw = np.array(((one, b, c), (b, bb, bc), (c, bc, cc)))
        scale = np.sqrt(np.maximum(np.diag(raw), 1e-300))
        moments = raw / np.outer(scale, scale)
        target = np.array(target_sums) / scale
        best, least = np.zeros(3), np.inf
        for mask in range(1, 8):
            columns = [column for column in range(3) if mask >> column & 1]
            part = moments[np.ix_(columns, columns)] + RIDGE * np.eye(len(columns))
            found = np.linalg.solve(part, target[columns])
            if (found < 0).any():
                continue
            error = float(found @ moments[np.ix_(columns, columns)] @ found - 2 * found @ target[columns])
            if error < least:
                least, best = error, np.zeros(3)
                best[columns] = found
        self.fixed_ms, self.batch_ms, self.context_ms = (float(value) for value in best / scale)

    def ms(self, batch: float, context: float) -> float:
        return self.fixed_ms + self.batch_ms * batch + self.context_ms * context


class Slowdown:
    """The second stage: the factor by which work beside ours stretches our step."""

    def __init__(self) -> None:
        self._moments: NDArray[np.float64] = np.zeros((2, 2))
        self._target: NDArray[np.float64] = np.zeros(2)
        self.samples = 0
        self.own = 0.0
        self.other = 0.0

    def add(self, own_share: float, other_share: float, factor: float) -> None:
        row = np.array((own_share, other_share))
        self._moments += np.outer(row, row)
        self._target += row * factor
        self.samples += 1
        if self.samples >= TRUSTED:
            found = np.linalg.solve(self._moments + RIDGE * np.eye(2), self._target)
            self.own, self.other = float(found[0]), float(found[1])

    def factor(self, own_share: float, other_share: float) -> float:
        return max(1.0, self.own * own_share + self.other * other_share)


@dataclass(slots=True)
class _Cell:
    """Running means of one key."""

    samples: int
    batch: float
    context: float
    ms: float


def _level(value: float) -> int:
    """Whole numbers up to eight, then four levels per doubling."""
    return int(value) if value <= 8 else 8 + int(OCTAVES * log2(value / 8.0))


class StepModel:
    """Predicts steps and learns from each one measured; `errors` says how far off it was."""

    def __init__(self, roofline: Roofline | None = None) -> None:
        self._roofline = roofline
        self._cells: dict[tuple[int, int, float, float], _Cell] = {}
        self._alone: dict[float, Line] = {}
        self._beside = Slowdown()
        self._late = Recent(0.95)
        self._absolute = Recent(0.95)
        self._units: dict[Hashable, int] = {}

    def predict(self, batch: int, context: int, share: float = 1.0, other: float = 0.0) -> Prediction:
        """A step of `batch` sequences with `context` tokens in all, on `share` of the card beside `other`."""
        line = self._alone.get(share)
        cell = self._cells.get((_level(batch), _level(context), share, other))
        if cell is not None and cell.samples >= TRUSTED:
            slope = 0.0
            if line is not None and line.samples >= TRUSTED:
                slope = line.batch_ms * (batch - cell.batch) + line.context_ms * (context - cell.context)
            return Prediction(ms=max(0.0, cell.ms + slope), source=Source.MEASURED)
        if line is not None and line.samples >= TRUSTED:
            ms = line.ms(batch, context)
            if other > 0:
                ms *= self._beside.factor(share, other)
            return Prediction(ms=ms, source=Source.FITTED)
        if self._roofline is not None:
            return Prediction(ms=self._roofline.ms(batch, context) / max(share, 1e-3), source=Source.ROOFLINE)
        return Prediction(ms=float("inf"), source=Source.UNKNOWN)

    def observe(self, batch: int, context: int, ms: float, share: float = 1.0, other: float = 0.0) -> None:
        """A step took `ms`."""
        before = self.predict(batch, context, share, other)
        if before.source is not Source.UNKNOWN:
            self._late.add(ms - before.ms)
            self._absolute.add(abs(ms - before.ms))
        key = (_level(batch), _level(context), share, other)
        cell = self._cells.get(key)
        if cell is None:
            self._cells[key] = _Cell(1, batch, context, ms)
        else:
            cell.samples += 1
            weight = max(FORGET, 1.0 / cell.samples)
            cell.batch += weight * (batch - cell.batch)
            cell.context += weight * (context - cell.context)
            cell.ms += weight * (ms - cell.ms)
        if other > 0:
            line = self._alone.get(share)
            if line is not None and line.samples >= TRUSTED:
                self._beside.add(share, other, ms / max(line.ms(batch, context), 1e-6))
        else:
            self._alone.setdefault(share, Line()).add(batch, context, ms)

    @property
    def late_ms(self) -> float:
        """What is added to a prediction so that 95 of 100 steps are no later."""
        return max(0.0, self._late.value)

    @property
    def fixed_ms(self) -> float:
        """The part of a step that does not depend on the batch."""
        line = self._alone.get(1.0)
        return line.fixed_ms if line is not None else 0.0

    def errors(self) -> ErrorQuantiles:
        kept = self._absolute
        return ErrorQuantiles(
            p50=kept.quantile(0.5), p95=kept.quantile(0.95), p99=kept.quantile(0.99), samples=kept.count
        )

    def allowed(self, key: Hashable, wanted: int) -> int:
        """How many tiles of this kind may be planned at once: one until three were measured."""
        return wanted if self._units.get(key, 0) >= TRUSTED else min(wanted, 1)

    def measured(self, key: Hashable) -> None:
        """An iteration with tiles of this kind was measured."""
        self._units[key] = self._units.get(key, 0) + 1
