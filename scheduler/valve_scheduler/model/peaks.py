"""What online work uses of a card at its peaks, and whether a job may hold memory beside that.

A job gives its cache back when online needs memory, never its weights. Where online's peaks reach into what the job
holds, requests wait for memory that no reclaim can free: the service pays for the pair, however fast a stop is."""

import numpy as np
from numpy.typing import NDArray

from valve_scheduler.model.curve import FloatArray
from valve_scheduler.model.memory import HISTOGRAM_BINS

PEAK_QUANTILE = 0.99
"""Of the time in which online holds the GPU: what it uses beyond that for a moment, it waits for a moment."""
SPARE_SHARE = 0.1
"""Of the card: what engines leave unused, and what an online service that is short already can no longer take."""
UNMEASURED_SHARE = 0.25
"""The share of the card that an unmeasured job is taken to hold. An 8B model in 16 bits is 24 % of 80 GB."""


def peak_mib(histogram: FloatArray, full_mib: float) -> FloatArray:
    """Upper edge of the bin that holds the quantile, [...]; `histogram` is [..., bins]. 0: no online work was seen."""
    total = histogram.sum(axis=-1)
    reached = np.cumsum(histogram, axis=-1) >= PEAK_QUANTILE * total[..., None] * (1 - 1e-9)
    bins = reached.argmax(axis=-1) + 1.0

    peak: FloatArray = np.where(total > 0, bins * (full_mib / HISTOGRAM_BINS), 0.0)

    return peak


def held_mib(fit_mib: float, full_mib: float) -> float:
    """What the job keeps whatever online needs; `fit_mib` 0: not measured."""
    return fit_mib if fit_mib > 0 else UNMEASURED_SHARE * full_mib


def has_room(peak: FloatArray, held: float, full_mib: float) -> NDArray[np.bool_]:
    """Whether online finds its peak beside what the job holds; yes where no peak was ever reported."""
    return np.asarray((peak <= 0) | (peak + held <= (1.0 - SPARE_SHARE) * full_mib))
