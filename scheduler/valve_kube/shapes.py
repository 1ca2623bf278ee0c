"""Typed decoding: of a pod's eleven kilobytes only the fields that Valve reads become objects, page by page.

A whole decoded pod takes 65 KB of memory, and a night of short Jobs has thousands of them. What is kept here has the
form of the JSON it came from, less everything else, and one value more: which nodes the pod may use."""

import sys
from array import array
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import msgspec

from valve_kube import names
from valve_kube.node_wish import CLAIMED_VOLUMES, KEPT, NodeWish, node_wish
from valve_kube.objects import start_text

Json = dict[str, Any]

_NULL = msgspec.Raw(b"null")
_RAW_PARTS = ("nodeSelector", "affinity", "tolerations", "topologySpreadConstraints")
_CACHED = 16 << 10  # bytes of what says a wish; the API server takes a megabyte
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
    # Read for the wish alone, and not kept.
    nodeSelector: msgspec.Raw = _NULL
    affinity: msgspec.Raw = _NULL
    tolerations: msgspec.Raw = _NULL
    topologySpreadConstraints: msgspec.Raw = _NULL
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


class _Taint(msgspec.Struct, omit_defaults=True):
    key: str
    effect: str
    value: str = ""


class _NodeSpec(msgspec.Struct, omit_defaults=True):
    taints: list[_Taint] | None = None
    unschedulable: bool = False


class _NodeMetadata(msgspec.Struct, omit_defaults=True):
    name: str = ""
    resourceVersion: str = ""
    labels: dict[str, str] | None = None


class _Node(msgspec.Struct, omit_defaults=True):
    metadata: _NodeMetadata
    spec: _NodeSpec | None = None


class _PageMetadata(msgspec.Struct, rename={"next_token": "continue", "version": "resourceVersion"}):
    version: str = ""
    next_token: str = ""


class _Page(msgspec.Struct):
    metadata: _PageMetadata
    items: list[_Pod] | None = None


class _NodePage(msgspec.Struct):
    metadata: _PageMetadata
    items: list[_Node] | None = None


class _RawPage(msgspec.Struct):
    metadata: _PageMetadata
    items: list[msgspec.Raw] | None = None


class _Event(msgspec.Struct):
    type: str
    object: msgspec.Raw


@dataclass(frozen=True, slots=True, kw_only=True)
class ListPage:
    """A part of a list, the version of the whole, and the token for what follows."""

    items: list[Json]
    version: str
    next_token: str


