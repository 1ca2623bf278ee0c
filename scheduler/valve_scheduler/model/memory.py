"""M(w, n): what short memory costs, as the dot product of a free-memory histogram with a vector per workload.

The histogram has fixed bins relative to the card's memory, so reports of unequal cards stay comparable and a
decision over 8,000 GPUs is one matrix product; no series of samples is needed at decision time."""

import numpy as np

from valve_scheduler.model.curve import FloatArray, WorkloadProfile

# 32 bins are 2.5 GiB on an 80 GB card: finer than any handle size, and a node report stays under 5 KB.
HISTOGRAM_BINS = 32


def bin_centres(full_mib: float) -> FloatArray:
    return (np.arange(HISTOGRAM_BINS) + 0.5) * (full_mib / HISTOGRAM_BINS)


def free_histogram(free_mib: FloatArray, full_mib: float, weights: FloatArray | None = None) -> FloatArray:
    """Share of (weighted) time in each bin of free memory; all zero without samples.

    Sample while offline may run: memory that is free only while online computes is of no use to it.
    """
    position = np.asarray(free_mib, dtype=np.float64) * (HISTOGRAM_BINS / full_mib)
    bins = np.clip(position.astype(np.intp), 0, HISTOGRAM_BINS - 1)
    counts = np.bincount(bins, weights=weights, minlength=HISTOGRAM_BINS).astype(np.float64)
    total = counts.sum()

    return counts / total if total > 0 else counts


def memory_weights(profile: WorkloadProfile, full_mib: float) -> FloatArray:
    """The vector v_w with M = histogram . v_w: phi(free) / phi(full) - kappa * max(0, need - free) / need."""
    centres = bin_centres(full_mib)
    at_full = float(profile.curve.at(np.array([full_mib]))[0])
    if at_full <= 0:
        return np.zeros(HISTOGRAM_BINS)  # the smallest measured point does not fit on this card
    weights = profile.curve.at(centres) / at_full
    if profile.need_mib > 0:
        missing = np.maximum(0.0, profile.need_mib - centres) / profile.need_mib
        weights = weights - profile.deficit_cost * missing

    return weights


def memory_factor(histogram: FloatArray, weights: FloatArray) -> FloatArray:
    """M per GPU in [0, 1]; `histogram` is [..., bins], `weights` is [bins]."""
    mean: FloatArray = histogram @ weights.astype(histogram.dtype)

    return np.clip(mean, 0.0, 1.0)


def fits_share(histogram: FloatArray, fit_mib: float, full_mib: float) -> FloatArray:
    """Share of time in which at least `fit_mib` were free; a bin counts when its lower edge is enough."""
    lower_edges = np.arange(HISTOGRAM_BINS) * (full_mib / HISTOGRAM_BINS)

    share: FloatArray = histogram @ (lower_edges >= fit_mib).astype(histogram.dtype)

    return share
