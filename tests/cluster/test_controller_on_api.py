"""The controller on a real API server: SLA miss, eviction and re-placement of a Job's pod, budgets, retries."""

import contextlib
import itertools
import uuid
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from typing import Any

import numpy as np
import pytest
from cluster_pods import PODS, submit, wait_bound
from valve_kube import names
from valve_scheduler.controller.workloads import KEPT_AVOIDED as MOST_AVOIDED
from valve_scheduler.controller.workloads import KEPT_EVICTIONS as MOST_EVICTIONS
from valve_tools.cluster.controlplane import ControlPlane, wait_for
from valve_tools.cluster.fleet import bound_pods, create_nodes, node_name, offline_pod, report

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

Json = dict[str, Any]
HARVEST_NODES = f"{names.API_PATH}/gpuharvestnodes"
POLICIES = f"{names.API_PATH}/harvestpolicies"
GROUP = f"/apis/{names.API_VERSION}/namespaces/default"
JOBS = "/apis/batch/v1/namespaces/default/jobs"
BUDGETS = "/apis/policy/v1/namespaces/default/poddisruptionbudgets"


@pytest.fixture(scope="module")
def watched(scheduling: ControlPlane) -> Iterator[ControlPlane]:
    scheduling.start_controller("--namespace=default", "--monitor-every=0.2", "--stuck-after=1")
    profile = {
        "apiVersion": names.API_VERSION,
        "kind": "OfflineProfile",
        "metadata": {"name": "measured"},
        "spec": {
            "workload": {"model": "any"},
            "standaloneTokensPerSecond": 1_000,
            "curve": [{"freeMiB": 0, "tokensPerSecond": 1_000}],
        },
    }
    # Tests come in any order: one that evicts shall not take the ten minutes' budget of the others.
    policy = {"apiVersion": names.API_VERSION, "kind": "HarvestPolicy", "metadata": {"name": "often"}}
    scheduling.api.post(POLICIES, policy | {"spec": {"eviction": {"budgetSeconds": 1}}})
    scheduling.api.post(f"{GROUP}/offlineprofiles", profile)
    scheduling.api.patch(f"{GROUP}/offlineprofiles/measured/status", {"status": {"phase": "Ready"}})
    yield scheduling
    scheduling.api.delete(f"{GROUP}/offlineprofiles/measured")
    scheduling.api.delete(f"{POLICIES}/often")
    scheduling.kill("controller")


def job(name: str, sla: str = "0.1") -> Json:
    pod = offline_pod(name, sla=sla, profile="measured")
    template = {"metadata": {**pod["metadata"], "name": None}, "spec": pod["spec"]}
    # An eviction is no failure of the job: it loses no retry by it.
    ignore = {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}

    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name},
        "spec": {"template": template, "backoffLimit": 0, "podFailurePolicy": {"rules": [ignore]}},
    }


def pods_of(plane: ControlPlane, name: str) -> list[Json]:
    selector = f"labelSelector=batch.kubernetes.io/job-name%3D{name}"
    found: list[Json] = plane.api.get(f"{PODS}?{selector}")["items"]

    return found


def placed(plane: ControlPlane, name: str) -> Json:
    def one() -> Json | None:
        live = [pod for pod in pods_of(plane, name) if not pod["metadata"].get("deletionTimestamp")]
        return live[0] if live and live[0]["spec"].get("nodeName") else None

    return dict(wait_for(f"a pod of {name} placed", one))


def start(plane: ControlPlane, pod: Json) -> None:
    """What the kubelet would say, an hour after the fact."""
    started = "2020-01-01T00:00:00Z"
    plane.api.patch(
        f"{PODS}/{pod['metadata']['name']}/status",
        {"status": {"phase": "Running", "startTime": started, "conditions": ready()}},
    )


def ready() -> list[Json]:
    return [{"type": "Ready", "status": "True", "lastTransitionTime": "2020-01-01T00:00:00Z"}]


def report_windows(plane: ControlPlane, tokens_per_s: float, *pods: Json) -> Iterator[None]:
    """One window of demand after another, each with the same throughput."""
    for window in itertools.count():
        figures = {"demandSeconds": 901.0 * window, "usefulTokens": tokens_per_s * 901.0 * window}
        for node in {pod["spec"]["nodeName"] for pod in pods}:
            here = [pod["metadata"]["uid"] for pod in pods if pod["spec"]["nodeName"] == node]
            offline = [{"podUID": uid, **figures} for uid in here]
            plane.api.patch(f"{HARVEST_NODES}/{node}/status", {"status": {"offline": offline}})
        yield


