"""What a pod asks for, as the model reads it: the profile that it names, and the nodes that it may not use."""

from collections.abc import Iterable

from valve_kube.objects import OfflinePod
from valve_kube.owners import key_of_owner

from valve_scheduler.model import WorkloadProfile
from valve_scheduler.placement.grounds import Grounds
from valve_scheduler.placement.rank import Job


class Asked:
    """Follows profiles, avoid lists and nodes; `nodes` are those that report; their changes are told to it."""

    def __init__(self, nodes: Iterable[str]) -> None:
        self.grounds = Grounds()
        self._nodes = nodes
        self._changes = 0  # of the nodes
        self._profiles: dict[tuple[str, str], WorkloadProfile] = {}
        self._avoid: dict[str, dict[str, float]] = {}  # owner -> node -> until

    def nodes_changed(self) -> None:
        self._changes += 1

    def put_profile(self, namespace: str, name: str, profile: WorkloadProfile | None) -> None:
        if profile is None:
            self._profiles.pop((namespace, name), None)
        else:
            self._profiles[namespace, name] = profile

    def replace_profiles(self, profiles: dict[tuple[str, str], WorkloadProfile]) -> None:
        self._profiles = profiles

    def replace_avoids(self, avoids: dict[str, dict[str, float]]) -> None:
        self._avoid = {owner: nodes for owner, nodes in avoids.items() if nodes}

    def put_avoid(self, owner: str, until_s_by_node: dict[str, float]) -> None:
        if until_s_by_node:
            self._avoid[owner] = until_s_by_node
        else:
            self._avoid.pop(owner, None)

    def job(self, pod: OfflinePod, now_s: float) -> Job:
        avoid = self._avoid.get(key_of_owner(pod.namespace, pod.owner_uid), {})
        missed = frozenset(node for node, until_s in avoid.items() if until_s > now_s)
        closed = self.closed_to(pod)
        return Job(
            gpus=pod.gpus,
            sla=pod.sla,
            profile=self.profile(pod),
            avoid=missed | closed if missed else closed,
        )

    def profile(self, pod: OfflinePod) -> WorkloadProfile | None:
        return self._profiles.get((pod.namespace, pod.profile))

    def closed_to(self, pod: OfflinePod) -> frozenset[str]:
        """Nodes that the pod may not use, whatever their GPUs."""
        return self.grounds.closed_to(pod.wish, self._nodes, self._changes)
