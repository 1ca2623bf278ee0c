"""A controller on caches filled by hand, and the pod whose SLA most tests are about."""

from __future__ import annotations

import asyncio
from datetime import datetime, timezone
from typing import Any

from reports import NOW_S, harvest_node, pod, uuids
from valve_kube import names
from valve_kube.client import ApiError
from valve_scheduler.controller.monitor import MonitorSettings, Sample, Track, Verdict
from valve_scheduler.controller.rounds import Controller, ControllerSettings

Json = dict[str, Any]
SETTINGS = ControllerSettings(monitor=MonitorSettings(window_s=900.0, windows=1))


class World:
    """A controller on caches filled by hand; its writes are kept, and may be refused."""

    def __init__(self, settings: ControllerSettings = SETTINGS) -> None:
        self.now_s = NOW_S
        self.calls: list[tuple[str, str, Json]] = []
        self.guarded_s = NOW_S - 1e5  # since when a policy keeps the word MeasuredByNode
        self.ahead_s = 0.0  # the controller's clock, of the API server's
        self.policy_answer: Json | Exception | None = None  # of the API server, when it is asked for that policy
        self.refusals: dict[str, ApiError] = {}
        self.refused_in: set[tuple[str, str]] = set()  # namespaces and what is refused there
        self.on_node: dict[str, list[Json]] = {}  # what the API server lists of a node
        self.set_s = 0.0  # by how much somebody set the wall clock
        self.controller = Controller(self, settings, lambda: self.now_s, lambda: self.now_s - self.set_s)  # type: ignore[arg-type]
        for view in self.controller.caches.views:
            view._listed.set()
        self.pods, self.nodes, self.profiles, self.workloads, self.policies, self.labels, self.accounts = (
            self.controller.caches.views
        )
        self.labels.sink.replace([])

    async def request(self, method: str, path: str, *, body: Any = None, query: Any = None, **_: str) -> Json:
        if query == {"dryRun": "All"}:
            return {**body, "metadata": {**body["metadata"], "creationTimestamp": text_of(self.now_s - self.ahead_s)}}
        if method == "GET" and path.startswith(names.ADMISSION_PATH):
            if isinstance(self.policy_answer, Exception):
                raise self.policy_answer
            if self.policy_answer is not None:
                return self.policy_answer
            return {"metadata": {"creationTimestamp": text_of(self.guarded_s)}}
        self.calls.append((method, path, body))
        if refusal := self.refusals.get(path.rpartition("/")[2]):
            raise refusal
        if any(f"/namespaces/{home}/" in path and path.endswith(f"/{what}") for home, what in self.refused_in):
            raise ApiError(429, "TooManyRequests", "disruption budget")
        if method == "POST":
            return {**body, "metadata": {**body["metadata"], "resourceVersion": "1"}}
        return body

    async def list(self, path: str, query: Json, accept: str = "") -> tuple[list[Json], str]:
        self.calls.append(("GET", path, query))
        return self.on_node.get(query["fieldSelector"].removeprefix("spec.nodeName="), []), "1"

    def set_clock(self, ahead_s: float) -> None:
        self.now_s += ahead_s
        self.set_s += ahead_s

    def report(self, node: str = "n1", offline: list[Json] | None = None, **more: Any) -> None:
        self.nodes.sink.put(harvest_node(node, offline=offline or [], age_s=NOW_S - self.now_s, **more))

    def freed(self) -> list[tuple[str, str]]:
        """Pods that a round takes from where they cannot run, and what they are told."""
        self.calls.clear()
        asyncio.run(self.controller.free_stuck())
        return [(body["regarding"]["name"], body["reason"]) for _, path, body in self.calls if path.endswith("/events")]

    def node(self, name: str, labels: dict[str, str] | None = None, **spec: Any) -> None:
        metadata = {"name": name, "labels": labels or {}, "resourceVersion": "1"}
        self.labels.sink.put({"metadata": metadata, "spec": spec})

    def profile(self, source: str = "Manual", made_s: float = NOW_S, namespace: str = "default") -> None:
        spec = {
            "workload": {"model": "m"},
            "standaloneTokensPerSecond": 1_000,
            "curve": [{"freeMiB": 0, "tokensPerSecond": 1_000}],
        }
        metadata = {"name": "m", "namespace": namespace, "creationTimestamp": text_of(made_s)}
        self.profiles.sink.put({"metadata": metadata, "spec": spec, "status": {"phase": "Ready", "source": source}})

    def round(self) -> list[tuple[str, str]]:
        self.calls.clear()
        asyncio.run(self.controller.promises.round())
        return [(method, path.removeprefix("/apis/valve.gpu/v1alpha1")) for method, path, _ in self.calls]

    def requeue(self) -> list[str]:
        self.calls.clear()
        asyncio.run(self.controller.waiting.requeue())
        return [path for _, path, _ in self.calls]

    def policy(self, name: str, status: Json | None = None, **spec: Any) -> None:
        metadata = {"name": name, "uid": f"uid-{name}"}
        self.policies.sink.put({"metadata": metadata, "spec": spec, **({"status": status} if status else {})})

    def events(self) -> list[tuple[str, str]]:
        return [(body["reason"], body["note"]) for _, path, body in self.calls if path.endswith("/events")]

    def judge_policies(self) -> list[tuple[str, Json]]:
        self.calls.clear()
        asyncio.run(self.controller.policies.judge())
        return [(path.split("/")[-2], body["status"]) for method, path, body in self.calls if method == "PATCH"]

    def apply_policies(self) -> list[tuple[str, Json]]:
        self.calls.clear()
        asyncio.run(self.controller.apply_policies())
        patches = [(path, body) for method, path, body in self.calls if method == "PATCH"]
        for path, body in patches:
            node = self.controller.caches.nodes.items["", path.rpartition("/")[2]]
            node["spec"] = {**node.get("spec", {}), **drop_null(body["spec"])}
        return [(path.rpartition("/")[2], body["spec"]) for path, body in patches]

    def clear(self) -> list[tuple[str, str]]:
        self.calls.clear()
        asyncio.run(self.controller.clear())
        return [(method, path) for method, path, _ in self.calls]

    def account(self) -> list[tuple[str, Json]]:
        self.calls.clear()
        asyncio.run(self.controller.account())
        return [(path.removeprefix("/apis/valve.gpu/v1alpha1"), body) for _, path, body in self.calls]


