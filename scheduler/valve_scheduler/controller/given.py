"""What a node gave a pod, by the node's own measures alone: time with the gate open, and memory. Pure.

An OfflineProfile that a tenant brought says how fast its job is when it is alone. Nobody checks that, so it never
decides that a pod is moved: a miss counts towards a move when open time and memory alone prove it. What memory is worth
is judged by the curve of jobs that nobody has measured.
"""

from collections.abc import Collection

import numpy as np
from valve_kube.objects import Object

from valve_scheduler.model import memory_factor, memory_weights, prior_profile


def memory_given(node: Object, uuids: Collection[str]) -> float:
    """Share of its speed that free memory left to a job on these GPUs; 1 where nothing is known of it."""
    status = node.get("status") or {}
    full_mib = float(status.get("memoryMiB") or 0.0)
    found = [gpu.get("freeMemory") or [] for gpu in status.get("gpus") or [] if gpu["uuid"] in uuids]
    histograms = np.array([one for one in found if sum(one) > 0], dtype=np.float64)
    if full_mib <= 0 or not len(histograms):
        return 1.0
    shares = histograms / histograms.sum(axis=1, keepdims=True)

    return float(memory_factor(shares, memory_weights(prior_profile(full_mib), full_mib)).min())
