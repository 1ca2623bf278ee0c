"""HarvestPolicies, the brake, accounts and profiles on a real API server, with the rights of the chart."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cluster_cli import shown
from cluster_helm import Helm
from cluster_pods import PODS, submit, wait_bound
from valve_kube import names
from valve_scheduler.controller.accounts import MOST_SEEN
from valve_tools.cluster.api import ApiRefused
from valve_tools.cluster.controlplane import ControlPlane, wait_for
from valve_tools.cluster.fleet import harvest_node, node_name, offline_pod
from valve_tools.cluster.fleet import report as fleet_report
from valve_tools.cluster.listeners import READY, heard

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

Json = dict[str, Any]
POLICIES = f"{names.API_PATH}/harvestpolicies"
NODES = f"{names.API_PATH}/gpuharvestnodes"
PROFILE = """
kind: OfflineProfile
metadata: {name: by-hand}
spec:
  workload: {model: small, gpuModel: H100}
  standaloneTokensPerSecond: 100
  curve: [{freeMiB: 1000, tokensPerSecond: 100}]
"""


@pytest.fixture(scope="module")
def controlled(scheduling: ControlPlane, chart: Helm) -> Iterator[ControlPlane]:
    """The controller with its own rights beside the scheduler."""
    access = scheduling.account_kubeconfig("valve-system", "valve-controller")
    scheduling.start_controller("--namespace=valve-system", "--monitor-every=1", kubeconfig=access)
    yield scheduling
    scheduling.kill("controller")


def specs(plane: ControlPlane) -> list[Json]:
    return [node["spec"] for node in plane.api.get(NODES)["items"]]


def policy(plane: ControlPlane, name: str, **spec: Any) -> None:
    plane.api.post(
        POLICIES, {"apiVersion": names.API_VERSION, "kind": "HarvestPolicy", "metadata": {"name": name}, "spec": spec}
    )


MORE = {f"more{index}" for index in range(4)}
CAPPED = "of the 3 harvested GPUs its HarvestPolicy allows"
GRANTED = {"slo": "ttft=500ms,tpot=40ms,gap=100ms", "grant": True}


def test_a_policy_reaches_the_nodes_it_selects_and_leaves_them_when_it_goes(
    controlled: ControlPlane, nodes: int
) -> None:
    selector = {"kubernetes.io/hostname": node_name(3)}
    policy(controlled, "one", nodeSelector=selector, reclaimsPerHour=7, granted=GRANTED)

    wait_for("the policy", lambda: any(spec.get("resolved") for spec in specs(controlled)))
    found = controlled.api.get(f"{NODES}/{node_name(3)}")["spec"]["resolved"]
    assert found == {"reclaimsPerHour": 7, "granted": GRANTED}
    assert sum(bool(spec.get("resolved")) for spec in specs(controlled)) == 1

    controlled.api.delete(f"{POLICIES}/one")

    wait_for("its end", lambda: not any(spec.get("resolved") for spec in specs(controlled)))


def test_a_policy_follows_the_labels_of_nodes(controlled: ControlPlane) -> None:
    """A node that gets the label after the controller has listed them all, and loses it again."""
    policy(controlled, "pool", nodeSelector={"pool": "late"}, reclaimsPerHour=9)
    for label, expected in (("late", {"reclaimsPerHour": 9}), (None, {})):
        controlled.api.patch(f"/api/v1/nodes/{node_name(4)}", {"metadata": {"labels": {"pool": label}}})

        wait_for(
            f"label {label}",
            lambda expected=expected: (
                controlled.api.get(f"{NODES}/{node_name(4)}")["spec"].get("resolved", {}) == expected
            ),
        )
    controlled.api.delete(f"{POLICIES}/pool")


def test_a_policy_that_another_overrules_says_so_where_people_look(controlled: ControlPlane) -> None:
    """The columns of `kubectl get`, and an event; with the rights of the chart."""
    api, selector = controlled.api, {"kubernetes.io/hostname": node_name(5)}
    policy(controlled, "night", nodeSelector=selector, mode="harvest")
    policy(controlled, "pool", nodeSelector=selector, reclaimsPerHour=9)
    policy(controlled, "typing-error", nodeSelector={"pol": "late"}, reclaimsPerHour=9)

    def said() -> dict[str, tuple[int, int, str]]:
        rows = api.table(POLICIES)
        return {name: (row["Nodes"], row["In force"], row["Shadowed"]) for name, row in rows.items()}

    expected = {"night": (1, 1, "InForce"), "pool": (1, 0, "OtherPolicy"), "typing-error": (0, 0, "SelectsNoNode")}
    wait_for("the columns", lambda: said() == expected)
    wait_for("the event", lambda: told_policies(controlled) == {"pool"})
    api.delete(f"{POLICIES}/night")

    wait_for("its end", lambda: said()["pool"] == (1, 1, "InForce"))


def told_policies(plane: ControlPlane) -> set[str]:
    events = plane.api.get("/api/v1/namespaces/default/events")["items"]
    return {one["involvedObject"]["name"] for one in events if one["reason"] == "PolicyShadowed"}


def test_kubectl_shows_the_mode_in_force_of_every_node(controlled: ControlPlane, nodes: int) -> None:
    rows = controlled.api.table(NODES)

    assert {name: row["Mode"] for name, row in rows.items()} == {node_name(index): "harvest" for index in range(nodes)}


@pytest.fixture(autouse=True)
def no_policies_left(controlled: ControlPlane) -> Iterator[None]:
    """A pause that outlives its test would keep every later pod waiting."""
    yield
    controlled.api.delete(POLICIES)
    wait_for(
        "no policy on any node", lambda: not any(one.get("paused") or one.get("resolved") for one in specs(controlled))
    )


def test_a_pause_reaches_every_node_and_nothing_is_placed_until_resume(controlled: ControlPlane, nodes: int) -> None:
    """How soon is for the bench to say: `valve bench cluster-pause`."""
    log = controlled.folder / "heard.txt"
    arguments = ("-m", "valve_tools.cluster.listeners", str(controlled.kubeconfig), str(nodes), str(log))
    controlled.spawn("listeners", *arguments, program=sys.executable)
    wait_for("every node to watch", lambda: READY in log.read_text())

    done = shown(controlled, "pause", "--wait=60")
    controlled.api.post(PODS, offline_pod("waits"))
    wait_for("the refusal", lambda: controlled.api.get(f"{PODS}/waits")["status"].get("conditions"))

    assert (done["nodes"], done["confirmed"]) == (nodes, nodes)
    assert shown(controlled, "explain", "waits")["state"] == "barred"
    assert shown(controlled, "resume")["lifted"]
    assert not shown(controlled, "resume")["lifted"]

    (pod,) = wait_bound(controlled.api, 1)
    assert pod["metadata"]["name"] == "waits"
    wait_for("every node's word", lambda: len(list(heard(log, "resumed"))) == nodes)
    controlled.kill("listeners")


def test_a_namespace_gets_no_more_gpus_than_its_policy_allows(controlled: ControlPlane) -> None:
    policy(controlled, "caps", namespaces=[{"name": "default", "maxGPUs": 3}])
    submit(controlled.api, 1)
    wait_bound(controlled.api, 1)

    submit_more(controlled)
    wait_for("the cap", lambda: len(wait_bound(controlled.api, 3)) == 3 and told(controlled))

    bound = {pod["metadata"]["name"] for pod in wait_bound(controlled.api, 3)}
    explained = [shown(controlled, "explain", name) for name in sorted(MORE - bound)]
    assert [(one["state"], CAPPED in one["advice"]) for one in explained] == [("barred", True)] * 2
    controlled.api.delete(f"{POLICIES}/caps")
    wait_bound(controlled.api, 5)


def submit_more(plane: ControlPlane) -> None:
    for name in sorted(MORE):
        plane.api.post(PODS, offline_pod(name))


def told(plane: ControlPlane) -> bool:
    return CAPPED in json.dumps(plane.api.get(PODS)["items"])


def test_an_account_survives_its_pods_and_its_controller(controlled: ControlPlane) -> None:
    submit(controlled.api, 1)
    (pod,) = wait_bound(controlled.api, 1)
    node, uid = pod["spec"]["nodeName"], pod["metadata"]["uid"]
    report(controlled, node, [{"podUID": uid, "harvestSeconds": 7200.0}])
    wait_for("the account", lambda: harvested(controlled) == 2.0)

    controlled.kill("controller")
    controlled.restart("controller")
    report(controlled, node, [{"podUID": uid, "harvestSeconds": 1800.0}])  # its daemon counts from zero again

    wait_for("the rest", lambda: harvested(controlled) == 2.5)
    controlled.api.delete(f"{PODS}/{pod['metadata']['name']}", {"gracePeriodSeconds": 0})
    report(controlled, node, [])
    assert harvested(controlled) == 2.5
    owners = shown(controlled, "usage", "--by=owner")["owners"]  # of earlier tests too: accounts outlive pods
    assert {row["owner"]: row["harvested_gpu_h"] for row in owners}[pod["metadata"]["name"]] == 2.5


def test_no_namespace_is_too_large_for_its_account(controlled: ControlPlane) -> None:
    """One object of the API server holds 4,096 pods; with more the account once stood still."""
    api, crowd = controlled.api, range(800, 866)
    many, accounts = 64 * len(crowd), f"/apis/{names.API_VERSION}/namespaces/crowd/harvestaccounts"
    api.post("/api/v1/namespaces", {"metadata": {"name": "crowd"}})
    refusals = controlled.log("controller").count("patch refused")
    for index in crowd:
        api.post(NODES, harvest_node(index))

    def lend(seconds: float) -> None:
        """What their daemons would say of all the pods of a service."""
        for index in crowd:
            pods = [{"podUID": f"u-{index}-{pod}", "namespace": "crowd", "service": "web"} for pod in range(64)]
            services = [pod | {"lentSeconds": seconds} for pod in pods]
            status = fleet_report(index, np.random.default_rng(1), idle=0.5) | {"services": services}
            api.patch(f"{NODES}/{node_name(index)}/status", {"status": status})

    def lent() -> float:
        found = [item.get("status") or {} for item in api.get(accounts)["items"]]
        return sum(float((status.get("online") or {}).get("lentSeconds", 0.0)) for status in found)

    try:
        for seconds in (10.0, 25.0):
            lend(seconds)
            wait_for("all of it on the account", lambda seconds=seconds: lent() == many * seconds)
        followed = [len(item["status"]["seen"]) for item in api.get(accounts)["items"]]
        assert (sum(followed), max(followed)) == (many, MOST_SEEN)
        assert many > 4096
        assert controlled.log("controller").count("patch refused") == refusals
    finally:
        for index in crowd:
            api.delete(f"{NODES}/{node_name(index)}")
        api.delete("/api/v1/namespaces/crowd")


def report(plane: ControlPlane, node: str, offline: list[Json]) -> None:
    plane.api.patch(f"{NODES}/{node}/status", {"status": {"offline": offline}})


def harvested(plane: ControlPlane) -> float:
    rows = {row["namespace"]: row for row in shown(plane, "usage", "--by=namespace")["namespaces"]}
    return float(rows.get("default", {}).get("harvested_gpu_h", 0.0))


def test_a_pod_that_waits_for_its_profile_is_placed_once_it_is_brought_by_hand(
    controlled: ControlPlane, tmp_path: Path
) -> None:
    file = tmp_path / "profile.yaml"
    file.write_text(PROFILE)
    controlled.api.post(PODS, offline_pod("wants", sla="0.05", profile="by-hand"))
    wait_for("the refusal", lambda: "profile is missing" in json.dumps(controlled.api.get(f"{PODS}/wants")["status"]))

    shown(controlled, "profile", f"--from={file}")

    (pod,) = wait_bound(controlled.api, 1)
    assert float(pod["metadata"]["annotations"][names.PREDICTED]) >= 0.05
    assert shown(controlled, "explain", "wants")["state"] == "placed"


@pytest.mark.parametrize(
    "spec",
    [
        {"mode": "fast"},
        {"alignmentThreshold": 2},
        {"namespaces": [{"maxGPUs": 1}]},
        {"reclaimsPerHour": 0},
        {"cooldown": {"minMilliseconds": 100, "maxMilliseconds": 50}},
        {"cooldown": {"startMilliseconds": 60, "maxMilliseconds": 50}},
        {"granted": {"slo": "tpot=40"}},
        {"granted": {"grant": True}},
        {"granted": {"grant": True, "slo": "ttft=500ms"}},
    ],
)
def test_a_policy_that_cannot_be_is_refused_by_the_schema(control_plane: ControlPlane, spec: Json) -> None:
    with pytest.raises(ApiRefused, match="422"):
        policy(control_plane, "bad", **spec)
