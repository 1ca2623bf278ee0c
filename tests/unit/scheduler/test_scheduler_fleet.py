"""Fifty made-up nodes that fail, pause, flap and lie, with the product's controller and extender, on virtual time:
no storm of evictions, no GPU given twice, and all capacity is back afterwards."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from datetime import datetime, timezone
from typing import Any

import pytest
from reports import NOW_S, harvest_node, pod, uuids
from valve_kube import names
from valve_kube.client import ApiError
from valve_kube.objects import pod_place
from valve_scheduler.controller.monitor import MonitorSettings
from valve_scheduler.controller.rounds import Controller, ControllerSettings
from valve_scheduler.extender.decide import Extender
from valve_scheduler.extender.doubts import Doubts
from valve_scheduler.placement.rank import PlacementSettings
from valve_scheduler.placement.state import ClusterState
from valve_scheduler.placement.views import nodes_view, pods_view, policies_view, profiles_view, workloads_view

Json = dict[str, Any]
NODES, CARDS, JOBS, PODS_OF_A_JOB = 50, 2, 4, 16
STEP_S = 60.0
RULES = MonitorSettings()
PAUSE = {"metadata": {"name": "valve-pause", "uid": "uid-pause"}, "spec": {"paused": True}}
PROFILE = {
    "spec": {"standaloneTokensPerSecond": 1_000, "curve": [{"freeMiB": 0, "tokensPerSecond": 1_000}]},
    "status": {"phase": "Ready"},
}


def text(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, timezone.utc).isoformat()


class Node:
    """What its daemon counts and reports."""

    def __init__(self, number: int, draw: random.Random) -> None:
        self.name = f"n{number}"
        self.is_poor = draw.random() < 0.3  # says that it is idle, and gives far less than that
        self.skew_s = draw.choice([0.0, 0.0, 0.0, -90.0, 90.0])
        self.silent_until_s = self.guarded_until_s = 0.0
        self.demand_s: Counter[str] = Counter()
        self.tokens: Counter[str] = Counter()

    def work(self, pods: list[str], is_paused: bool, now_s: float) -> None:
        if is_paused or now_s < self.guarded_until_s:
            return
        for uid in pods:
            self.demand_s[uid] += round(STEP_S)
            self.tokens[uid] += round(STEP_S * (50 if self.is_poor else 600))

    def report(self, pods: list[str], is_paused: bool, now_s: float) -> Json:
        offline = [
            {"podUID": uid, "demandSeconds": self.demand_s[uid], "usefulTokens": self.tokens[uid]} for uid in pods
        ]
        phase = "Paused" if is_paused else "Harvesting"
        found = harvest_node(self.name, idle=0.6, cards=CARDS, offline=offline, phase=phase)
        found["status"]["observedAt"] = text(now_s + self.skew_s)
        found["spec"] = {"mode": "harvest"}
        for gpu in found["status"]["gpus"]:
            gpu["harvestable"] = now_s >= self.guarded_until_s
        return found


class Fleet:
    """Also the API server, which keeps what is written, and kube-scheduler, which asks for one pod after another."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.now_s = NOW_S
        self.nodes = {node.name: node for node in (Node(number, self.draw) for number in range(NODES))}
        self.pods: dict[str, Json] = {}
        self.workloads: dict[str, Json] = {}
        self.evicted: list[tuple[float, str]] = []  # when, whose
        self.refuses_until_s = self.paused_until_s = 0.0
        self.made = 0
        self.begin_controller()
        self.begin_extender()

    def begin_controller(self) -> None:
        """As after a crash: it knows what the API server holds, and nothing else."""
        settings = ControllerSettings(monitor=RULES)
        self.controller = Controller(self, settings, *[lambda: self.now_s] * 2)  # type: ignore[arg-type]
        self.views = self.controller.caches.views[:5]
        for view in self.controller.caches.views:
            view._listed.set()
        self._list()

    def begin_extender(self) -> None:
        raised = asyncio.Event()
        self.state = ClusterState(PlacementSettings(), doubted=raised.set)
        self.extender = Extender(self.state, self, now_s=lambda: self.now_s, can_answer=lambda: True)
        self.doubts = Doubts(self, self.state, lambda: self.now_s, raised)  # type: ignore[arg-type]
        client: Any = self
        self.own = [
            pods_view(client, self.state),
            nodes_view(client, self.state, lambda: self.now_s),
            profiles_view(client, self.state),
            workloads_view(client, self.state),
            policies_view(client, self.state),
        ]
        self._list()

    def _list(self) -> None:
        profiles = [{**PROFILE, "metadata": {"name": "m", "namespace": f"team-{team}"}} for team in range(4)]
        lists = [list(self.pods.values()), [], profiles, list(self.workloads.values()), self.policies()]
        for views in (getattr(self, "views", []), getattr(self, "own", [])):
            for view, items in zip(views, lists, strict=False):
                if items or view is not views[1]:
                    view.sink.replace(items)

    def policies(self) -> list[Json]:
        return [PAUSE] if self.now_s < self.paused_until_s else []

    def tell(self, kind: int, item: Json, *, is_gone: bool = False) -> None:
        for views in (self.views, self.own):
            (views[kind].sink.drop if is_gone else views[kind].sink.put)(item)

    # The API server

    async def request(self, method: str, path: str, *, body: Any = None, **_: str) -> Json:
        name = path.split("/")[-2] if path.endswith(("/eviction", "/status", "/binding")) else path.rpartition("/")[2]
        if method != "GET" and self.now_s < self.refuses_until_s:
            raise ApiError(500, "InternalError", "etcd is away")
        if path.endswith("/eviction"):
            self._end(name)
        elif path.endswith("/binding"):
            one = self.pods[name]
            one["metadata"]["annotations"] |= body["metadata"]["annotations"]
            one["spec"]["nodeName"] = body["target"]["name"]
            one["status"] = {"phase": "Running", "startTime": text(self.now_s)}
            self.tell(0, one)
        elif path.endswith("/offlineworkloads"):
            self.workloads[body["metadata"]["name"]] = body
        elif path.endswith("/status") and "offlineworkloads" in path:
            status = {key: value for key, value in body["status"].items() if value is not None}
            self.workloads[name] = {**self.workloads[name], "status": status}
            self.tell(3, self.workloads[name])
        elif method == "GET":
            if name not in self.pods:
                raise ApiError(404, "NotFound", name)
            return self.pods[name]
        return dict(body or {})

    def _end(self, name: str) -> None:
        one = self.pods.pop(name)
        self.evicted.append((self.now_s, one["metadata"]["ownerReferences"][0]["uid"]))
        self.drop(one)

    def drop(self, one: Json) -> None:
        self.tell(0, {**one, "metadata": {**one["metadata"], "deletionTimestamp": text(self.now_s)}}, is_gone=True)

    # What goes on

    def keep_jobs(self) -> None:
        """Each Job has all its pods."""
        have = Counter(one["metadata"]["ownerReferences"][0]["uid"] for one in self.pods.values())
        for job in range(JOBS):
            for _ in range(PODS_OF_A_JOB - have[f"job-{job}"]):
                self.made += 1
                asked = {names.SLA: "0.3", names.PROFILE: "m"}
                one = pod(f"p{self.made}", annotations=asked)
                reference = {"apiVersion": "batch/v1", "kind": "Job", "name": f"job-{job}", "uid": f"job-{job}"}
                one["metadata"]["ownerReferences"] = [{**reference, "controller": True}]
                one["metadata"]["namespace"] = f"team-{job % 4}"
                self.pods[one["metadata"]["name"]] = one
                self.tell(0, one)

    async def schedule(self) -> None:
        for name, one in list(self.pods.items()):
            if one["spec"]["nodeName"]:
                continue
            passed = self.extender.filter({"Pod": one, "NodeNames": list(self.nodes)})["NodeNames"]
            if not passed:
                continue
            scores = self.extender.prioritize({"Pod": one, "NodeNames": passed})
            node = max(scores, key=lambda entry: entry["Score"])["Host"]
            metadata = one["metadata"]
            arguments = {"PodUID": metadata["uid"], "PodName": name, "PodNamespace": metadata["namespace"]}
            await self.extender.bind({**arguments, "Node": node})

    def report(self) -> None:
        is_paused = self.now_s < self.paused_until_s
        running: dict[str, list[str]] = {}
        for one in self.pods.values():
            if place := pod_place(one).node:
                running.setdefault(place, []).append(one["metadata"]["uid"])
        for name, node in self.nodes.items():
            node.work(running.get(name, []), is_paused, self.now_s)
            if self.now_s >= node.silent_until_s:
                self.tell(1, node.report(running.get(name, []), is_paused, self.now_s))

    def harm(self) -> None:
        """Something, at random."""
        node = self.draw.choice(list(self.nodes.values()))
        minutes = self.draw.uniform(1.0, 20.0) * 60.0
        what = self.draw.random()
        if what < 0.4:
            node.silent_until_s = self.now_s + minutes
        elif what < 0.6:
            node.guarded_until_s = self.now_s + minutes
        elif what < 0.7:
            node.skew_s = self.draw.choice([-90.0, 0.0, 90.0])
        elif what < 0.75:
            self.paused_until_s = self.now_s + minutes
            self.tell(4, PAUSE)
        elif what < 0.8:
            self.refuses_until_s = self.now_s + minutes / 4
        elif what < 0.9:
            self.begin_controller()
        else:
            self.begin_extender()

    def step(self) -> None:
        before = self.now_s
        self.now_s += STEP_S
        if before < self.paused_until_s <= self.now_s:
            self.tell(4, PAUSE, is_gone=True)
        self.report()
        self.keep_jobs()
        asyncio.run(self._act())

    async def _act(self) -> None:
        await self.controller.clear()
        await self.controller.promises.round()
        await self.doubts.settle()
        await self.schedule()

    def held(self) -> Counter[tuple[str, str]]:
        return Counter(
            (place.node, uuid) for place in map(pod_place, self.pods.values()) if place.node for uuid in place.gpu_uuids
        )


