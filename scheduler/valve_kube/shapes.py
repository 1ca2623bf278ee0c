"""Typed decoding: of a pod's eleven kilobytes only the fields that Valve reads become objects, page by page.

A whole decoded pod takes 65 KB of memory, and a night of short Jobs has thousands of them. What is kept here has the
form of the JSON it came from, less everything else, and one value more: which nodes the pod may use."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Generic, TypeVar

import msgspec

from valve_kube import names
from valve_kube.devices import as_status, denied_devices
from valve_kube.errors import UNUSABLE, InvalidObject
from valve_kube.failures import leave_out
from valve_kube.node_wish import CLAIMED_VOLUMES, KEPT, NodeWish, node_wish
from valve_kube.objects import KEPT_REPORT, node_report, start_text
from valve_kube.owners import controller_of
from valve_kube.places import place_alone

Json = dict[str, Any]
T = TypeVar("T")

_NULL = msgspec.Raw(b"null")
_RAW_PARTS = ("nodeSelector", "affinity", "tolerations", "topologySpreadConstraints")
_CACHED = 16 << 10  # bytes of what says a wish; the API server takes a megabyte
# All that is read of a pod's labels and annotations: a tenant may write any others, and as many as it likes.
_ASKED = (names.ROLE, names.SLA, names.PROFILE, names.KIND, names.BASE, names.GPUS_REQUIRED, "pod-template-hash")
_READ = {key: key for key in (*_ASKED, names.GPUS, names.DECISION, names.PREDICTED)}
_MOST_TEXT = 256  # characters of an annotation that a tenant wrote; a longer one has no meaning, and keeps none
_ALIKE, _MANY = 4096, 16  # how many different labels, owners, containers are kept once, each of how many parts
_OWN_TEXT = frozenset({names.GPUS, names.DECISION, names.PREDICTED})  # annotations that no two pods have alike
_REFUSED = ("PodScheduled", "False")
_IN_ROWS = ("idle", "freeMemory", "onlineMemory")  # of a GPU: what the rows of a NodeReport hold


class _Owner(msgspec.Struct, omit_defaults=True, frozen=True):
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


class _Why(msgspec.Struct, omit_defaults=True):
    reason: str | None = None
    message: str | None = None


class _State(msgspec.Struct, omit_defaults=True):
    running: _Running | None = None
    waiting: _Why | None = None
    terminated: _Why | None = None


class _ContainerStatus(msgspec.Struct, omit_defaults=True):
    name: str = ""
    state: _State | None = None
    lastState: _State | None = None


class _Status(msgspec.Struct, omit_defaults=True):
    phase: str | None = None
    startTime: str | None = None
    conditions: list[_Condition] | None = None
    containerStatuses: list[_ContainerStatus] | None = None
    initContainerStatuses: list[_ContainerStatus] | None = None


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


class _Page(msgspec.Struct, Generic[T]):
    metadata: _PageMetadata
    items: list[T] | None = None


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
    """How answers of one kind of object are read: what of it is decoded, and what of that is kept. Here all of both."""

    of = "object"  # what it is a shape of, as its kind says
    kind: Any = Json
    least: Callable[[bytes], Json | None] = staticmethod(lambda raw: None)  # known whatever else it says; None: nothing

    def __init__(self) -> None:
        self._pages, self._items = msgspec.json.Decoder(_Page[msgspec.Raw]), msgspec.json.Decoder(self.kind)
        self._events = msgspec.json.Decoder(_Event)

    def slim(self, item: Any) -> Json:
        """What is kept of one object."""
        found: Json = item
        return found

    def page(self, raw: bytes) -> ListPage:
        found = self._pages.decode(raw)
        items = [kept for item in found.items or [] if (kept := self.read(item)) is not None]

        return ListPage(items=items, version=found.metadata.version, next_token=found.metadata.next_token)

    def read(self, raw: msgspec.Raw) -> Json | None:
        """What is kept of one object. One that cannot be read shall neither end its reader nor hide all others."""
        try:
            return self.slim(self._items.decode(raw))
        except Exception:
            leave_out(self.of, _named(raw))
            return self.least(raw)

    def event(self, line: bytes) -> Json:
        found = self._events.decode(line)
        if found.type not in ("ERROR", "BOOKMARK"):  # a Status, or a version without an object
            if (kept := self.read(found.object)) is not None:
                return {"type": found.type, "object": kept}
            if found.type != "DELETED":  # which asks for no more than its name
                found.type = "BOOKMARK"  # the view is as new as this, and that is all

        return {"type": found.type, "object": msgspec.json.decode(found.object)}


class PodShape(Shape):
    """Pods, with what Valve reads of them."""

    of = "Pod"
    kind = _Pod
    least = staticmethod(place_alone)

    def slim(self, item: _Pod) -> Json:
        return _slim(item)


class NodeShape(Shape):
    """Nodes, with what says which pods may use them: of one's thirty kilobytes a few hundred bytes."""

    of = "Node"
    kind = _Node

    def slim(self, item: _Node) -> Json:
        return _shared(item)


class ReportShape(Shape):
    """GPUHarvestNodes as the rows that Valve judges by, and what else they say except their writers: as objects the
    figures of one node with eight GPUs take thirty kilobytes."""

    of = "GPUHarvestNode"
    kind = msgspec.Raw  # one report after another: the objects of all of a page would leave holes between what is kept

    def slim(self, item: msgspec.Raw) -> Json:
        return _packed(msgspec.json.decode(item))


def _named(raw: msgspec.Raw) -> str:
    """The object for the log; its first characters where it has no name."""
    try:
        metadata = msgspec.json.decode(raw)["metadata"]
        return f"{metadata.get('namespace', '')}/{metadata['name']}"
    except (msgspec.DecodeError, TypeError, KeyError, AttributeError):
        return bytes(raw)[:80].decode(errors="backslashreplace")


