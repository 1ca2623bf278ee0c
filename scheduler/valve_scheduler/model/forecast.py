"""What the coming hours leave to offline work: the lower of what the last hour and the last day left.

The hour follows what a service does now, the day remembers that it has busy hours. Either alone promises too much: the
hour at night, the day when a service has grown. A promise is kept for hours if both can keep it."""

from collections.abc import Mapping

import numpy as np

from valve_scheduler.model.curve import FloatArray

HOUR, DAY = "1h", "24h"
_SHORTER = ("10m", "1m")  # of a node that has just begun


def forecast(hour: FloatArray, day: FloatArray) -> FloatArray:
    """Idle share to count on, per GPU. NaN in one of them: the node has not seen that window."""
    return np.nan_to_num(np.fmin(hour, day), nan=0.0)


def windows_of(idle: Mapping[str, float]) -> tuple[float, float]:
    """Hour and day of one GPU as its node reports them; a younger node's hour is its longest shorter window."""
    hour = next((float(idle[name]) for name in (HOUR, *_SHORTER) if name in idle), np.nan)

    return hour, float(idle.get(DAY, np.nan))