def most_within(evicted: list[tuple[float, str]], seconds: float) -> int:
    return max(
        (sum(begin <= at_s < begin + seconds for at_s, _ in evicted) for begin, _ in evicted),
        default=0,
    )


@pytest.mark.parametrize("seed", [1, 2])
def test_a_fleet_that_fails_and_lies_never_storms_and_never_loses_capacity(seed: int) -> None:
    fleet = Fleet(seed)
    hours = 3
    for _ in range(round(hours * 3600 / STEP_S)):
        fleet.step()
        if fleet.draw.random() < 0.3:
            fleet.harm()
        assert set(fleet.held().values()) <= {1}

    allowed = max(1, int(RULES.budget_share * JOBS * PODS_OF_A_JOB))
    assert fleet.evicted  # the poor nodes' pods were moved at all
    assert most_within(fleet.evicted, RULES.budget_s) <= allowed
    for owner in {owner for _, owner in fleet.evicted}:
        own = [entry for entry in fleet.evicted if entry[1] == owner]
        assert most_within(own, RULES.backoff_s) <= RULES.at_once

    fleet.paused_until_s = fleet.refuses_until_s = fleet.now_s
    fleet.tell(4, PAUSE, is_gone=True)
    for node in fleet.nodes.values():
        node.silent_until_s = node.guarded_until_s = 0.0
    for one in list(fleet.pods.values()):
        fleet.drop(fleet.pods.pop(one["metadata"]["name"]))
    fleet.report()
    whole = [pod(f"whole-{number}", gpus=1) for number in range(NODES * CARDS)]
    for one in whole:
        fleet.pods[one["metadata"]["name"]] = one
        fleet.tell(0, one)
    asyncio.run(fleet.schedule())
    every = {(name, uuid) for name in fleet.nodes for uuid in uuids(name, CARDS)}
    assert set(fleet.held()) == every
    assert set(fleet.held().values()) == {1}
