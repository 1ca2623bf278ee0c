"""How far the clock of this node is from the API server's: what the report's times are worth to people. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

OFF_S, RIGHT_S = 30.0, 15.0
"""Beyond the first the clock is off, and no longer so below the second; the first is that of alert ValveClockSkew."""
_CUT_S = 1.0  # the API server keeps whole seconds


class NodeClock:
    """Learns from each report that was stored. Only the API server can tell: its clock is the cluster's."""

    def __init__(self) -> None:
        self.ahead_s = 0.0  # at least; less than 0: behind
        self.is_off: bool | None = None  # None: no report was stored yet

    def stored(self, sent_s: float, answered_s: float, stored_s: float) -> None:
        """A report was sent and its answer came, by our clock; in between the API server stored it, by its own. However
        long that took, it is never taken for a difference."""
        least_s, most_s = sent_s - (stored_s + _CUT_S), answered_s - stored_s
        self.ahead_s = max(least_s, 0.0) + min(most_s, 0.0)
        self.is_off = abs(self.ahead_s) > (RIGHT_S if self.is_off else OFF_S)

    @property
    def text(self) -> str | None:
        """Empty while it is right. None: nothing was compared yet."""
        if not self.is_off:
            return None if self.is_off is None else ""
        return f"the clock of the node is {abs(self.ahead_s):.0f} s {'ahead' if self.ahead_s > 0 else 'behind'}"


def stored_at_s(item: Mapping[str, Any], manager: str) -> float | None:
    """When the API server stored the status that `manager` wrote last. None: it does not say."""
    fields: Iterable[Mapping[str, Any]] = (item.get("metadata") or {}).get("managedFields") or []
    own = [one for one in fields if (one.get("manager"), one.get("subresource")) == (manager, "status")]
    times = [datetime.fromisoformat(one["time"].replace("Z", "+00:00")).timestamp() for one in own if "time" in one]

    return max(times, default=None)
