"""Stops offline pods that use a GPU without the shim: frozen by signal, reported, evicted by the controller.

Nothing else can stop such a process when a request comes. One look is not enough to judge: a process is in NVML's list
for a moment before it is registered, and all of them are after a restart of valved until their shims are back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from valved.model.ids import ProcessId
from valved.policy.guard import Stranger

PATIENCE_S = 4.0  # longer than shims take to come back (link.come_back_s) and than two looks


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
    is_frozen: bool = False


@dataclass(slots=True)
class Ungated:
    freeze: Callable[[ProcessId, str], bool]  # True: it stands still
    patience_s: float = PATIENCE_S
    seconds: float = 0.0  # of all pods since the start
    _seen: dict[ProcessId, _Sighting] = field(default_factory=dict)
    _pods: dict[str, tuple[str, float]] = field(default_factory=dict)  # UID -> name, seconds

    def look(self, strangers: Iterable[Stranger], now_s: float) -> bool:
        """Once a second, with everybody who uses a GPU and is not registered. True: a pod was not known."""
        known = set(self._pods)
        here = {one.process: one for one in strangers if one.process is not None and one.offline_uid}
        self._seen = {process: sighting for process, sighting in self._seen.items() if process in here}
        for process, one in here.items():
            sighting = self._seen.setdefault(process, _Sighting(since_s=now_s, charged_s=now_s))
            if now_s - sighting.since_s < self.patience_s:
                continue
            ran_s = 0.0 if sighting.is_frozen else now_s - sighting.charged_s
            sighting.charged_s = now_s
            sighting.is_frozen = self.freeze(process, one.name)  # again each time: its pod may have let it go on
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
