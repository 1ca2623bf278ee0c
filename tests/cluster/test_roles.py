"""The roles of the chart on a real API server: they suffice for the work, and for nothing else."""

import socket
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from cluster_pods import PODS, held_gpus, submit, wait_bound
from valve_scheduler import names
from valve_tools.cluster.api import Refused
from valve_tools.cluster.controlplane import ControlPlane, wait_for
from valve_tools.cluster.fleet import delete_pods, node_name, offline_pod, report

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300), pytest.mark.usefixtures("chart")]

Json = dict[str, Any]
REVIEWS = "/apis/authorization.k8s.io/v1/subjectaccessreviews"
ALLOWED = [
    ("valve-daemon", "watch pods"),
    ("valve-daemon", "create valve.gpu/gpuharvestnodes"),
    ("valve-daemon", "patch valve.gpu/gpuharvestnodes/status"),
    ("valve-scheduler", "create pods/binding"),
    ("valve-scheduler", "watch valve.gpu/gpuharvestnodes"),
    ("valve-scheduler", "watch valve.gpu/offlineworkloads"),
    ("valve-controller", "create pods/eviction"),
    ("valve-controller", "patch nodes"),
    ("valve-controller", "patch valve.gpu/offlineworkloads/status"),
    ("valve-scheduler", "watch valve.gpu/harvestpolicies"),
    ("valve-controller", "watch nodes"),
    ("valve-controller", "patch valve.gpu/gpuharvestnodes"),
    ("valve-controller", "create valve.gpu/harvestaccounts"),
    ("valve-controller", "create valve.gpu/offlineprofiles"),
    ("valve-controller", "create events.k8s.io/events"),
]
DENIED = [
    ("valve-daemon", "patch nodes"),
    ("valve-daemon", "delete pods"),
    ("valve-daemon", "create pods/binding"),
    ("valve-daemon", "get secrets"),
    ("valve-daemon", "patch valve.gpu/offlineworkloads/status"),
    ("valve-scheduler", "create pods/eviction"),
    ("valve-scheduler", "patch nodes"),
    ("valve-scheduler", "get secrets"),
    ("valve-scheduler", "patch valve.gpu/gpuharvestnodes/status"),
    ("valve-scheduler", "patch valve.gpu/gpuharvestnodes"),
    ("valve-daemon", "patch valve.gpu/gpuharvestnodes"),
    ("valve-daemon", "patch valve.gpu/harvestaccounts/status"),
    ("valve-controller", "patch valve.gpu/harvestpolicies"),
    ("valve-controller", "delete pods"),
    ("valve-controller", "patch pods"),
    ("valve-controller", "create pods/binding"),
    ("valve-controller", "update nodes"),
    ("valve-controller", "get secrets"),
    ("valve-controller", "patch valve.gpu/gpuharvestnodes/status"),
]


def user(account: str) -> str:
    return f"system:serviceaccount:valve-system:{account}"


def may(plane: ControlPlane, account: str, right: str) -> bool:
    verb, _, resource = right.partition(" ")
    group = next((group for group in (names.DOMAIN, "events.k8s.io") if resource.startswith(group)), "")
    kind, _, subresource = resource.removeprefix(f"{group}/" if group else "").partition("/")
    attributes = {"verb": verb, "group": group, "resource": kind, "subresource": subresource, "namespace": "default"}
    groups = ["system:serviceaccounts", "system:authenticated"]
    spec = {"user": user(account), "groups": groups, "resourceAttributes": attributes}
    review = {"apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview", "spec": spec}

    return bool(plane.api.post(REVIEWS, review)["status"]["allowed"])


@pytest.mark.parametrize(("account", "right"), ALLOWED)
def test_a_role_allows_what_its_process_does(control_plane: ControlPlane, account: str, right: str) -> None:
    assert may(control_plane, account, right)


@pytest.mark.parametrize(("account", "right"), DENIED)
def test_a_role_denies_what_its_process_has_no_business_with(
    control_plane: ControlPlane, account: str, right: str
) -> None:
    assert not may(control_plane, account, right)


def test_the_check_of_the_chart_passes_with_the_controllers_rights(control_plane: ControlPlane) -> None:
    access = control_plane.account_kubeconfig("valve-system", "valve-controller")
    command = [sys.executable, "-m", "valve_scheduler.main", f"--kubeconfig={access}", "check"]

    done = subprocess.run(command, capture_output=True, text=True, check=False)

    assert (done.returncode, done.stderr) == (0, "")
    assert "/api/v1/pods: 0" in done.stdout