class Shape:
    """How answers of one kind of object are read: here all of them, as they come."""

    def page(self, raw: bytes) -> ListPage:
        answer: Json = msgspec.json.decode(raw)
        metadata = answer["metadata"]
        return ListPage(
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

    def page(self, raw: bytes) -> ListPage:
        found = self._pages.decode(raw)
        items = [_slim(pod) for pod in found.items or []]

        return ListPage(items=items, version=found.metadata.version, next_token=found.metadata.next_token)

    def event(self, line: bytes) -> Json:
        found = self._events.decode(line)
        if found.type == "ERROR":  # a Status, not a pod
            return {"type": found.type, "object": msgspec.json.decode(found.object)}

        return {"type": found.type, "object": _slim(self._pods.decode(found.object))}


class NodeShape(Shape):
    """Nodes, with what says who may use them: of one's thirty kilobytes a few hundred bytes."""

    def __init__(self) -> None:
        self._pages = msgspec.json.Decoder(_NodePage)
        self._events = msgspec.json.Decoder(_Event)
        self._nodes = msgspec.json.Decoder(_Node)

    def page(self, raw: bytes) -> ListPage:
        found = self._pages.decode(raw)
        items = [_shared(node) for node in found.items or []]

        return ListPage(items=items, version=found.metadata.version, next_token=found.metadata.next_token)

    def event(self, line: bytes) -> Json:
        found = self._events.decode(line)
        if found.type == "ERROR":
            return {"type": found.type, "object": msgspec.json.decode(found.object)}

        return {"type": found.type, "object": _shared(self._nodes.decode(found.object))}


class ReportShape(Shape):
    """GPUHarvestNodes, whole but for who wrote them; rows of numbers as numbers: as objects those of one node with
    eight GPUs take thirty kilobytes."""

    def __init__(self) -> None:
        self._pages = msgspec.json.Decoder(_RawPage)

    def page(self, raw: bytes) -> ListPage:
        """One report after another: the objects of all of a page would leave holes between what is kept."""
        found = self._pages.decode(raw)
        items = [_packed(msgspec.json.decode(item)) for item in found.items or []]

        return ListPage(items=items, version=found.metadata.version, next_token=found.metadata.next_token)

    def event(self, line: bytes) -> Json:
        found = super().event(line)
        if found.get("type") != "ERROR":
            _packed(found["object"])
        return found


def _packed(node: Json) -> Json:
    metadata, status = node.get("metadata") or {}, node.get("status") or {}
    written = [one for one in metadata.get("managedFields") or [] if one.get("subresource") == "status"]
    metadata["managedFields"] = [{key: one[key] for key in ("subresource", "time") if key in one} for one in written]
    _pack(status, "alignment")
    for gpu in status.get("gpus") or []:
        _pack(gpu, "freeMemory")
        for window in gpu.get("onlineMemory") or {}:
            _pack(gpu["onlineMemory"], window)

    return node


def _pack(room: Json, key: str) -> None:
    """What are no numbers stays as it is: whoever reads the report refuses it by name."""
    if isinstance(room.get(key), list):
        try:
            room[key] = array("d", room[key])
        except TypeError:
            return


def _shared(node: _Node) -> Json:
    """The sixty labels of a node are much the same on all nodes: each text of them is kept once."""
    labels = node.metadata.labels or {}
    node.metadata.labels = {sys.intern(key): sys.intern(value) for key, value in labels.items()}
    found: Json = msgspec.to_builtins(node)
    return found


def _slim(pod: _Pod) -> Json:
    """Of labels, annotations and limits only those with a meaning here; of all starts the one that counts."""
    metadata = pod.metadata
    metadata.labels = _ours(metadata.labels)
    metadata.annotations = _ours(metadata.annotations)
    for container in [*((pod.spec and pod.spec.containers) or []), *((pod.spec and pod.spec.initContainers) or [])]:
        if container.resources is not None:
            limits = container.resources.limits or {}
            container.resources.limits = {key: limits[key] for key in (names.RESOURCE,) if key in limits}
    wish = _wish_of(pod.spec) if pod.spec is not None else None
    found: Json = msgspec.to_builtins(pod)
    if wish is not None:
        found["spec"][KEPT] = wish
    if pod.status is not None and pod.status.containerStatuses is not None:
        started = start_text(found)
        del found["status"]["containerStatuses"]
        if started:
            found["status"]["startTime"] = started

    return found


def _wish_of(spec: _Spec) -> NodeWish:
    """The same object for all pods of a Job. Takes what it reads out of the spec."""
    kinds = frozenset(kind for volume in spec.volumes or [] for kind in volume) & frozenset(CLAIMED_VOLUMES)
    parts = (spec.nodeSelector, spec.affinity, spec.tolerations, spec.topologySpreadConstraints)
    spec.nodeSelector = spec.affinity = spec.tolerations = spec.topologySpreadConstraints = _NULL
    spec.volumes = None

    selector, affinity, tolerations, spreads = map(bytes, parts)
    is_small = len(selector) + len(affinity) + len(tolerations) + len(spreads) <= _CACHED
    read = _wish if is_small else _wish.__wrapped__
    return read(selector, affinity, tolerations, spreads, kinds)


@lru_cache(maxsize=1024)
def _wish(selector: bytes, affinity: bytes, tolerations: bytes, spreads: bytes, kinds: frozenset[str]) -> NodeWish:
    parts = (msgspec.json.decode(part) for part in (selector, affinity, tolerations, spreads))
    return node_wish({**dict(zip(_RAW_PARTS, parts, strict=True)), "volumes": [dict.fromkeys(kinds)]})


def _ours(values: dict[str, str] | None) -> dict[str, str]:
    return {
        key: value for key, value in (values or {}).items() if key.startswith(f"{names.DOMAIN}/") or key in _KEPT_LABELS
    }
