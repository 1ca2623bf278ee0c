"""The pods of this node: what the API server says of them, and NRI where it was first."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from valve_kube import names
from valve_kube.objects import annotation, asks_for_gpus, names_gpus, seconds_of
from valve_kube.owners import owner_name

from valved.clients.identity import NO_CLAIM, NOT_YET, Peer, PodClaim, Silence
from valved.kube.cgroup import pod_of
from valved.model.consent import SILENT, Said
from valved.model.ids import Role

Json = Mapping[str, Any]
ROLES = {names.ONLINE: Role.ONLINE, names.OFFLINE: Role.OFFLINE}
# On the API server's copy of a static pod: the UID that the kubelet and the control groups use. Whoever makes a pod
# writes its annotations, so it counts only where it can be the UID of no pod but a static one: all others have dashes.
# Nor may a pod that runs take a static one's place: the kubelet runs none that bears the mark of a copy.
STATIC_UID, COPY = "kubernetes.io/config.hash", "kubernetes.io/config.mirror"
_HASH = re.compile("[0-9a-f]{32}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Deletion:
    """What the API server says of a pod that is being deleted."""

    ends_s: float  # when its grace ends, by the API server's clock, in whole seconds
    grace_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Pod:
    uid: str
    namespace: str
    name: str
    role: Role
    service: str = ""  # its Deployment, StatefulSet or the like
    wish: str = ""  # annotation inject
    is_injected: bool = False  # so say the webhook or the policy
    mode: str = ""  # annotation mode: how far Valve may go with its GPUs
    said: Said = SILENT  # annotations slo and grant
    gpus: tuple[str, ...] = ()  # the placement of an offline pod: UUIDs in CUDA order
    gpu_containers: frozenset[str] | None = None  # those that ask for GPUs, by a resource or a claim; None: not told
    claims: Mapping[str, frozenset[str]] = field(default_factory=dict)  # ResourceClaim -> containers that use it
    asks_by_name: bool = False  # for whole GPUs, by a resource
    host_pid: bool = False
    is_running: bool = False
    finished: bool = False
    deletion: Deletion | None = None

    @property
    def key(self) -> str:
        return f"{self.namespace}/{self.name}"

    @property
    def is_told(self) -> bool:
        """The API server told of it, not only the runtime."""
        return self.gpu_containers is not None

    @property
    def is_static(self) -> bool:
        """The API server has only a copy: to delete that ends nothing."""
        return _HASH.fullmatch(self.uid) is not None


class PodsListener:
    """What this room's books report to the room. Does nothing; the room (kube/room.py) overrides it."""

    def pods_changed(self) -> None:
        """Another pod, another word of one or of its namespace, or one less."""

    def pod_left(self, pod: Pod, *, is_deleted: bool) -> None:
        """One less. `is_deleted`: its event said so; else it is only missing in a new list, or no longer selected."""


class PodBook:
    """By UID, as control groups name them. Also the claim source of the register."""

    def __init__(self, *, all_gpu_pods: bool = False) -> None:
        """`all_gpu_pods`: a pod that asks for whole GPUs and says no role is online work, too."""
        self.listener = PodsListener()
        self.pods: dict[str, Pod] = {}
        self._all_gpu_pods = all_gpu_pods
        self._trust: dict[str, str] = {}  # by namespace, where a label says so
        self._said: dict[str, Said] = {}  # by namespace, where annotations say so

    # From the API server's watch

    def replace(self, items: list[Any]) -> None:
        before, self.pods = self.pods, {pod.uid: pod for pod in map(self._read, items)}
        self.listener.pods_changed()
        for uid in before.keys() - self.pods.keys():
            self.listener.pod_left(before[uid], is_deleted=False)

    def put(self, item: Any) -> None:
        pod = self._read(item)
        if self.pods.get(pod.uid) != pod:  # most updates are of a pod's conditions, which are nothing to us
            self.pods[pod.uid] = pod
            self.listener.pods_changed()

    def drop(self, item: Any) -> None:
        last = self._read(item)
        if (pod := self.pods.pop(last.uid, None)) is not None:
            self.listener.pods_changed()
            self.listener.pod_left(pod, is_deleted=last.deletion is not None)

    def replace_namespaces(self, items: list[Any]) -> None:
        before, self._trust, self._said = self._said, {}, {}
        for item in items:
            self._book_namespace(item)
        if _spoken(self._said) != _spoken(before):
            self.listener.pods_changed()

    def put_namespace(self, item: Any) -> None:
        before = self._said.get(item["metadata"]["name"], SILENT)
        if self._book_namespace(item) != before:
            self.listener.pods_changed()

    def _book_namespace(self, item: Any) -> Said:
        metadata = item["metadata"]
        self._trust[metadata["name"]] = (metadata.get("labels") or {}).get(names.TRUST, "")
        self._said[metadata["name"]] = said = _said(item)
        return said

    def drop_namespace(self, item: Any) -> None:
        self._trust.pop(item["metadata"]["name"], None)
        if self._said.pop(item["metadata"]["name"], SILENT) != SILENT:
            self.listener.pods_changed()

    # From the runtime

    def heard(self, uid: str, namespace: str, name: str, metadata: Json) -> Pod:
        """A pod of which the runtime speaks: one more source while the API server is slow or away."""
        known = self.pods.get(uid)
        if known is None:
            item = {"metadata": {**metadata, "uid": uid, "namespace": namespace, "name": name}}
            # It does not say who made the pod, nor which containers asked for GPUs.
            known = self.pods[uid] = replace(read_pod(item), uid=uid, service="", gpu_containers=None)
            self.listener.pods_changed()
        return known

    def _read(self, item: Json) -> Pod:
        pod = read_pod(item)
        if self._all_gpu_pods and pod.role is Role.NONE and pod.asks_by_name:
            return replace(pod, role=Role.ONLINE)
        return pod

    # Questions

    def named(self, namespace: str, name: str) -> Pod | None:
        return next((pod for pod in self.pods.values() if (pod.namespace, pod.name) == (namespace, name)), None)

    def offline(self) -> Iterable[Pod]:
        return (pod for pod in self.pods.values() if pod.role is Role.OFFLINE and not pod.finished)

    def _of_group(self, cgroup: str) -> Pod | None:
        group = pod_of(cgroup)
        return self.pods.get(group.uid) if group is not None else None

    def name_of(self, cgroup: str) -> str:
        pod = self._of_group(cgroup)
        return pod.key if pod is not None else ""

    def said_of(self, cgroup: str) -> tuple[Said, ...]:
        pod = self._of_group(cgroup)
        return (pod.said, self._said.get(pod.namespace, SILENT)) if pod is not None else ()

    def trust_of(self, namespace: str) -> str:
        return self._trust.get(namespace, "")

    def claim_of(self, peer: Peer) -> PodClaim | Silence:
        group = pod_of(peer.cgroup)
        if group is None:
            return NO_CLAIM
        pod = self.pods.get(group.uid)
        if pod is None:
            return NOT_YET
        return NO_CLAIM if pod.role is Role.NONE else PodClaim(role=pod.role, name=pod.key, cgroup=group.path)


