"""Which GPU sets a node offers to a job of k GPUs: every combination, in the order of the GPU indices."""

from functools import cache
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

# Nodes of more than eight GPUs are rare and C(16, 8) = 12,870 sets would not fit the 20 ms of a decision.
MAX_GPUS = 8


@cache
def set_members(gpu_count: int) -> NDArray[np.intp]:
    """Members of every set of `gpu_count` GPUs: [sets, gpu_count], in rising order."""
    if not 1 <= gpu_count <= MAX_GPUS:
        raise ValueError(f"gpu_count is {gpu_count}, a set has 1 to {MAX_GPUS} GPUs of one node")
    members = np.array(list(combinations(range(MAX_GPUS), gpu_count)), dtype=np.intp)
    members.flags.writeable = False

    return members
