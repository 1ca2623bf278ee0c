"""A(w, n): how far the busy times of a set of GPUs overlap, and how much idle time the set has in common.

A job on several GPUs is stopped whenever one of them is gated. So it can run for 1 - |union of their busy times|. A
node reports the busy share of each GPU and, for each pair, |i and j| / |i or j|. For two GPUs this gives the exact
union. For more it gives bounds. The upper bound is used, so that the promise holds whenever the third GPU was busy.
"""

import numpy as np
from numpy.typing import NDArray

from valve_scheduler.model.curve import FloatArray


def pair_alignment(busy: NDArray[np.bool_], weights: FloatArray | None = None) -> FloatArray:
    """|busy_i and busy_j| / |busy_i or busy_j| of every pair, 1 if both are always idle.

    `busy` holds samples [..., time, gpus].
    """
    mask = np.asarray(busy, dtype=np.float64)
    weighted = mask if weights is None else mask * np.asarray(weights)[..., :, None]
    both = np.swapaxes(weighted, -1, -2) @ mask
    alone = np.diagonal(both, axis1=-2, axis2=-1)
    either = alone[..., :, None] + alone[..., None, :] - both

    return np.divide(both, either, out=np.ones_like(both), where=either > 0)


def busy_union_bound(idle: FloatArray, alignment: FloatArray, members: NDArray[np.intp]) -> FloatArray:
    """Largest possible share of time in which any GPU of each set is busy: [..., sets].

    Union <= sum of busy - sum of pairwise overlaps along any spanning tree (Hunter and Worsley); the best
    star is used as the tree: it costs one sum per GPU. It is exact for two GPUs, and for sets that are busy at the same
    times."""
    busy = 1.0 - np.clip(idle, 0.0, 1.0)
    left, right = busy[..., :, None], busy[..., None, :]
    # A report may be inconsistent (rounded, or made over two windows). So an overlap is cut to the smaller share.
    overlap = np.minimum(alignment * (left + right) / (1.0 + alignment), np.minimum(left, right))
    inside = overlap[..., members[:, :, None], members[:, None, :]]
    shares = busy[..., members]
    star = (inside.sum(axis=-1) - np.diagonal(inside, axis1=-2, axis2=-1)).max(axis=-1)

    bound: FloatArray = np.clip(shares.sum(axis=-1) - star, shares.max(axis=-1), 1.0)

    return bound


def runnable_share(idle: FloatArray, alignment: FloatArray, members: NDArray[np.intp]) -> FloatArray:
    """I * A of each set: the share of time in which all of its GPUs are sure to be idle at once."""
    return 1.0 - busy_union_bound(idle, alignment, members)


def admitted_sets(alignment: FloatArray, members: NDArray[np.intp], theta: FloatArray | float) -> NDArray[np.bool_]:
    """Whether every pair of a set is aligned to at least `theta` (one value, or one per node): [..., sets]. A single
    GPU always is."""
    size = members.shape[1]
    if size == 1:
        return np.ones((*alignment.shape[:-2], members.shape[0]), dtype=np.bool_)
    first, second = np.triu_indices(size, 1)
    pairs = alignment[..., members[:, first], members[:, second]]

    admitted: NDArray[np.bool_] = np.min(pairs, axis=-1) >= np.asarray(theta)[..., None]

    return admitted
