"""The cluster demo on its made-up fleet: placement with reasons, a missed SLA, eviction and placement elsewhere."""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Iterator
from typing import Any

from valve_kube import names
from valve_scheduler.placement.rank import REASON_TEXT, Reason
from valve_tools.cluster.api import ApiRefused
from valve_tools.cluster.controlplane import wait_for
from valve_tools.cluster.fleet import Heartbeat, create_nodes, node_name, offline_pod
from valve_tools.cluster.node import NAME
from valve_tools.cluster.played import LOOK_EVERY_S, PlayedPods
from valve_tools.cluster.workpods import PODS
from valve_tools.demo.cluster_node import PATIENCE_S, Stage

Json = dict[str, Any]
JOBS = "/apis/batch/v1/namespaces/default/jobs"
GROUP = f"{names.API_PATH}/namespaces/default"
SLA = 0.1
STANDALONE = 1000.0  # tokens a second
WINDOW_S = 60  # the shortest that a policy may say
PROFILE = "llama-8b"
TOO_LITTLE = REASON_TEXT[Reason.SLA]
SLOW, GOOD = "slow", ("daily-0", "daily-1", "daily-2")


class PlayedFleet:
    """The nodes, and what is played on them."""

    def __init__(self, stage: Stage, count: int) -> None:
        self._stage = stage
        self.count = count
        self._busy = ""  # the node on which nothing gets what it was promised
        self._heartbeat = Heartbeat(stage.plane.api, count)
        # A look reports more than a window of work, so that hours of telemetry pass in seconds.
        self._played = PlayedPods(stage.plane.api, self._rate, seconds=WINDOW_S + 1.0, real=NAME)

    @contextlib.contextmanager
    def playing(self) -> Iterator[None]:
        api = self._stage.plane.api
        create_nodes(api, self.count)
        # As GPU pools usually are: pods that are not about GPUs keep away.
        taint = {"key": names.ONLINE_RESOURCE, "value": "present", "effect": "NoSchedule"}
        api.each(("PATCH", f"/api/v1/nodes/{node_name(i)}", {"spec": {"taints": [taint]}}) for i in range(self.count))
        self._heartbeat.start()
        self._played.start()
        try:
            yield
        finally:
            self._played.stop()
            self._heartbeat.stop()

    def grow_busy(self, node: str) -> None:
        self._busy = node

    def _rate(self, pod: Json) -> float:
        starved = pod["spec"]["nodeName"] == self._busy and pod["metadata"]["name"].startswith(SLOW)
        return STANDALONE * (SLA / 10 if starved else SLA * 2)


def show_nodes(stage: Stage, count: int) -> None:
    screen = stage.screen

    def joined() -> bool:
        return len(json.loads(stage.valve("cluster", "status", "--json"))["nodes"]) == count + 1

    wait_for("every node's report", joined, PATIENCE_S)
    screen.say(f"Their daemons' reports are simulated: {LOOK_EVERY_S:g} s here stand for {WINDOW_S + 1} s of work.")
    told = tables(stage.valve("cluster", "status"), slice(1))
    screen.command("valve cluster status", told, most=12)


def store_settings(stage: Stage) -> None:
    """A profile, by hand, and a policy with short windows."""
    api = stage.plane.api
    profile = {
        "apiVersion": names.API_VERSION,
        "kind": "OfflineProfile",
        "metadata": {"name": PROFILE},
        "spec": {
            "workload": {"model": "llama-3.1-8b"},
            "standaloneTokensPerSecond": STANDALONE,
            "curve": [{"freeMiB": 0, "tokensPerSecond": STANDALONE}],
        },
    }
    path = stage.plane.folder / "profile.json"
    path.write_text(json.dumps(profile))
    stage.screen.command(
        "valve cluster profile --from profile.yaml", stage.valve("cluster", "profile", "--from", str(path))
    )
    windows = {"windowSeconds": WINDOW_S, "windows": 3, "warmUpSeconds": 0, "minRuntimeSeconds": 0}
    policy = {"apiVersion": names.API_VERSION, "kind": "HarvestPolicy", "metadata": {"name": "demo"}}
    api.post(f"{names.API_PATH}/harvestpolicies", policy | {"spec": {"sla": windows}})


def job(name: str) -> Json:
    pod = offline_pod(name, sla=str(SLA), profile=PROFILE)
    template = {"metadata": {**pod["metadata"], "name": None}, "spec": pod["spec"]}
    # An eviction is no failure of the job: it loses no retry by it.
    ignore = {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    spec = {"template": template, "backoffLimit": 0, "podFailurePolicy": {"rules": [ignore]}}

    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}, "spec": spec}


def placed_pod(stage: Stage, name: str, *, but: str = "") -> Json:
    """The pod of a job that runs, other than the one with the uid `but`."""
    selector = f"labelSelector=batch.kubernetes.io/job-name%3D{name}"

    def look() -> Json | None:
        pods: list[Json] = stage.plane.api.get(f"{PODS}?{selector}")["items"]
        return next((pod for pod in pods if pod["spec"].get("nodeName") and pod["metadata"]["uid"] != but), None)

    return dict(wait_for(f"a pod of {name} placed", look, PATIENCE_S))


