"""Keeps what every round reads: the objects of the cluster as the watches show them, and the placement state."""

from collections.abc import Callable

from valve_kube import names
from valve_kube.client import Json, KubeClient
from valve_kube.objects import pod_place
from valve_kube.reflector import Reflector, Store, at_each_change

from valve_scheduler.placement.rank import PlacementSettings
from valve_scheduler.placement.state import ClusterState
from valve_scheduler.placement.views import (
    grounds_view,
    nodes_view,
    pods_view,
    policies_view,
    profiles_view,
    workloads_view,
)


class Caches:
    def __init__(self, client: KubeClient, placement: PlacementSettings, now_s: Callable[[], float]) -> None:
        self.state = ClusterState(placement)
        self.pods, self.nodes, self.workloads, self.accounts, self.profiles = (Store() for _ in range(5))
        self.grounds = self.state.asked.grounds
        self.views = [
            pods_view(client, self.state, self.pods.tee),
            nodes_view(client, self.state, now_s, self.nodes.tee),
            profiles_view(client, self.state, self.profiles.tee),
            workloads_view(client, self.state, self.workloads.tee),
            policies_view(client, self.state),
            grounds_view(client, self.grounds),
            Reflector(client, f"{names.API_PATH}/harvestaccounts", self.accounts.tee(at_each_change(lambda _: None))),
        ]
        self._accounts_view = self.views[-1]

    def missing(self) -> list[str]:
        """Does not wait for accounts. After a rollback their CRD may be one that this release does not know."""
        return [view.path for view in self.views if not view.synced and view is not self._accounts_view]

    @property
    def has_accounts(self) -> bool:
        return self._accounts_view.synced

    def running(self) -> list[Json]:
        return [
            pod
            for pod in self.pods.items.values()
            if pod_place(pod).gpu_uuids
            and (pod.get("status") or {}).get("phase") == "Running"
            and not pod["metadata"].get("deletionTimestamp")
        ]

    def node(self, name: str) -> Json:
        """The GPUHarvestNode. It is empty for a node that never reported."""
        return self.nodes.items.get(("", name), {})

    def nodes_by_name(self) -> dict[str, Json]:
        return {name: node for (_, name), node in self.nodes.items.items()}

    def fresh_nodes(self, now_s: float) -> dict[str, Json]:
        fresh = self.state.fresh_gpus(now_s)
        return {name: node for name, node in self.nodes_by_name().items() if name in fresh}

    def reported(self, node: str, pod_uid: str) -> Json | None:
        """What the node says of an offline pod."""
        status = self.node(node).get("status") or {}
        return next((entry for entry in status.get("offline") or [] if entry["podUID"] == pod_uid), None)