def status_of(plane: ControlPlane, owner_uid: str) -> Json:
    """Empty between the two requests by which the controller makes a workload."""
    found: Json = plane.api.get(f"{GROUP}/offlineworkloads/owner-{owner_uid}").get("status") or {}

    return found


def reported_until(plane: ControlPlane, tokens_per_s: float, check: Any, *pods: Json) -> Any:
    """Report window after window until something came of it; a window per look, each look after a round."""
    windows = report_windows(plane, tokens_per_s, *pods)

    def look() -> Any:
        next(windows)
        with contextlib.suppress(TimeoutError):  # the controller takes a round or two to see it
            return wait_for("a round", check, 0.5)

    return wait_for("what the reports should lead to", look, 60)


def test_a_job_that_misses_its_sla_is_moved_and_stays_away_from_the_node(watched: ControlPlane) -> None:
    owner = watched.api.post(JOBS, job("slow"))["metadata"]["uid"]
    first = placed(watched, "slow")
    start(watched, first)

    def evicted() -> Json | None:
        found = watched.api.get(f"{PODS}/{first['metadata']['name']}")
        return found if found["metadata"].get("deletionTimestamp") else None

    gone = reported_until(watched, 10.0, evicted, first)
    assert any(c["type"] == "DisruptionTarget" for c in gone["status"]["conditions"])
    (said,) = wait_for("an event that says why", lambda: told(watched, first["metadata"]["name"]))
    watched.api.patch(f"{PODS}/{first['metadata']['name']}/status", {"status": {"phase": "Failed"}})
    watched.api.delete(f"{PODS}/{first['metadata']['name']}", {"gracePeriodSeconds": 0})

    second = placed(watched, "slow")

    assert said["involvedObject"]["uid"] == first["metadata"]["uid"]
    status = wait_for("the owner's record", lambda: status_of(watched, owner).get("avoidNodes"))
    assert [entry["node"] for entry in status] == [first["spec"]["nodeName"]]
    assert second["spec"]["nodeName"] != first["spec"]["nodeName"]
    watched.api.delete(f"{JOBS}/slow", {"propagationPolicy": "Background"})
    wait_for("the workload to go with its job", lambda: is_gone(watched, owner))


def test_an_owner_that_avoids_as_many_nodes_as_it_can_is_never_evicted_beyond_its_rounds(watched: ControlPlane) -> None:
    """Its record is full: what the next eviction adds must still be stored, or back-off and rounds are forgotten."""
    api, now = watched.api, datetime.now(timezone.utc)
    owner = api.post(JOBS, job("everywhere"))["metadata"]["uid"]
    pod = placed(watched, "everywhere")
    start(watched, pod)
    reported_until(watched, 500.0, lambda: status_of(watched, owner), pod)
    hours = [(now - timedelta(hours=1 + number % 20)).isoformat(timespec="seconds") for number in range(MOST_EVICTIONS)]
    until = (now + timedelta(hours=1)).isoformat(timespec="seconds")
    avoided = [{"node": f"away-{number}", "until": until} for number in range(MOST_AVOIDED)]
    record = {"evictions": MOST_EVICTIONS, "evictionTimes": hours, "avoidNodes": avoided}
    path = f"{GROUP}/offlineworkloads/owner-{owner}/status"
    refusals = watched.log("controller").count("patch refused")

    def is_read() -> bool:
        """The controller writes it anew in its own form of times; a round under way, without what it did not know."""
        found = status_of(watched, owner).get("avoidNodes") or []
        if len(found) < MOST_AVOIDED:
            api.patch(path, {"status": record})
        return len(found) == MOST_AVOIDED and all(entry["until"].endswith("Z") for entry in found)

    wait_for("the controller to know the record", is_read)
    reported_until(watched, 10.0, lambda: is_going(watched, pod["metadata"]["name"]), pod)
    status = status_of(watched, owner)

    assert (len(status["avoidNodes"]), len(status["evictionTimes"])) == (MOST_AVOIDED, MOST_EVICTIONS)
    assert pod["spec"]["nodeName"] in {entry["node"] for entry in status["avoidNodes"]}
    assert status["evictions"] == MOST_EVICTIONS + 1
    assert datetime.fromisoformat(status["backoffUntil"].replace("Z", "+00:00")) > now
    assert watched.log("controller").count("patch refused") == refusals
    api.delete(f"{JOBS}/everywhere", {"propagationPolicy": "Background"})


