"""Numbers the pairs of a node's GPUs, in the order of the numbers that nodes report for each pair."""

import functools

import numpy as np
from numpy.typing import NDArray


@functools.cache
def pair_indices(count: int) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Of each pair the first and the second: (0, 1), (0, 2), ..."""
    first, second = np.triu_indices(count, 1)
    return first, second
