"""What must go from the cluster: offline pods whatever became of their SLA, reports of nodes that are no more. Pure."""

import math
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass

from valve_kube import names
from valve_kube.objects import Object, annotation, mode_in_force, pod_place, seconds_of

from valve_scheduler.controller.conditions import Told

# A node that registers anew under its name meanwhile keeps what a person has set for it.
FORGET_AFTER_S = 300.0
# A pod that leaves for these harms online work now, and goes before all that a budget may keep.
HARMFUL = (Told.OFFLINE_UNGATED, Told.ONLINE_AT_RISK)


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaver:
    """A pod to evict; reason and note are those of its event."""

    pod: Object
    reason: Told
    note: str


def leavers(pods: Iterable[Object], nodes: Mapping[str, Object]) -> Iterator[Leaver]:
    """`nodes`: GPUHarvestNodes by name."""
    for pod in pods:
        place = pod_place(pod)
        if not place.node or place.finished or pod["metadata"].get("deletionTimestamp"):
            continue
        node = nodes.get(place.node, {})
        risks = {gpu["uuid"]: gpu["onlineRisk"] for gpu in _gpus(node) if gpu.get("onlineRisk")}
        if place.uid in _ungated(node):
            yield _ungated_leaver(pod, place.node)
        elif why := ((node.get("spec") or {}).get("resolved") or {}).get("drain"):
            yield Leaver(pod=pod, reason=Told.NODE_DRAINED, note=f"{place.node} is drained: {why}")
        elif why := _why_empty(node):
            note = f"{place.node} harvests no more: {why}. The pod is stopped there until it ends"
            yield Leaver(pod=pod, reason=Told.NODE_NOT_HARVESTING, note=note)
        elif uuid := next((uuid for uuid in place.gpu_uuids if uuid in risks), ""):
            note = f"{risks[uuid]} and may need memory of {uuid} on {place.node}"
            yield Leaver(pod=pod, reason=Told.ONLINE_AT_RISK, note=note)


def unseen(pods: Iterable[Object], nodes: Mapping[str, Object]) -> Iterator[tuple[str, set[str]]]:
    """Nodes that report ungated pods which the watch does not show, and their UIDs. Such a pod says that it is offline
    by an annotation alone: the webhook, which makes a label of that, was away when it came."""
    known = {pod["metadata"]["uid"] for pod in pods}
    for name, node in nodes.items():
        if hidden := _ungated(node) - known:
            yield name, hidden


def hidden_leavers(pods: Iterable[Object], node: str, uids: Container[str]) -> Iterator[Leaver]:
    """`pods`: all that the API server has on the node. A node's word alone evicts nothing that is not offline."""
    for pod in pods:
        metadata = pod["metadata"]
        is_offline = annotation(pod, names.ROLE) == names.OFFLINE
        if metadata["uid"] in uids and is_offline and not metadata.get("deletionTimestamp"):
            yield _ungated_leaver(pod, node)


def ghosts(nodes: Mapping[str, Object], present: Container[str], now_s: float) -> Iterator[tuple[str, dict[str, str]]]:
    """Names of the reports without a Node, each with the version that was judged. What a person wrote for a node to
    come has no report."""
    for name, node in nodes.items():
        observed_at = (node.get("status") or {}).get("observedAt")
        if name in present or not observed_at:
            continue
        if abs(now_s - _time(observed_at)) > FORGET_AFTER_S:
            yield name, {key: node["metadata"][key] for key in ("uid", "resourceVersion")}


def _time(text: str) -> float:
    """A time that cannot be is of no daemon that still reports: one such report kept those of all others."""
    try:
        return seconds_of(text)
    except (ValueError, OverflowError):
        return -math.inf


def _ungated(node: Object) -> set[str]:
    return {one["podUID"] for one in (node.get("status") or {}).get("ungated") or []}


def _ungated_leaver(pod: Object, node: str) -> Leaver:
    note = f"it uses GPUs of {node} without the shim, past it, or unregistered: nothing could stop it for a request"
    return Leaver(pod=pod, reason=Told.OFFLINE_UNGATED, note=note)


def _why_empty(node: Object) -> str:
    """Why no offline pod may stay. A node without a word from the cluster goes by its own configuration."""
    status = node.get("status") or {}
    mode = mode_in_force(node.get("spec") or {}) or str(status.get("mode") or "")
    if mode in ("off", "observe"):
        return f"its mode is {mode}"
    return "valve drain was asked for on the node" if status.get("phase") == "Draining" else ""


def _gpus(node: Object) -> list[Object]:
    return (node.get("status") or {}).get("gpus") or []
