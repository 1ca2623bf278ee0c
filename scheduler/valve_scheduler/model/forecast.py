"""What the coming hours leave to offline work: mostly what the last hour left, and a part of its last ten minutes.

Never much more than those ten minutes: a peak that has begun is not promised away for the quiet hour before it. Of what
a node keeps this has the best of GPUs saved against SLAs missed (docs/results/cluster/forecast.md). The ten minutes see
a service that has just begun its day, the hour does not take a pause for a night. The last day misses both: it promises
too much in busy hours and refuses the quiet ones. It stands in for an hour that was not seen."""

from collections.abc import Mapping

import numpy as np

from valve_scheduler.model.curve import FloatArray

RECENT, HOUR, DAY = "10m", "1h", "24h"
_SHORTER = "1m"  # of a node that has just begun
HOUR_WEIGHT = 0.7
MOST_OVER_RECENT = 0.05


def forecast(recent: FloatArray, hour: FloatArray, day: FloatArray) -> FloatArray:
    """Idle share to count on, per GPU. NaN in one of them: the node has not seen that window."""
    longer = np.where(np.isnan(hour), day, hour)
    both = np.minimum(HOUR_WEIGHT * longer + (1.0 - HOUR_WEIGHT) * recent, recent + MOST_OVER_RECENT)
    known = np.where(np.isnan(longer), recent, longer)

    counted: FloatArray = np.nan_to_num(np.where(np.isnan(both), known, both), nan=0.0)

    return counted


def windows_of(idle: Mapping[str, float]) -> tuple[float, float, float]:
    """Ten minutes, hour and day of one GPU as its node reports them; a younger node's ten minutes are its first one."""
    recent = idle.get(RECENT, idle.get(_SHORTER, np.nan))

    return float(recent), float(idle.get(HOUR, np.nan)), float(idle.get(DAY, np.nan))