def test_a_container_that_has_just_started_anew_never_counts_as_one_that_missed(watched: ControlPlane) -> None:
    """Its pod is of long ago; its weights load again."""
    api, begun = watched.api, datetime.now(timezone.utc).isoformat(timespec="seconds").replace("+00:00", "Z")
    owner = api.post(JOBS, job("anew"))["metadata"]["uid"]
    api.post(JOBS, job("long-ago"))
    anew, other = placed(watched, "anew"), placed(watched, "long-ago")
    for pod, started in ((anew, begun), (other, "2020-01-01T00:00:00Z")):
        start(watched, pod)
        tell_container(watched, pod, {"running": {"startedAt": started}})

    reported_until(watched, 10.0, lambda: is_going(watched, other["metadata"]["name"]), anew, other)

    (condition,) = status_of(watched, owner)["conditions"]
    assert (condition["type"], condition["status"], condition["reason"]) == ("SLAMet", "Unknown", "WarmingUp")
    assert not is_going(watched, anew["metadata"]["name"])
    for name in ("anew", "long-ago"):
        api.delete(f"{JOBS}/{name}", {"propagationPolicy": "Background"})


def test_a_pod_whose_node_cannot_give_it_its_gpus_is_made_anew_on_another(watched: ControlPlane) -> None:
    """As its kubelet tells it; one that nothing would make anew stays. (What kubelets say: test_real_node.py.)"""
    api, owner = watched.api, watched.api.post(JOBS, job("denied"))["metadata"]["uid"]
    first = placed(watched, "denied")
    [name] = submit(api, 1)
    bare = next(pod for pod in wait_bound(api, 2) if pod["metadata"]["name"] == name)
    why = "failed to create containerd container: CDI device injection failed: unresolvable CDI devices valve.gpu/slot"
    for pod in (bare, first):
        tell_container(watched, pod, {"waiting": {"reason": "CreateContainerError", "message": why}})

    wait_for("the eviction", lambda: is_going(watched, first["metadata"]["name"]))
    (said,) = wait_for("an event that says why", lambda: told(watched, first["metadata"]["name"], "PlaceLost"))
    api.patch(f"{PODS}/{first['metadata']['name']}/status", {"status": {"phase": "Failed"}})
    api.delete(f"{PODS}/{first['metadata']['name']}", {"gracePeriodSeconds": 0})
    second = placed(watched, "denied")

    assert "unresolvable CDI devices" in said["message"]
    assert [entry["node"] for entry in status_of(watched, owner)["avoidNodes"]] == [first["spec"]["nodeName"]]
    assert second["spec"]["nodeName"] != first["spec"]["nodeName"]
    assert not is_going(watched, name)
    api.delete(f"{JOBS}/denied", {"propagationPolicy": "Background"})


def tell_container(plane: ControlPlane, pod: Json, state: Json) -> None:
    """What a kubelet says of the one that has the GPUs."""
    container = {"name": "work", "image": "i", "imageID": "", "ready": False, "restartCount": 0, "state": state}
    path = f"{PODS}/{pod['metadata']['name']}/status"
    plane.api.patch(path, {"status": {"containerStatuses": [container]}})


def test_the_report_of_a_node_that_left_goes_and_those_of_the_others_stay(watched: ControlPlane) -> None:
    api, silent = watched.api, {"status": {"observedAt": "2020-01-01T00:00:00Z"}}
    create_nodes(api, 2, first=960)
    api.delete(f"/api/v1/nodes/{node_name(960)}")
    for index in (961, 960):
        api.patch(f"{HARVEST_NODES}/{node_name(index)}/status", silent)

    def left() -> set[str]:
        return {item["metadata"]["name"] for item in api.get(HARVEST_NODES)["items"]}

    wait_for("the report to go", lambda: node_name(960) not in left())
    assert node_name(961) in left()
    api.delete(f"/api/v1/nodes/{node_name(961)}")
    wait_for("the other to go with its node", lambda: node_name(961) not in left())


