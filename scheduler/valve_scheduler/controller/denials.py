"""Offline pods to which their node cannot give their GPUs: a CDI description is missing, a plugin or a hook fails.

The kubelet tries such a pod for ever, and its GPUs and slots are taken. Another node may do better. So once that has
lasted the pod is moved, by a small budget and by the back-off of those that miss their SLA, and its owner keeps away
from the node as theirs do. A pod that nothing would make anew stays. While harvesting is held there nothing counts."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from valve_kube.client import Json
from valve_kube.devices import denied_devices
from valve_kube.errors import InvalidObject
from valve_kube.objects import PodPlace, offline_pod, pod_place
from valve_kube.owners import is_bare, key_of_owner

from valve_scheduler.controller.monitor import Sample, Track, Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Denial:
    """One pod that lacks its devices, and since when."""

    pod: Json
    note: str
    since_s: float


class Denials:
    """Remembers since when each pod has lacked its devices; begins anew with the controller, as windows do."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self.of: dict[str, Denial] = {}  # by UID of the pod
        self._moved: list[tuple[float, str]] = []  # when, and of which owner

    def look(self, pods: Iterable[Json], is_held: Callable[[PodPlace], bool], now_s: float) -> None:
        before, self.of = self.of, {}
        for pod in pods:
            why = denied_devices(pod)
            if not why or is_bare(pod) or pod["metadata"].get("deletionTimestamp"):
                continue
            place = pod_place(pod)
            if place.node and place.gpu_uuids and not place.finished and not is_held(place):
                since_s = before[place.uid].since_s if place.uid in before else now_s
                note = f"{place.node} cannot give it its GPUs: {why}; placed anew"
                self.of[place.uid] = Denial(pod=pod, note=note, since_s=since_s)

    def lasting(self, now_s: float) -> list[Json]:
        """The pods to move."""
        return [one.pod for one in self.of.values() if now_s - one.since_s >= self._patience_s]

    def moved(self, owner_uid: str, now_s: float) -> None:
        """A pod of that owner went."""
        self._moved.append((now_s, owner_uid))

    def spent(self, now_s: float, budget_s: float) -> Counter[str]:
        """Moves of late, by owner."""
        self._moved = [one for one in self._moved if now_s - one[0] < budget_s]
        return Counter(uid for _, uid in self._moved)


def denied_track(pod: Json) -> Track | None:
    """The pod as one that wants to move; it has made nothing of what it was promised. None: it cannot be read."""
    try:
        wish, place = offline_pod(pod), pod_place(pod)
    except InvalidObject:
        return None
    sample = Sample(
        pod_uid=wish.uid,
        owner_uid=key_of_owner(wish.namespace, wish.owner_uid),
        namespace=wish.namespace,
        gpus=wish.gpus,
        node=place.node,
        sla=wish.sla,
        standalone_tokens_per_s=0.0,
        runtime_s=0.0,
        demand_s=0.0,
        tokens=None,
    )
    return Track(sample=sample, verdict=Verdict.PERSISTENTLY_MISSED)