def test_pods_are_placed_and_requeued_with_the_rights_of_the_chart_and_nothing_more(
    control_plane: ControlPlane, nodes: int
) -> None:
    """Scheduler and extender under one lease, the controller beside them, each with its service account."""
    api = control_plane.api
    access = control_plane.account_kubeconfig("valve-system", "valve-scheduler")
    arguments = ("--lease-namespace=valve-system",)
    port, _ = control_plane.start_extender(arguments=arguments, kubeconfig=access)
    control_plane.start_scheduler(port, lease="valve-system", kubeconfig=access)
    access = control_plane.account_kubeconfig("valve-system", "valve-controller")
    control_plane.start_controller("--namespace=valve-system", kubeconfig=access)
    try:
        submit(api, 20, gpus=2)
        assert set(held_gpus(wait_bound(api, 20)).values()) == {1}
        holder = api.get("/apis/coordination.k8s.io/v1/namespaces/valve-system/leases/valve-scheduler")["spec"]
        assert holder["holderIdentity"].startswith(f"{socket.gethostname()}_")
        requeued(control_plane, nodes)
    finally:
        for name in ("controller", "kube-scheduler", "extender"):
            control_plane.kill(name)


def requeued(plane: ControlPlane, nodes: int) -> None:
    """All nodes off: a pod waits; one node comes back: the controller's bump of that node places it."""
    reports = f"{names.API_PATH}/gpuharvestnodes"
    delete_pods(plane.api)
    for index in range(nodes):
        plane.api.patch(f"{reports}/{node_name(index)}/status", {"status": {"phase": "Paused"}})
    plane.api.post(PODS, offline_pod("waits"))
    wait_for("the refusal", lambda: plane.api.get(f"{PODS}/waits")["status"].get("conditions"))
    plane.api.patch(f"{reports}/{node_name(7)}/status", {"status": report(7, np.random.default_rng(1))})
    (pod,) = wait_bound(plane.api, 1)
    assert pod["spec"]["nodeName"] == node_name(7)


def test_the_controller_may_touch_one_annotation_of_nodes_and_nothing_else(
    control_plane: ControlPlane, nodes: int
) -> None:
    api = control_plane.api.user(user("valve-controller"), "system:serviceaccounts", "system:authenticated")
    path = f"/api/v1/nodes/{node_name(1)}"

    api.patch(path, {"metadata": {"annotations": {names.EPOCH: "5"}}})

    for forbidden in (
        {"spec": {"unschedulable": True}},
        {"metadata": {"labels": {"a": "b"}}},
        {"metadata": {"annotations": {"a": "b"}}},
    ):
        with pytest.raises(Refused, match="and nothing else"):
            api.patch(path, forbidden)


def test_a_daemon_reports_for_its_own_node_only(control_plane: ControlPlane, nodes: int) -> None:
    """Its token says on which node it runs; the API server puts that into the request."""
    path = f"{names.API_PATH}/gpuharvestnodes/{node_name(1)}/status"
    patch = {"status": {"phase": "Harvesting"}}
    groups = ("system:serviceaccounts", "system:authenticated")
    daemon = control_plane.api.user(user("valve-daemon"), *groups)

    with pytest.raises(Refused, match="own node only"):
        daemon.patch(path, patch)
    with pytest.raises(Refused, match="own node only"):
        daemon.with_extra("authentication.kubernetes.io/node-name", node_name(2)).patch(path, patch)

    daemon.with_extra("authentication.kubernetes.io/node-name", node_name(1)).patch(path, patch)


@pytest.mark.parametrize("key", [names.GPUS, names.PREDICTED, names.DECISION])
def test_nobody_writes_a_placement_by_hand(control_plane: ControlPlane, key: str) -> None:
    api = control_plane.api
    with pytest.raises(Refused, match="written by Valve alone"):
        api.post(PODS, offline_pod("forged") | {"metadata": {"name": "forged", "annotations": {key: "x"}, **role()}})
    api.post(PODS, offline_pod("honest"))

    with pytest.raises(Refused, match="written by Valve alone"):
        api.patch(f"{PODS}/honest", {"metadata": {"annotations": {key: "x"}}})


def role() -> Json:
    return {"labels": {names.ROLE: names.OFFLINE}}


def test_the_placement_and_the_role_of_a_placed_pod_never_change(control_plane: ControlPlane) -> None:
    api = control_plane.api
    api.post(PODS, offline_pod("p0"))
    binding = {
        "apiVersion": "v1",
        "kind": "Binding",
        "metadata": {"name": "p0", "annotations": {names.GPUS: "GPU-a"}},
        "target": {"apiVersion": "v1", "kind": "Node", "name": "n"},
    }
    api.post(f"{PODS}/p0/binding", binding)

    for change in ({"annotations": {names.GPUS: None}}, {"annotations": {names.GPUS: "GPU-b"}}):
        with pytest.raises(Refused, match="written by Valve alone"):
            api.patch(f"{PODS}/p0", {"metadata": change})
    with pytest.raises(Refused, match="cannot change"):
        api.patch(f"{PODS}/p0", {"metadata": {"labels": {names.ROLE: None}}})
    api.patch(f"{PODS}/p0", {"metadata": {"annotations": {"mine": "x"}}})
