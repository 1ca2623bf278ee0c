"""What an SLA may rest on of a node that was not observed for an hour yet: one judgement for filter, bind, requeueing
and `explain`. Pure."""

from dataclasses import replace

import numpy as np

from valve_scheduler.model.curve import FloatArray
from valve_scheduler.placement.rank import REASON_TEXT, GpuSets, Job, Reason

YOUNG_TEXT = "valve: the node has not been observed for long enough to promise an SLA"
TEXTS = {
    **REASON_TEXT,
    Reason.AVOIDED: "valve: the job missed its SLA on the node, or never got its GPUs there, a short while ago",
}
"""A node is avoided after any move; results pages carry a hash of the other text."""
ANY_SLA = 1e-9
"""Asks what may be promised at all: best effort is ranked by what is forecast, however young the node."""


def promised(sets: GpuSets, belief: FloatArray, job: Job) -> GpuSets:
    """`sets` with as much of their time as may be promised to the job; `belief` is [nodes, 8]. Of a set the GPU decides
    that was observed least."""
    if not job.sla:
        return sets
    least = belief[:, sets.members[:, 0]]
    for column in range(1, sets.members.shape[1]):
        least = np.minimum(least, belief[:, sets.members[:, column]])
    return replace(sets, runnable=sets.runnable * least)


def refusal(reason: Reason, belief: FloatArray) -> str:
    """Why a node is refused; `belief` is of its GPUs."""
    return YOUNG_TEXT if reason is Reason.SLA and not belief.any() else TEXTS[reason]
