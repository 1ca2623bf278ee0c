"""What an SLA may rest on of a node that was not observed for an hour yet: one judgement for filter, bind, requeueing
and `explain`. Pure."""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from valve_scheduler.model.curve import FloatArray
from valve_scheduler.placement.rank import REASON_TEXT, Fleet, GpuSets, Job, Reason

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
    return replace(sets, runnable=sets.runnable * _least(sets, belief)) if job.sla else sets


def young(fleet: Fleet, sets: GpuSets, belief: FloatArray) -> NDArray[np.bool_]:
    """[nodes] Whether no set of open GPUs was observed for long enough to promise any SLA."""
    open_belief: FloatArray = np.where(fleet.open_gpus, belief, 0.0)
    return np.asarray(_least(sets, open_belief).max(axis=-1) == 0.0)


def refusal(reason: Reason, is_young: bool) -> str:
    """Why a node is refused."""
    return YOUNG_TEXT if reason is Reason.SLA and is_young else TEXTS[reason]


def _least(sets: GpuSets, belief: FloatArray) -> FloatArray:
    """[nodes, sets]"""
    least = belief[:, sets.members[:, 0]]
    for column in range(1, sets.members.shape[1]):
        least = np.minimum(least, belief[:, sets.members[:, column]])
    return least