def test_a_node_in_the_hands_of_a_driver_upgrade_loses_its_offline_pods(watched: ControlPlane) -> None:
    api = watched.api
    [name] = submit(api, 1)
    (bound,) = wait_bound(api, 1)
    node = f"/api/v1/nodes/{bound['spec']['nodeName']}"
    api.patch(node, {"metadata": {"labels": {"nvidia.com/gpu.deploy.device-plugin": "paused-for-driver-upgrade"}}})

    wait_for("the eviction", lambda: is_going(watched, name))
    wait_for("an event that says why", lambda: told(watched, name, "NodeDrained"))
    api.patch(node, {"metadata": {"labels": {"nvidia.com/gpu.deploy.device-plugin": None}}})
    spec = f"{HARVEST_NODES}/{bound['spec']['nodeName']}"
    wait_for("the node to be free again", lambda: "drain" not in api.get(spec)["spec"]["resolved"])


def test_an_offline_pod_leaves_the_gpu_of_an_online_pod_that_nobody_hears(watched: ControlPlane) -> None:
    """What the daemon would say on the node; the schema must let it through."""
    api = watched.api
    [name] = submit(api, 1)
    (bound,) = wait_bound(api, 1)
    report = f"{HARVEST_NODES}/{bound['spec']['nodeName']}"
    gpus = api.get(report)["status"]["gpus"]
    mine = next(gpu for gpu in gpus if gpu["uuid"] == bound["metadata"]["annotations"][names.GPUS])
    mine["onlineRisk"] = "web/own-0/serve runs without the shim"
    api.patch(f"{report}/status", {"status": {"gpus": gpus}})

    wait_for("the eviction", lambda: is_going(watched, name))
    wait_for("an event that says why", lambda: told(watched, name, "OnlineAtRisk"))
    del mine["onlineRisk"]
    api.patch(f"{report}/status", {"status": {"gpus": gpus}})


def test_a_job_whose_sla_no_node_could_keep_is_told_so(watched: ControlPlane) -> None:
    owner = watched.api.post(JOBS, job("greedy", sla="0.99"))["metadata"]["uid"]

    def said() -> Json | None:
        conditions = status_of(watched, owner).get("conditions") or []
        return next((one for one in conditions if one["type"] == "SLAUnreachable"), None)

    condition = wait_for("the condition", said)
    (pod,) = pods_of(watched, "greedy")
    (event,) = wait_for("the event", lambda: told(watched, pod["metadata"]["name"], "SLAUnreachable"))

    assert (condition["status"], condition["reason"]) == ("True", "FleetTooBusy")
    assert event["message"] == f"FleetTooBusy: {condition['message']}"
    shown = watched.api.table(f"{GROUP}/offlineworkloads")[f"owner-{owner}"]
    assert (shown["Unreachable"], shown["Met"]) == ("True", None)
    watched.api.delete(f"{JOBS}/greedy", {"propagationPolicy": "Background"})


def test_a_pod_that_is_measured_for_its_profile_is_told_so_once(watched: ControlPlane) -> None:
    api = watched.api
    wanted = f"wanted-{uuid.uuid4().hex[:8]}"  # as long as the pod lives the controller would make it anew
    [name] = submit(api, 1, profile=wanted)
    (bound,) = wait_bound(api, 1)
    spec = f"{HARVEST_NODES}/{bound['spec']['nodeName']}"
    wait_for("the node to be told", lambda: "profile" in api.get(spec)["spec"].get("resolved", {}))
    wait_for("the event", lambda: told(watched, name, "Profiling"))
    start(watched, bound)

    watched.kill("controller")
    watched.restart("controller")
    levels = [{"limitMiB": mib, "usefulTokens": 9.0 * mib, "runnableSeconds": 90.0} for mib in (10, 20, 30)]
    api.patch(f"{spec}/status", {"status": {"offline": [{"podUID": bound["metadata"]["uid"], "levels": levels}]}})
    wait_for("the end", lambda: told(watched, name, "Profiled"))

    assert len(told(watched, name, "Profiling")) == 1
    assert api.table(f"{GROUP}/offlineprofiles")[wanted]["Phase"] == "Ready"


