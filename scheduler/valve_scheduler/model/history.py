"""How far a forecast may be promised: as far as it was observed. What was not seen of an hour counts as busy."""

from collections.abc import Mapping

import numpy as np

from valve_scheduler.model.curve import FloatArray
from valve_scheduler.model.forecast import DAY, HOUR, RECENT

LEAST_HISTORY_S, WHOLE_HISTORY_S = 600.0, 3600.0
"""Below the one nothing is promised: a node's first minutes say nothing of the next hour. From the other on all is."""
_MOST_HISTORY_S = {DAY: 86_400.0, HOUR: 86_400.0, RECENT: WHOLE_HISTORY_S / 2, "1m": 300.0}
"""By the longest window that a node reports: it would report the next longer one, had it seen half of that."""


def history_s(idle: Mapping[str, float], observed_s: float | None) -> float:
    """How much time stands behind the windows of one GPU. `observed_s`: how much of the last day its node has seen;
    None: it does not say, and its windows alone tell."""
    most_s = next((most_s for window, most_s in _MOST_HISTORY_S.items() if window in idle), 0.0)

    return most_s if observed_s is None else min(observed_s, most_s)


def belief(history: FloatArray) -> FloatArray:
    """Share of the forecast that may be promised, 0 to 1, by seconds of history."""
    part: FloatArray = np.where(history >= LEAST_HISTORY_S, np.minimum(history / WHOLE_HISTORY_S, 1.0), 0.0)

    return part
