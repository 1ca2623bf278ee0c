"""What kubelets and daemons of made-up nodes would say of the offline pods they run, faster than life."""

from __future__ import annotations

import contextlib
import http.client
from collections import defaultdict
from collections.abc import Callable

from valve_kube import names
from valve_tools.cluster.api import ApiRefused, ClusterApi, Json
from valve_tools.cluster.fleet import UntilStopped

LOOK_EVERY_S = 0.5
ONLY_OURS = f"labelSelector={names.ROLE.replace('/', '%2F')}%3D{names.OFFLINE}"


class PlayedPods(UntilStopped):
    """Bound pods run, evicted pods end; each look reports `seconds` of work at `rate(pod)` tokens a second."""

    def __init__(self, api: ClusterApi, rate: Callable[[Json], float], *, seconds: float, real: str) -> None:
        super().__init__()
        self._api = api
        self._rate = rate
        self._seconds = seconds
        self._real = real  # the node with a kubelet of its own
        self._entries: dict[str, Json] = {}

    def run(self) -> None:
        while not self._done.wait(LOOK_EVERY_S):
            # A pod may be gone between two calls, the API server busy: the next look sees what is.
            with contextlib.suppress(OSError, http.client.HTTPException, ApiRefused):
                self._look()

    def _look(self) -> None:
        reports: dict[str, list[Json]] = defaultdict(list)
        for pod in self._api.get(f"/api/v1/pods?{ONLY_OURS}")["items"]:
            node = pod["spec"].get("nodeName")
            if not node or node == self._real:
                continue
            if pod["metadata"].get("deletionTimestamp"):
                self._end(pod)
            elif pod["status"].get("phase") == "Pending":
                self._start(pod)
            elif pod["status"].get("phase") == "Running":
                reports[node].append(self._worked(pod))
        for node, entries in reports.items():
            self._api.patch(f"{names.API_PATH}/gpuharvestnodes/{node}/status", {"status": {"offline": entries}})

    def _start(self, pod: Json) -> None:
        ready = {"type": "Ready", "status": "True", "lastTransitionTime": pod["metadata"]["creationTimestamp"]}
        started = {"phase": "Running", "startTime": pod["metadata"]["creationTimestamp"], "conditions": [ready]}
        self._api.patch(f"{_path(pod)}/status", {"status": started})

    def _end(self, pod: Json) -> None:
        self._api.patch(f"{_path(pod)}/status", {"status": {"phase": "Failed"}})
        self._api.delete(_path(pod), {"gracePeriodSeconds": 0})

    def _worked(self, pod: Json) -> Json:
        uid = pod["metadata"]["uid"]
        entry = self._entries.setdefault(
            uid, {"podUID": uid, "demandSeconds": 0.0, "usefulTokens": 0.0, "harvestSeconds": 0.0}
        )
        entry["demandSeconds"] += self._seconds
        entry["harvestSeconds"] += self._seconds / 2
        entry["usefulTokens"] += self._seconds * self._rate(pod)
        return dict(entry)


def _path(pod: Json) -> str:
    return f"/api/v1/namespaces/{pod['metadata']['namespace']}/pods/{pod['metadata']['name']}"