def is_going(plane: ControlPlane, pod: str) -> bool:
    found = next((item for item in plane.api.get(PODS)["items"] if item["metadata"]["name"] == pod), None)
    return found is None or bool(found["metadata"].get("deletionTimestamp"))


def told(plane: ControlPlane, pod: str, reason: str = "SLAMissed") -> list[Json]:
    events = plane.api.get("/api/v1/namespaces/default/events")["items"]
    return [one for one in events if (one["reason"], one["involvedObject"]["name"]) == (reason, pod)]


def is_gone(plane: ControlPlane, owner_uid: str) -> bool:
    items = plane.api.get(f"{GROUP}/offlineworkloads")["items"]
    return all(item["spec"]["ownerUID"] != owner_uid for item in items)


def test_a_disruption_budget_keeps_the_pod_and_the_condition_says_it_misses(watched: ControlPlane) -> None:
    owner = watched.api.post(JOBS, job("kept"))["metadata"]["uid"]
    budget = {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": {"name": "keep"},
        "spec": {"minAvailable": 1, "selector": {"matchLabels": {"batch.kubernetes.io/job-name": "kept"}}},
    }
    watched.api.post(BUDGETS, budget)
    pod = placed(watched, "kept")
    start(watched, pod)
    wait_for("the budget", lambda: watched.api.get(f"{BUDGETS}/keep")["status"].get("currentHealthy") == 1)

    def persistently() -> bool:
        conditions = status_of(watched, owner).get("conditions") or []
        return any(c["reason"] == "PersistentlyMissed" for c in conditions)

    reported_until(watched, 10.0, persistently, pod)
    wait_for("a refused eviction", lambda: "eviction refused" in watched.log("controller"))

    wait_for("the stored eviction to be taken back", lambda: status_of(watched, owner)["evictions"] == 0)
    assert not watched.api.get(f"{PODS}/{pod['metadata']['name']}")["metadata"].get("deletionTimestamp")
    watched.api.delete(f"{BUDGETS}/keep")
    watched.api.delete(f"{JOBS}/kept", {"propagationPolicy": "Background"})


def test_a_job_that_gets_what_it_was_promised_is_left_alone(watched: ControlPlane) -> None:
    owner = watched.api.post(JOBS, job("good"))["metadata"]["uid"]
    pod = placed(watched, "good")
    start(watched, pod)

    def met() -> bool:
        conditions = status_of(watched, owner).get("conditions") or []
        return any((c["type"], c["status"]) == ("SLAMet", "True") for c in conditions)

    reported_until(watched, 500.0, met, pod)

    assert not watched.api.get(f"{PODS}/{pod['metadata']['name']}")["metadata"].get("deletionTimestamp")
    watched.api.delete(f"{JOBS}/good", {"propagationPolicy": "Background"})


def test_a_better_report_alone_brings_a_refused_pod_back(watched: ControlPlane) -> None:
    """Nothing else in the cluster changes: the controller bumps the node's epoch, the scheduler tries again."""
    api, random = watched.api, np.random.default_rng(5)
    create_nodes(api, 1, first=950)
    path = f"{HARVEST_NODES}/{node_name(950)}/status"
    api.patch(path, {"status": report(950, random, idle=0.05) | {"gpuModel": "L4"}})
    spec = {
        "workload": {"model": "any", "gpuModel": "L4"},
        "standaloneTokensPerSecond": 1,
        "curve": [{"freeMiB": 0, "tokensPerSecond": 1}],
    }
    kind = {"apiVersion": names.API_VERSION, "kind": "OfflineProfile", "metadata": {"name": "only-l4"}}
    api.post(f"{GROUP}/offlineprofiles", kind | {"spec": spec})
    api.patch(f"{GROUP}/offlineprofiles/only-l4/status", {"status": {"phase": "Ready"}})
    [name] = submit(api, 1, sla="0.5", profile="only-l4")
    wait_for("the refusal", lambda: api.get(f"{PODS}/{name}")["status"].get("conditions"))

    api.patch(path, {"status": report(950, random, idle=0.95) | {"gpuModel": "L4"}})

    (pod,) = (pod for pod in wait_bound(api, 1) if pod["metadata"]["name"] == name)
    assert pod["spec"]["nodeName"] == node_name(950)
    assert names.EPOCH in api.get(f"/api/v1/nodes/{node_name(950)}")["metadata"]["annotations"]
    assert len(list(bound_pods(api))) == 1
