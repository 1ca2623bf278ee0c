"""An extender over a state filled by hand, and an API server that keeps bindings and may fail."""

from __future__ import annotations

import asyncio
from typing import Any

from reports import NOW_S, harvest_node, pod
from valve_kube import names
from valve_kube.client import ApiError
from valve_kube.objects import node_report
from valve_scheduler.extender.decide import Extender
from valve_scheduler.placement.rank import PlacementSettings
from valve_scheduler.placement.state import ClusterState

Json = dict[str, Any]


class World:
    """A state, an API server that keeps bindings as the real one does, and scripted failures of it."""

    def __init__(self, *nodes: Json) -> None:
        self.state = ClusterState(PlacementSettings())
        self.pods: dict[str, Json] = {}
        self.failures: list[Exception] = []
        self.commits_before_failing = False
        self.ready = True
        for node in nodes or (harvest_node("n1"),):
            self.state.put_report(node_report(node), NOW_S)
        self.extender = Extender(self.state, self, now_s=lambda: NOW_S, can_answer=lambda: self.ready)

    async def request(self, method: str, path: str, *, body: Any = None) -> Json:
        await asyncio.sleep(0)
        name = path.removesuffix("/binding").rpartition("/")[2]
        failure = self.failures.pop(0) if self.failures else None
        if method == "POST" and (failure is None or self.commits_before_failing):
            self._commit(self.pods[name], body)
        if failure is not None:
            raise failure

        return self.pods[name]

    def _commit(self, found: Json, binding: Json) -> None:
        if binding["metadata"]["uid"] != found["metadata"]["uid"]:
            raise ApiError(409, "Conflict", f"precondition failed: uid of {found['metadata']['name']}")
        if found["spec"]["nodeName"]:
            raise ApiError(409, "Conflict", f"pod {found['metadata']['name']} is already assigned")
        found["spec"]["nodeName"] = binding["target"]["name"]
        found["metadata"]["annotations"] |= binding["metadata"]["annotations"]

    def submit(self, name: str = "p1", **more: Any) -> Json:
        self.pods[name] = pod(name, **more)
        return self.pods[name]

    def filter(self, name: str = "p1", nodes: tuple[str, ...] = ("n1",)) -> Json:
        return self.extender.filter({"Pod": self.pods[name], "Nodes": None, "NodeNames": list(nodes)})

    def bind(self, name: str = "p1", node: str = "n1") -> str:
        arguments = {"PodName": name, "PodNamespace": "default", "PodUID": f"uid-{name}", "Node": node}
        error: str = asyncio.run(self.extender.bind(arguments))["Error"]

        return error

    def gpus(self, name: str = "p1") -> str:
        found: str = self.pods[name]["metadata"]["annotations"].get(names.GPUS, "")
        return found
