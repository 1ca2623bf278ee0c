"""From watches to the arrays: which objects are followed, and what each change does to the state.

Offline pods are followed by label, never all pods, and only what is read of them is kept. An object that cannot be
read is counted and logged, and changes nothing, except that a node whose report is unreadable has none."""

import logging
from collections.abc import Callable

from valve_kube import failures, names
from valve_kube.client import Json, KubeClient
from valve_kube.errors import UNUSABLE, InvalidObject, in_words
from valve_kube.objects import node_report, pod_place, seconds_of, workload_profile
from valve_kube.owners import workload_key
from valve_kube.policies import read_policies
from valve_kube.reflector import Reflector, Sink, Store, at_each_change
from valve_kube.shapes import NodeShape, PodShape, ReportShape, Shape

from valve_scheduler.model import WorkloadProfile
from valve_scheduler.placement.grounds import Grounds
from valve_scheduler.placement.state import ClusterState

log = logging.getLogger(__name__)

# Those that ended hold nothing: a night of short Jobs leaves thousands of them.
OFFLINE_PODS = {
    "labelSelector": f"{names.ROLE}={names.OFFLINE}",
    "fieldSelector": "status.phase!=Succeeded,status.phase!=Failed",
}


class ProfileShape(Shape):
    """OfflineProfiles as they are, with what is read of their metadata: a tenant may write a quarter of a megabyte of
    annotations into each, and make as many as it likes."""

    of = "OfflineProfile"

    def slim(self, item: Json) -> Json:
        kept = ("name", "namespace", "uid", "resourceVersion", "creationTimestamp")
        return {**item, "metadata": {key: item["metadata"][key] for key in kept if key in item["metadata"]}}


Tee = Callable[[Sink], Sink]  # adds a reader that sees the objects of a view's sink, too

# A whole list now and then: what a watch was never told of is found by it.
RELIST_S = 600.0


def _as_it_is(sink: Sink) -> Sink:
    return sink


def pods_view(client: KubeClient, state: ClusterState, tee: Tee = _as_it_is) -> Reflector:
    sink = Sink(
        replace=lambda items: state.held.replace_pods(pod_place(item) for item in items),
        put=lambda item: state.held.put_pod(pod_place(item)),
        drop=lambda item: state.held.drop_pod(
            item["metadata"]["uid"], is_deleted=bool(item["metadata"].get("deletionTimestamp"))
        ),
    )
    return Reflector(client, "/api/v1/pods", tee(sink), query=OFFLINE_PODS, relist_s=RELIST_S, shape=PodShape())


def nodes_view(client: KubeClient, state: ClusterState, now_s: Callable[[], float], tee: Tee = _as_it_is) -> Reflector:
    def put(item: Json, *, is_live: bool = True) -> None:
        try:
            state.put_report(node_report(item), now_s(), is_live=is_live)
        except InvalidObject as error:
            _report("GPUHarvestNode", error)
            state.drop_report(item["metadata"]["name"])

    def replace(items: list[Json]) -> None:
        for gone in set(state.node_names()) - {item["metadata"]["name"] for item in items}:
            state.drop_report(gone)
        for item in items:
            put(item, is_live=False)

    sink = Sink(replace=replace, put=put, drop=lambda item: state.drop_report(item["metadata"]["name"]))
    return Reflector(client, f"{names.API_PATH}/gpuharvestnodes", tee(sink), shape=ReportShape())


def profiles_view(client: KubeClient, state: ClusterState, tee: Tee = _as_it_is) -> Reflector:
    def key(item: Json) -> tuple[str, str]:
        return item["metadata"]["namespace"], item["metadata"]["name"]

    def read(item: Json) -> WorkloadProfile | None:
        try:
            return workload_profile(item)
        except InvalidObject as error:
            _report("OfflineProfile", error)
            return None

    def replace(items: list[Json]) -> None:
        found = {key(item): read(item) for item in items}
        state.asked.replace_profiles({name: profile for name, profile in found.items() if profile is not None})

    sink = Sink(
        replace=replace,
        put=lambda item: state.asked.put_profile(*key(item), read(item)),
        drop=lambda item: state.asked.put_profile(*key(item), None),
    )
    return Reflector(client, f"{names.API_PATH}/offlineprofiles", tee(sink), shape=ProfileShape())


def avoid_list(workload: Json) -> tuple[str, dict[str, float]]:
    """Owner and the nodes its pods keep away from, each until a wall-clock time.

    Unreadable entries are dropped.
    """
    avoid = {}
    for entry in (workload.get("status") or {}).get("avoidNodes") or []:
        try:
            avoid[str(entry["node"])] = seconds_of(entry["until"])
        except UNUSABLE as error:
            _report("OfflineWorkload", InvalidObject(f"an entry of avoidNodes cannot be used: {in_words(error)}"))

    return workload_key(workload), avoid


def workloads_view(client: KubeClient, state: ClusterState, tee: Tee = _as_it_is) -> Reflector:
    sink = Sink(
        replace=lambda items: state.asked.replace_avoids(dict(map(avoid_list, items))),
        put=lambda item: state.asked.put_avoid(*avoid_list(item)),
        drop=lambda item: state.asked.put_avoid(avoid_list(item)[0], {}),
    )
    return Reflector(client, f"{names.API_PATH}/offlineworkloads", tee(sink))


def grounds_view(client: KubeClient, grounds: Grounds) -> Reflector:
    """Labels of the nodes, and the pods that may use them; of a node nothing else is kept."""
    sink = Sink(replace=grounds.replace, put=grounds.put, drop=grounds.drop)
    return Reflector(client, "/api/v1/nodes", sink, shape=NodeShape())


def policies_view(client: KubeClient, state: ClusterState) -> Reflector:
    kept = Store()

    def read(_: object) -> None:
        state.policies = read_policies(kept.items.values())

    return Reflector(client, f"{names.API_PATH}/harvestpolicies", kept.tee(at_each_change(read)))


def _report(kind: str, error: InvalidObject) -> None:
    failures.objects[kind] += 1
    log.warning("object refused", extra={"kind": kind, "error": str(error)})
