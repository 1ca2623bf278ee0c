"""Stops offline pods that use a GPU without the shim or past it: frozen by signal, reported, evicted by the controller.
So is one for which valved had no room. Nobody knows that its shim stops it, and another node may have room.

Nothing else can stop such a process when a request comes, so it is frozen at the second look that finds it: within two
seconds. One look is not enough: a process may be in NVML's list for a moment before it is registered. A shim that has
lost its link needs longer to be back: one that was registered before, and all of them after valved started or stood.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from valved.model.ids import ProcessId
from valved.policy.guard import Stranger

PATIENCE_S = 0.5  # between the look that finds a process and the one that freezes it; they are a second apart
SETTLE_S = 4.0  # longer than shims take to come back (link.come_back_s)
STOOD_S = 1.5  # a look so late says that valved stood, or the machine


@dataclass(frozen=True, slots=True, kw_only=True)
class UngatedFacts:
    """An offline pod that was found on a GPU without the shim."""

    pod_uid: str
    name: str
    seconds: float  # GPU time for which nothing could stop it


@dataclass(slots=True)
class _Sighting:
    since_s: float
    charged_s: float  # up to here its time is counted
    unheard_s: float = 0.0  # for which it could have come back
    is_frozen: bool = False


@dataclass(slots=True)
class Ungated:
    freeze: Callable[[ProcessId, str], bool]  # True: it stands still
    patience_s: float = PATIENCE_S
    settle_s: float = SETTLE_S
    seconds: float = 0.0  # of all pods since the start
    _seen: dict[ProcessId, _Sighting] = field(default_factory=dict)
    _pods: dict[str, tuple[str, float]] = field(default_factory=dict)  # UID -> name, seconds
    _registered: set[ProcessId] = field(default_factory=set)  # at some look
    _looked_s: float = -math.inf
    _settled_s: float = math.inf  # from then on shims have had the time to come back

    def look(self, strangers: Iterable[Stranger], now_s: float, registered: Iterable[ProcessId] = ()) -> bool:
        """Once a second, with every process that uses a GPU and is not heard there. True: a pod was not known."""
        known = set(self._pods)
        gap_s = now_s - self._looked_s
        if gap_s > STOOD_S:
            self._settled_s = now_s + self.settle_s
        self._looked_s = now_s
        here = {one.process: one for one in strangers if one.process is not None and one.offline_uid}
        self._registered = set(registered) | (self._registered & here.keys())
        self._seen = {process: sighting for process, sighting in self._seen.items() if process in here}
        for process, one in here.items():
            sighting = self._seen.get(process)
            if sighting is None:
                sighting = self._seen[process] = _Sighting(since_s=now_s, charged_s=now_s)
            else:
                sighting.unheard_s += min(gap_s, STOOD_S)  # no more: valved may have stood for the rest
            patience_s = self.settle_s if process in self._registered else self.patience_s
            is_settled = now_s >= self._settled_s or sighting.unheard_s >= self.settle_s  # looks may be late for ever
            if now_s - sighting.since_s < patience_s or not is_settled:
                continue
            ran_s = 0.0 if sighting.is_frozen else now_s - sighting.charged_s
            sighting.charged_s = now_s
            sighting.is_frozen = self.freeze(
                process, f"{one.name} uses a GPU {one.how}"
            )  # again each time: its pod may have let it go on
            _, before_s = self._pods.get(one.offline_uid, ("", 0.0))
            self._pods[one.offline_uid] = one.name, before_s + ran_s
            self.seconds += ran_s
        return not self._pods.keys() <= known

    def facts(self, live: Iterable[str]) -> tuple[UngatedFacts, ...]:
        """Of pods that still live; the others are forgotten."""
        live = set(live)
        self._pods = {uid: found for uid, found in self._pods.items() if uid in live}
        return tuple(
            UngatedFacts(pod_uid=uid, name=name, seconds=seconds) for uid, (name, seconds) in sorted(self._pods.items())
        )
