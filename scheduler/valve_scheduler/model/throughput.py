"""T(w, n): the predicted share of standalone throughput per GPU set, and the best set of each node."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from valve_scheduler.model.curve import FloatArray


@dataclass(frozen=True, slots=True, kw_only=True)
class SetChoice:
    """Per node the best allowed set (index into its members table, -1: none) and its predicted share."""

    set_index: NDArray[np.intp]
    share: FloatArray


def idle_share(runnable_ns: FloatArray, window_ns: FloatArray) -> FloatArray:
    """I: the part of the window in which the gate let offline run, or would have; 0 for an empty window."""
    window = np.asarray(window_ns, dtype=np.float64)
    runnable = np.asarray(runnable_ns, dtype=np.float64)
    share = np.divide(runnable, window, out=np.zeros_like(runnable), where=window > 0)

    return np.clip(share, 0.0, 1.0)


def set_throughput(runnable: FloatArray, memory: FloatArray, members: NDArray[np.intp]) -> FloatArray:
    """Share of standalone throughput per set: time it can run x memory factor of its poorest GPU: [...,
    sets].

    `runnable` is [..., sets] of `runnable_share`, `memory` is [..., gpus] of `memory_factor`. The ranks of a
    job move in step, so the GPU with the least memory sets the pace of all."""
    return runnable * _least(memory, members)


def best_sets(share: FloatArray, allowed: NDArray[np.bool_]) -> SetChoice:
    """Of the allowed sets of each node the one with the highest share, the first among equals."""
    masked = np.where(allowed, share, -1.0)
    index = masked.argmax(axis=-1)
    best = np.take_along_axis(masked, index[..., None], axis=-1)[..., 0]
    found = best >= 0

    return SetChoice(set_index=np.where(found, index, -1), share=np.where(found, best, 0.0))


def _least(values: FloatArray, members: NDArray[np.intp]) -> FloatArray:
    """Minimum over the members of each set; one pass per member beats a three-dimensional gather fourfold."""
    least = values[..., members[:, 0]]
    for column in range(1, members.shape[1]):
        least = np.minimum(least, values[..., members[:, column]])

    return least