def text_of(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, timezone.utc).isoformat().replace("+00:00", "Z")


def drop_null(value: Any) -> Any:
    """As a merge patch leaves it."""
    if not isinstance(value, dict):
        return value
    return {key: drop_null(inner) for key, inner in value.items() if inner is not None}


def running(sla: str = "0.3") -> Json:
    asked = {names.SLA: sla, names.PROFILE: "m"}
    found = pod(annotations=asked, node="n1", held=uuids("n1")[0], phase="Running", owner="job-1")
    found["metadata"]["ownerReferences"][0] |= {"apiVersion": "batch/v1", "kind": "Job", "name": "batch"}
    found["status"]["startTime"] = datetime.fromtimestamp(NOW_S - 1_000, timezone.utc).isoformat()

    return found


def missing(uid: str, sla: float, namespace: str = "default") -> Track:
    """A pod that wants to move."""
    sample = Sample(
        pod_uid=uid,
        owner_uid=f"owner-{uid}",
        namespace=namespace,
        node="n1",
        sla=sla,
        standalone_tokens_per_s=1.0,
        runtime_s=1e5,
        demand_s=1e5,
        tokens=0.0,
    )
    return Track(sample=sample, verdict=Verdict.PERSISTENTLY_MISSED, achieved=0.0)


def refused_pod() -> Json:
    found = pod(annotations={names.SLA: "0.4", names.PROFILE: "m"})
    found["status"]["conditions"] = [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}]

    return found


def achieved(tokens: float | None, demand_s: float) -> list[Json]:
    entry = {"podUID": "uid-p1", "demandSeconds": demand_s}
    return [entry if tokens is None else entry | {"usefulTokens": tokens}]


EVICTION = ("POST", "/api/v1/namespaces/default/pods/p1/eviction")
EVENT = ("POST", "/apis/events.k8s.io/v1/namespaces/default/events")
STATUS = ("PATCH", "/namespaces/default/offlineworkloads/owner-job-1/status")
CREATE = ("POST", "/namespaces/default/offlineworkloads")


def missed() -> World:
    """A pod that achieved a tenth of standalone in its first whole window."""
    world = World()
    world.profile()
    world.pods.sink.put(running())
    world.report(offline=achieved(0.0, 0.0))
    assert world.round() == [CREATE, STATUS]
    world.now_s += 900.0
    world.report(offline=achieved(90_000.0, 900.0))

    return world
