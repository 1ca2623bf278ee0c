"""What must not be forgotten of the owners of offline pods: evictions and avoided nodes, ours and those stored. Pure.

The view of the API server may be a write behind, and a write may be refused. The controller therefore decides by both
copies together, and asks for an eviction only after the OfflineWorkload that counts it has been written."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from valve_scheduler.controller.monitor import MonitorSettings, Owner


class Records:
    """Owners by UID, as this process wrote them last."""

    def __init__(self) -> None:
        self._mine: dict[str, Owner] = {}

    def merged(self, stored: Mapping[str, Owner], now_s: float, settings: MonitorSettings) -> dict[str, Owner]:
        """Every owner as it stands. An owner that is stored no more still counts in the budget of the fleet."""
        self._mine = {uid: owner for uid, mine in self._mine.items() if (owner := _recent(mine, now_s, settings))}
        return {uid: union(stored.get(uid, Owner()), self._mine.get(uid, Owner())) for uid in {*stored, *self._mine}}

    def keep(self, uid: str, owner: Owner) -> None:
        self._mine[uid] = owner


def union(one: Owner, other: Owner) -> Owner:
    """Stored times are whole seconds; of equal times the copy that counts more pods is right."""
    times = Counter(map(_second, one.evicted_at_s)) | Counter(map(_second, other.evicted_at_s))
    avoid = {**one.avoid_until_s}
    for node, until_s in other.avoid_until_s.items():
        avoid[node] = max(until_s, avoid.get(node, 0.0))

    return Owner(evicted_at_s=tuple(sorted(times.elements())), avoid_until_s=avoid)


def _recent(owner: Owner, now_s: float, settings: MonitorSettings) -> Owner | None:
    """Without what is too old to matter; None when nothing is left."""
    kept = tuple(at_s for at_s in owner.evicted_at_s if now_s - at_s < settings.forget_s)
    avoid = {node: until_s for node, until_s in owner.avoid_until_s.items() if until_s > now_s}

    return replace(owner, evicted_at_s=kept, avoid_until_s=avoid) if kept or avoid else None


def _second(at_s: float) -> float:
    return float(int(at_s))
