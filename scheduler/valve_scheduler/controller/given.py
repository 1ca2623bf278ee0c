"""What a node gave a pod, by the node's own measures alone: time with the gate open, and memory. Pure.

An OfflineProfile that a tenant brought says how fast its job is when it is alone. Valve cannot check that, so it never
decides that a pod is moved: a miss counts towards a move when open time and memory alone prove it. What memory is worth
is judged by the curve of jobs without a measurement.
"""

from collections.abc import Collection

from valve_kube.errors import InvalidObject
from valve_kube.objects import Object, node_report

from valve_scheduler.model import memory_factor, memory_weights, prior_profile


def memory_given(node: Object, uuids: Collection[str]) -> float:
    """Share of its speed that free memory left to a job on these GPUs; 1 where nothing is known of it."""
    try:
        report = node_report(node) if node else None
    except InvalidObject:
        return 1.0
    if report is None or report.full_mib <= 0:
        return 1.0
    found = report.histogram[[row for row, uuid in enumerate(report.uuids) if uuid in uuids]]
    shares = found[found.sum(axis=1) > 0]
    if not len(shares):
        return 1.0

    return float(memory_factor(shares, memory_weights(prior_profile(report.full_mib), report.full_mib)).min())