def _packed(node: Json) -> Json:
    """A report that cannot be read stays as it is: its reader refuses it by name."""
    metadata, status = node.get("metadata") or {}, node.get("status") or {}
    try:
        written = [one for one in metadata.get("managedFields") or [] if one.get("subresource") == "status"]
        kept = ("subresource", "time")
        metadata["managedFields"] = [{key: one[key] for key in kept if key in one} for one in written]
        for told in (*(status.get("offline") or []), *(status.get("services") or [])):
            if isinstance(told.get("namespace"), str):
                told["namespace"] = _once(told["namespace"])
        node[KEPT_REPORT] = node_report(node)
    except (InvalidObject, *UNUSABLE):
        return node
    status.pop("alignment", None)
    for gpu in status.get("gpus") or []:
        for figures in _IN_ROWS:
            gpu.pop(figures, None)

    return node


def _shared(node: _Node) -> Json:
    """The sixty labels of a node are much the same on all nodes: each text of them is kept once."""
    labels = node.metadata.labels or {}
    node.metadata.labels = {_once(key): _once(value) for key, value in labels.items()}
    found: Json = msgspec.to_builtins(node)
    return found


def _slim(pod: _Pod) -> Json:
    """The parts of a pod that Valve reads. The pods of a Job are much the same, so equal parts are one object. No code
    may write into it."""
    found: Json = {"metadata": _slim_metadata(pod.metadata)}
    working = _working(pod.spec.containers if pod.spec else None)
    if pod.spec is not None:
        found["spec"] = _slim_spec(pod.spec, working)
    if pod.status is not None:
        starting = _working(pod.spec.initContainers if pod.spec else None)
        found["status"] = _slim_status(pod.status, working, starting)

    return found


def _slim_metadata(metadata: _Metadata) -> Json:
    labels = _labels(tuple(_read(metadata.labels).items()))
    notes = _read(metadata.annotations)
    owner = controller_of({"metadata": {"ownerReferences": msgspec.to_builtins(metadata.ownerReferences)}})
    metadata.labels = metadata.annotations = metadata.ownerReferences = None
    metadata.namespace = _once(metadata.namespace)
    found: Json = msgspec.to_builtins(metadata)
    found["labels"] = labels
    found["annotations"] = {key: text if key in _OWN_TEXT else _once(text[:_MOST_TEXT]) for key, text in notes.items()}
    if owner is not None:
        found["ownerReferences"] = _owners(tuple(owner.items()))

    return found


def _slim_spec(spec: _Spec, working: list[Json]) -> Json:
    found: Json = {KEPT: _wish_of(spec)}
    if spec.nodeName is not None:
        found["nodeName"] = _once(spec.nodeName)
    if working:
        found["containers"] = working
    if starting := _working(spec.initContainers, is_named=False):
        found["initContainers"] = starting

    return found


def _slim_status(status: _Status, working: list[Json], starting: list[Json]) -> Json:
    """Of all starts the one that counts; of the conditions the one by which kube-scheduler says that it refused; of
    containers that wait, whether they lack devices."""
    told = {"spec": {"containers": working, "initContainers": starting}, "status": msgspec.to_builtins(status)}
    is_refused = any((one.type, one.status) == _REFUSED for one in status.conditions or ())
    found = _status((status.phase, start_text(told), is_refused))
    denied = as_status(denied_devices(told), working)

    return {**found, **denied} if denied else found


def _working(containers: Sequence[_Container] | None, *, is_named: bool = True) -> list[Json]:
    """Those that ask for harvested GPUs; of their limits nothing else. More than eight of them are refused, and more
    than sixteen are not kept: a pod may have four thousand."""
    found = []
    for one in containers or ():
        limits = (one.resources.limits if one.resources else None) or {}
        if str(limits.get(names.RESOURCE, "0")) != "0":
            found.append((one.name if is_named else "", type(limits[names.RESOURCE]), limits[names.RESOURCE]))

    return _containers(tuple(dict.fromkeys(found))[:_MANY])


def _alike(make: Callable[[tuple[Any, ...]], T]) -> Callable[[tuple[Any, ...]], T]:
    """One object for all that are made of equal parts. Long ones are not kept beyond their pods."""
    kept = lru_cache(maxsize=_ALIKE)(make)
    return lambda parts: kept(parts) if len(parts) <= _MANY else make(parts)


@_alike
def _labels(pairs: tuple[tuple[str, str], ...]) -> dict[str, str]:
    return dict(pairs)


@_alike
def _owners(pairs: tuple[tuple[str, Any], ...]) -> list[Json]:
    """Its controller alone: no other owner is asked for."""
    return [dict(pairs)]


@_alike
def _containers(parts: tuple[tuple[str, type, str | int | float], ...]) -> list[Json]:
    return [{"name": name, "resources": {"limits": {names.RESOURCE: limit}}} for name, _, limit in parts]


@_alike
def _status(parts: tuple[str | None, str, bool]) -> Json:
    phase, started, is_refused = parts
    found: Json = {key: text for key, text in (("phase", phase), ("startTime", started)) if text}
    if is_refused:
        found["conditions"] = [dict(zip(("type", "status"), _REFUSED, strict=True))]

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


def _read(values: dict[str, str] | None) -> dict[str, str]:
    return {_READ[key]: value for key, value in (values or {}).items() if key in _READ}


@lru_cache(maxsize=1 << 14)
def _once(text: str) -> str:
    """One object for equal texts, for a while. Never `sys.intern`: CPython 3.12.0 to 3.12.5 keep what is interned for
    ever, and tenants make up as many texts as they like."""
    return text
