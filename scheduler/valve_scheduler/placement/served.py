"""On which nodes online pods serve which base: finetuning of that base goes there, among nodes of about equal worth.

Only pods that carry the label are followed. A tenant that writes it draws finetuning to a node, and can do no more."""

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
from valve_kube import names
from valve_kube.client import Json, KubeClient
from valve_kube.reflector import Reflector, Sink
from valve_kube.shapes import PodShape

from valve_scheduler.model.curve import FloatArray
from valve_scheduler.placement.views import RELIST_S

SERVING_PODS = {
    "labelSelector": f"{names.BASE},{names.ROLE}!={names.OFFLINE}",
    "fieldSelector": "status.phase!=Succeeded,status.phase!=Failed",
}
# A node that serves the base is worth as much as one with a tenth more of idle time: image and model are there.
PREFERENCE = 0.1


class ServedBases:
    def __init__(self) -> None:
        self._places: dict[str, tuple[str, str]] = {}  # pod uid -> base, node
        self._pods: Counter[tuple[str, str]] = Counter()

    def put(self, pod: Json) -> None:
        metadata = pod["metadata"]
        self.drop(pod)
        node = (pod.get("spec") or {}).get("nodeName") or ""
        base = (metadata.get("labels") or {}).get(names.BASE, "")
        if base and node and not metadata.get("deletionTimestamp"):
            self._places[metadata["uid"]] = base, node
            self._pods[base, node] += 1

    def drop(self, pod: Json) -> None:
        place = self._places.pop(pod["metadata"]["uid"], None)
        if place is not None:
            self._pods[place] -= 1
            if not self._pods[place]:
                del self._pods[place]

    def replace(self, pods: Iterable[Json]) -> None:
        self._places.clear()
        self._pods.clear()
        for pod in pods:
            self.put(pod)

    def worth(self, shares: FloatArray, nodes: Sequence[str], base: str) -> FloatArray:
        """Shares to choose by. What is promised stays the share."""
        if not base:
            return shares
        serves = np.fromiter(((base, node) in self._pods for node in nodes), dtype=np.bool_, count=len(nodes))

        return np.where(serves, shares * (1 + PREFERENCE), shares)


def served_view(client: KubeClient, served: ServedBases) -> Reflector:
    sink = Sink(replace=served.replace, put=served.put, drop=served.drop)
    return Reflector(client, "/api/v1/pods", sink, query=SERVING_PODS, relist_s=RELIST_S, shape=PodShape())