def show_placement(stage: Stage) -> Json:
    """Returns the pod whose promise will be broken."""
    screen = stage.screen
    store_settings(stage)
    begun = time.monotonic()
    with screen.waiting(f"{1 + len(GOOD)} Jobs ask for {SLA:.0%} of a GPU's throughput, the pod greedy for all of it"):
        for name in (SLOW, *GOOD):
            stage.plane.api.post(JOBS, job(name))
        pods = {name: placed_pod(stage, name) for name in (SLOW, *GOOD)}
        took_s = time.monotonic() - begun
        stage.plane.api.post(PODS, offline_pod("greedy", sla="1", profile=PROFILE))
        refusal = wait_for("the refusal", lambda: _refusal(stage), PATIENCE_S)
    screen.figure("jobs submitted to all placed", f"{took_s:.1f} s", f"{len(pods)} jobs")
    first = pods[SLOW]
    told = stage.valve("explain", "pod", first["metadata"]["name"])
    screen.command(f"valve explain pod {first['metadata']['name']}", told)
    enough = all(_promised(pod) >= SLA for pod in pods.values())
    screen.check("each job has GPUs of a node that promises enough", enough)
    told = stage.valve("explain", "pod", "greedy")
    screen.say(f"[dim]greedy's event: {refusal[:160]}[/]")
    screen.command("valve explain pod greedy", told)
    screen.check("the greedy pod waits; its event and valve explain give the same reason", TOO_LITTLE in told)
    return first


def _promised(pod: Json) -> float:
    return float(pod["metadata"]["annotations"].get(names.PREDICTED, 0))


def _refusal(stage: Stage) -> str:
    """Once it is the one that stays: the profile may be news to the scheduler at first."""
    conditions = stage.plane.api.get(f"{PODS}/greedy")["status"].get("conditions") or []
    told = next((str(one.get("message", "")) for one in conditions if one["type"] == "PodScheduled"), "")
    return told if TOO_LITTLE in told else ""


def show_move(stage: Stage, fleet: PlayedFleet, first: Json) -> None:
    screen, api = stage.screen, stage.plane.api
    node, uid = first["spec"]["nodeName"], first["metadata"]["uid"]
    screen.say(f"{node} gets busy: {SLOW} makes {SLA / 10:.0%} of its standalone throughput there, promised {SLA:.0%}.")
    fleet.grow_busy(node)
    begun = time.monotonic()
    with screen.waiting("three windows in a row below the promise, then the controller evicts it"):
        wait_for("the eviction", lambda: _is_leaving(stage, first), PATIENCE_S)
        evicted_s = time.monotonic() - begun
        second = placed_pod(stage, SLOW, but=uid)
        told = wait_for("an event on the pod", lambda: _said(stage, SLOW), PATIENCE_S)
    screen.say(f"[dim]event SLAMissed: {told}[/]")
    screen.figure(
        "missed SLA to eviction, 3 windows of it",
        f"{evicted_s:.1f} s",
        "the monitor looks every 5 s here, telemetry is simulated",
    )
    screen.check("an event on the pod says what it got and what it was promised", node in told)
    screen.check(
        f"its successor runs elsewhere: {node} -> {second['spec']['nodeName']}", second["spec"]["nodeName"] != node
    )

    def avoided() -> list[str]:
        owners = [one for one in api.get(f"{GROUP}/offlineworkloads")["items"] if one["spec"].get("ownerName") == SLOW]
        return [entry["node"] for one in owners for entry in (one.get("status") or {}).get("avoidNodes") or []]

    screen.check(f"the owner's record says to avoid {node}", wait_for("the avoid list", avoided, PATIENCE_S) == [node])
    left = [placed_pod(stage, name)["spec"]["nodeName"] for name in GOOD]
    screen.check(
        f"jobs that get what they were promised stay: {', '.join(left)}",
        not any(_said(stage, name) for name in GOOD),
    )
    told = tables(stage.valve("cluster", "top", "--once"), slice(1, None))
    screen.command("valve cluster top --once", told)


def tables(told: str, wanted: slice) -> str:
    """Some of the tables of a long answer, and the sentence before them."""
    first, _, rest = told.partition("\n")
    found = re.findall(r".*?└[^\n]*", rest, re.DOTALL)
    return "\n".join([first, *(table.strip("\n") for table in found[wanted])])


def _said(stage: Stage, name: str) -> str:
    """The event on a pod of this job that was moved."""
    events = stage.plane.api.get("/api/v1/namespaces/default/events")["items"]
    missed = (one for one in events if one["reason"] == "SLAMissed")
    return next((str(one["message"]) for one in missed if one["involvedObject"]["name"].startswith(name)), "")


def _is_leaving(stage: Stage, pod: Json) -> bool:
    try:
        found = stage.plane.api.get(f"{PODS}/{pod['metadata']['name']}")
    except ApiRefused as refused:
        return refused.status == 404
    return bool(found["metadata"].get("deletionTimestamp"))
