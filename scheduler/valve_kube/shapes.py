"""Typed decoding: of a pod's eleven kilobytes only the fields that Valve reads become objects, page by page.

A whole decoded pod takes 65 KB of memory, and a night of short Jobs has thousands of them. What is kept here has the
form of the JSON it came from, less everything else, and one word more: whether the pod is bound to some nodes."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from valve_kube import names
from valve_kube.objects import start_text

Json = dict[str, Any]

_BOUND = "boundToNodes"  # key of a slim pod's spec
_CLAIMED_VOLUMES = ("persistentVolumeClaim", "ephemeral")
_KEPT_LABELS = frozenset({"pod-template-hash"})


class _Owner(msgspec.Struct, omit_defaults=True):
    uid: str
    name: str = ""
    kind: str = ""
    apiVersion: str = ""
    controller: bool | None = None


class _Metadata(msgspec.Struct, omit_defaults=True):
    name: str = ""
    namespace: str = ""
    uid: str = ""
    resourceVersion: str = ""
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None
    ownerReferences: list[_Owner] | None = None
    creationTimestamp: str | None = None
    deletionTimestamp: str | None = None


class _Resources(msgspec.Struct, omit_defaults=True):
    limits: dict[str, str | int | float] | None = None


class _Container(msgspec.Struct, omit_defaults=True):
    name: str = ""
    resources: _Resources | None = None


class _Spec(msgspec.Struct, omit_defaults=True):
    nodeName: str | None = None
    containers: list[_Container] | None = None
    initContainers: list[_Container] | None = None
    # Read for `is_bound` alone, and not kept.
    nodeSelector: Any = None
    affinity: Any = None
    topologySpreadConstraints: Any = None
    volumes: list[dict[str, msgspec.Raw]] | None = None


class _Condition(msgspec.Struct):
    type: str
    status: str


class _Running(msgspec.Struct, omit_defaults=True):
    startedAt: str | None = None


class _State(msgspec.Struct, omit_defaults=True):
    running: _Running | None = None


class _ContainerStatus(msgspec.Struct, omit_defaults=True):
    name: str = ""
    state: _State | None = None


class _Status(msgspec.Struct, omit_defaults=True):
    phase: str | None = None
    startTime: str | None = None
    conditions: list[_Condition] | None = None
    containerStatuses: list[_ContainerStatus] | None = None


class _Pod(msgspec.Struct, omit_defaults=True):
    metadata: _Metadata
    spec: _Spec | None = None
    status: _Status | None = None


class _PageMetadata(msgspec.Struct, rename={"next_token": "continue", "version": "resourceVersion"}):
    version: str = ""
    next_token: str = ""


class _Page(msgspec.Struct):
    metadata: _PageMetadata
    items: list[_Pod] | None = None


class _Event(msgspec.Struct):
    type: str
    object: msgspec.Raw


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """A part of a list, the version of the whole, and the token for what follows."""

    items: list[Json]
    version: str
    next_token: str


class Shape:
    """How answers of one kind of object are read: here all of them, as they come."""

    def page(self, raw: bytes) -> Page:
        answer: Json = msgspec.json.decode(raw)
        metadata = answer["metadata"]
        return Page(
            items=answer.get("items") or [],
            version=metadata["resourceVersion"],
            next_token=metadata.get("continue", ""),
        )

    def event(self, line: bytes) -> Json:
        found: Json = msgspec.json.decode(line)
        return found


class PodShape(Shape):
    """Pods, with what Valve reads of them."""

    def __init__(self) -> None:
        self._pages = msgspec.json.Decoder(_Page)
        self._events = msgspec.json.Decoder(_Event)
        self._pods = msgspec.json.Decoder(_Pod)

    def page(self, raw: bytes) -> Page:
        found = self._pages.decode(raw)
        items = [_slim(pod) for pod in found.items or []]

        return Page(items=items, version=found.metadata.version, next_token=found.metadata.next_token)

    def event(self, line: bytes) -> Json:
        found = self._events.decode(line)
        if found.type == "ERROR":  # a Status, not a pod
            return {"type": found.type, "object": msgspec.json.decode(found.object)}

        return {"type": found.type, "object": _slim(self._pods.decode(found.object))}


def is_bound(pod: Mapping[str, Any]) -> bool:
    """Whether its spec forbids it some nodes: by labels, by pods that are there, or by a volume, which may be of one
    node or zone. Of taints nothing is said here."""
    spec = pod.get("spec") or {}
    return bool(spec.get(_BOUND)) or _is_bound(spec)


def _is_bound(spec: Mapping[str, Any]) -> bool:
    affinities = (spec.get("affinity") or {}).values()
    spreads = spec.get("topologySpreadConstraints") or []
    return bool(
        spec.get("nodeSelector")
        or any((one or {}).get("requiredDuringSchedulingIgnoredDuringExecution") for one in affinities)
        or any(one.get("whenUnsatisfiable", "DoNotSchedule") == "DoNotSchedule" for one in spreads)
        or any(kind in volume for volume in spec.get("volumes") or [] for kind in _CLAIMED_VOLUMES)
    )


def _slim(pod: _Pod) -> Json:
    """Of labels, annotations and limits only those with a meaning here; of all starts the one that counts."""
    metadata = pod.metadata
    metadata.labels = _ours(metadata.labels)
    metadata.annotations = _ours(metadata.annotations)
    for container in [*((pod.spec and pod.spec.containers) or []), *((pod.spec and pod.spec.initContainers) or [])]:
        if container.resources is not None:
            limits = container.resources.limits or {}
            container.resources.limits = {key: limits[key] for key in (names.RESOURCE,) if key in limits}
    bound = pod.spec is not None and _is_bound(msgspec.structs.asdict(pod.spec))
    if pod.spec is not None:
        pod.spec.nodeSelector = pod.spec.affinity = pod.spec.topologySpreadConstraints = pod.spec.volumes = None
    found: Json = msgspec.to_builtins(pod)
    if bound:
        found["spec"][_BOUND] = True
    if pod.status is not None and pod.status.containerStatuses is not None:
        started = start_text(found)
        del found["status"]["containerStatuses"]
        if started:
            found["status"]["startTime"] = started

    return found


def _ours(values: dict[str, str] | None) -> dict[str, str]:
    return {
        key: value for key, value in (values or {}).items() if key.startswith(f"{names.DOMAIN}/") or key in _KEPT_LABELS
    }