def read_pod(item: Json) -> Pod:
    """From the API server's JSON. Nothing in it can make this fail: a pod that cannot be read has no role."""
    metadata, spec = item["metadata"], item.get("spec") or {}
    containers = [*(spec.get("initContainers") or []), *(spec.get("containers") or [])]
    phase = (item.get("status") or {}).get("phase")
    asking = frozenset(container["name"] for container in containers if asks_for_gpus(container))
    return Pod(
        uid=_uid(metadata),
        namespace=metadata.get("namespace", ""),
        name=metadata.get("name", ""),
        role=ROLES.get(annotation(item, names.ROLE), Role.NONE),
        service=owner_name(item),
        wish=annotation(item, names.INJECT),
        is_injected=annotation(item, names.INJECTION) == "ok",
        mode=annotation(item, names.MODE),
        said=_said(item),
        gpus=_gpus(metadata),
        gpu_containers=asking,
        claims=_claims(spec, item.get("status") or {}, containers),
        asks_by_name=any(map(names_gpus, containers)),
        host_pid=bool(spec.get("hostPID")),
        is_running=phase == "Running",
        finished=phase in ("Succeeded", "Failed"),
        deletion=_deletion(metadata),
    )


def _deletion(metadata: Json) -> Deletion | None:
    text = metadata.get("deletionTimestamp")
    if not text or _uid(metadata) != metadata["uid"]:  # a static pod runs on without its copy
        return None
    return Deletion(ends_s=seconds_of(text), grace_s=float(metadata.get("deletionGracePeriodSeconds") or 0))


def _uid(metadata: Json) -> str:
    notes = metadata.get("annotations") or {}
    static = str(notes.get(STATIC_UID, ""))
    return static if _HASH.fullmatch(static) and notes.get(COPY) == static else str(metadata["uid"])


def _said(item: Json) -> Said:
    share = annotation(item, names.SHARE_WEIGHTS)
    return Said(slo=annotation(item, names.SLO), grant=annotation(item, names.GRANT), share_weights=share)


def _spoken(said: Mapping[str, Said]) -> dict[str, Said]:
    """Of those that say anything."""
    return {namespace: one for namespace, one in said.items() if one != SILENT}


def _claims(spec: Json, status: Json, containers: Iterable[Json]) -> dict[str, frozenset[str]]:
    """Which containers use which ResourceClaim. One made from a template, or for an extended resource that a
    DeviceClass answers, is named in the pod's status."""
    made = {each["name"]: each.get("resourceClaimName") for each in status.get("resourceClaimStatuses") or []}
    users: dict[str, set[str]] = {}
    for entry in spec.get("resourceClaims") or []:
        claim = entry.get("resourceClaimName") or made.get(entry["name"])
        if claim:
            named = (c["name"] for c in containers if any(use.get("name") == entry["name"] for use in _uses(c)))
            users.setdefault(claim, set()).update(named)
    extended = status.get("extendedResourceClaimStatus") or {}
    if extended.get("resourceClaimName"):
        mapped = {each["containerName"] for each in extended.get("requestMappings") or [] if each.get("containerName")}
        users.setdefault(extended["resourceClaimName"], set()).update(mapped)
    return {claim: frozenset(found) for claim, found in users.items() if found}


def _uses(container: Json) -> Iterable[Json]:
    return (container.get("resources") or {}).get("claims") or []


def _gpus(metadata: Json) -> tuple[str, ...]:
    text = (metadata.get("annotations") or {}).get(names.GPUS, "")
    return tuple(uuid for uuid in text.split(",") if uuid)
