"""Small fleets for the tests of the cluster half: nodes like each other, then changed one thing at a time."""

from dataclasses import dataclass, field

import numpy as np
from valve_scheduler.model import HISTOGRAM_BINS, MAX_GPUS, free_histogram
from valve_scheduler.placement.rank import Fleet, Standing

FULL_MIB = 80_000.0


@dataclass
class NodeSpec:
    """One node of the fleet; the default is idle half of the time, in step, with all memory free."""

    standing: Standing = Standing.HARVESTING
    gpu_model: str = "H100"
    full_mib: float = FULL_MIB
    gpus: int = MAX_GPUS
    idle: float = 0.5
    free_mib: float = FULL_MIB
    online_peak_mib: float = 0.0
    alignment: float = 1.0
    taken: set[int] = field(default_factory=set)


def fleet_of(**nodes: NodeSpec) -> Fleet:
    count = len(nodes)
    idle = np.zeros((count, MAX_GPUS))
    histogram = np.zeros((count, MAX_GPUS, HISTOGRAM_BINS))
    online_peak = np.zeros((count, MAX_GPUS))
    alignment = np.ones((count, MAX_GPUS, MAX_GPUS))
    open_gpus = np.zeros((count, MAX_GPUS), dtype=np.bool_)
    for row, node in enumerate(nodes.values()):
        idle[row] = node.idle
        histogram[row] = free_histogram(np.array([node.free_mib]), node.full_mib)
        online_peak[row] = node.online_peak_mib
        alignment[row] = np.where(np.eye(MAX_GPUS, dtype=np.bool_), 1.0, node.alignment)
        open_gpus[row, : node.gpus] = True
        open_gpus[row, list(node.taken)] = False

    return Fleet(
        names=list(nodes),
        standing=np.array([node.standing for node in nodes.values()], dtype=np.int8),
        gpu_model=np.array([node.gpu_model for node in nodes.values()]),
        full_mib=np.array([node.full_mib for node in nodes.values()]),
        idle=idle,
        histogram=histogram,
        online_peak=online_peak,
        alignment=alignment,
        open_gpus=open_gpus,
    )
