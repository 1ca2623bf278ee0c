"""Offline pods that are placed where they can never run: their GPU is gone from the node, or another pod has it.

A card is replaced or falls off the bus; a Binding that was given up came through after all. The kubelet tries such a
pod for ever, and its GPUs and slots are taken. It is evicted once that has been so for a while."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from valve_kube.objects import Object, PodPlace, pod_place


@dataclass(frozen=True, slots=True, kw_only=True)
class Misplaced:
    pod: Object
    note: str


class Stuck:
    """Remembers since when each pod has had no place to run."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._since_s: dict[str, float] = {}

    def find(self, pods: Iterable[Object], gpus: Mapping[str, frozenset[str]], now_s: float) -> list[Misplaced]:
        """`gpus`: what each node with a fresh report has; of other nodes nothing is known."""
        placed = [(pod, place) for pod in pods if _is_placed(pod, place := pod_place(pod))]
        running = {
            (place.node, uuid): f"{place.namespace}/{place.name}"
            for pod, place in placed
            if _phase(pod) == "Running"
            for uuid in place.gpu_uuids
        }
        found = {}
        for pod, place in placed:
            if note := _why(pod, place, gpus, running):
                found[place.uid] = Misplaced(pod=pod, note=note)
        self._since_s = {uid: self._since_s.get(uid, now_s) for uid in found}

        return [one for uid, one in found.items() if now_s - self._since_s[uid] >= self._patience_s]


def _why(
    pod: Object, place: PodPlace, gpus: Mapping[str, frozenset[str]], running: Mapping[tuple[str, str], str]
) -> str:
    if place.node not in gpus:
        return ""
    gone = [uuid for uuid in place.gpu_uuids if uuid not in gpus[place.node]]
    if gone:
        return f"{place.node} has no {gone[0]} any more; placed anew"
    if _phase(pod) == "Running":
        return ""
    others = [(uuid, running[place.node, uuid]) for uuid in place.gpu_uuids if (place.node, uuid) in running]
    return f"{others[0][0]} on {place.node} belongs to {others[0][1]}; placed anew" if others else ""


def _is_placed(pod: Object, place: PodPlace) -> bool:
    return bool(place.node and place.gpu_uuids and not place.finished and not pod["metadata"].get("deletionTimestamp"))


def _phase(pod: Object) -> str:
    return str((pod.get("status") or {}).get("phase") or "")
