"""How far a forecast may be promised: as far as it was observed. What was not seen of an hour counts as busy."""

from collections.abc import Mapping

import numpy as np

from valve_scheduler.model.curve import FloatArray
from valve_scheduler.model.forecast import DAY, HOUR, RECENT

LEAST_HISTORY_S, WHOLE_HISTORY_S = 600.0, 3600.0
"""Below the one nothing is promised: a node's first minutes say nothing of the next hour. From the other on all is."""
_WHOLE_DAY_S = 86_400.0
_MOST_HISTORY_S = {HOUR: WHOLE_HISTORY_S / 2, RECENT: 600.0, "1m": 300.0}
"""By the longest window of a node that has no day behind it: no more than that is known to stand behind its forecast,
whatever it saw long ago."""
_BOOKED_S = 60.0  # the last of an hour may not be booked yet


def history_s(idle: Mapping[str, float], observed_s: float | None, hour_s: float | None = None) -> float:
    """How much time stands behind the windows of one GPU. `observed_s`, `hour_s`: how much of the last day and of the
    last hour its node has seen; None: it does not say, and its windows alone tell."""
    if DAY in idle:
        most_s = _WHOLE_DAY_S
    else:
        most_s = next((most_s for window, most_s in _MOST_HISTORY_S.items() if window in idle), 0.0)
        if hour_s is not None:
            most_s = _of_hour(hour_s) if HOUR in idle else min(most_s, hour_s)

    return most_s if observed_s is None else min(observed_s, most_s)


def _of_hour(seen_s: float) -> float:
    return seen_s if seen_s < WHOLE_HISTORY_S - _BOOKED_S else _WHOLE_DAY_S


def belief(history: FloatArray) -> FloatArray:
    """Share of the forecast that may be promised, 0 to 1, by seconds of history."""
    part: FloatArray = np.where(history >= LEAST_HISTORY_S, np.minimum(history / WHOLE_HISTORY_S, 1.0), 0.0)

    return part
