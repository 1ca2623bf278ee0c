"""The roles of the chart on a real API server: they suffice for the work, and for nothing else."""

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from cluster_helm import Helm
from cluster_pods import PODS, held_gpus, submit, wait_bound
from valve_kube import names
from valve_scheduler.controller.belief import PARTS, POLICY
from valve_scheduler.controller.workloads import new_workload
from valve_tools.cluster.api import ApiRefused
from valve_tools.cluster.controlplane import ControlPlane, wait_for
from valve_tools.cluster.fleet import delete_pods, node_name, offline_pod, report

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300), pytest.mark.usefixtures("chart")]

Json = dict[str, Any]
WORKLOADS = f"/apis/{names.API_VERSION}/namespaces/default/offlineworkloads"
REVIEWS = "/apis/authorization.k8s.io/v1/subjectaccessreviews"
HOOKS = "admissionregistration.k8s.io/mutatingwebhookconfigurations"
ALLOWED = [
    ("valve-daemon", "watch pods"),
    ("valve-daemon", "create valve.gpu/gpuharvestnodes"),
    ("valve-daemon", "patch valve.gpu/gpuharvestnodes/status"),
    ("valve-daemon", "watch resource.k8s.io/resourceslices"),
    ("valve-daemon", "get resource.k8s.io/resourceclaims"),
    ("valve-scheduler", "create pods/binding"),
    ("valve-scheduler", "watch valve.gpu/gpuharvestnodes"),
    ("valve-scheduler", "watch valve.gpu/offlineworkloads"),
    ("valve-controller", "create pods/eviction"),
    ("valve-controller", "patch nodes"),
    ("valve-controller", "patch valve.gpu/offlineworkloads/status"),
    ("valve-scheduler", "watch valve.gpu/harvestpolicies"),
    ("valve-controller", "watch nodes"),
    ("valve-controller", "patch valve.gpu/gpuharvestnodes"),
    ("valve-controller", "patch valve.gpu/harvestpolicies/status"),
    ("valve-controller", "delete valve.gpu/gpuharvestnodes"),
    ("valve-controller", "create valve.gpu/harvestaccounts"),
    ("valve-controller", "create valve.gpu/offlineprofiles"),
    ("valve-controller", "patch valve.gpu/offlineprofiles/status"),
    ("valve-controller", "create events.k8s.io/events"),
    ("valve-webhook", f"patch {HOOKS} valve"),
    ("valve-webhook", "create secrets valve-webhook-tls"),
    ("valve-webhook", "update secrets valve-webhook-tls"),
    ("valve-drain", f"delete {HOOKS} valve"),
    ("valve-drain", "patch valve.gpu/gpuharvestnodes"),
    ("valve-drain", "patch nodes"),
    ("valve-drain", "create pods/eviction"),
]
DENIED = [
    ("valve-daemon", "patch nodes"),
    ("valve-daemon", "delete pods"),
    ("valve-daemon", "create events.k8s.io/events"),
    ("valve-daemon", "create pods/binding"),
    ("valve-daemon", "get secrets"),
    ("valve-daemon", "list resource.k8s.io/resourceclaims"),
    ("valve-daemon", "patch resource.k8s.io/resourceclaims"),
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
    ("valve-webhook", f"patch {HOOKS} another"),
    ("valve-webhook", f"delete {HOOKS} valve"),
    ("valve-webhook", "get secrets another"),
    ("valve-webhook", "get secrets"),
    ("valve-webhook", "get pods"),
    ("valve-webhook", "get valve.gpu/gpuharvestnodes"),
    ("valve-drain", f"delete {HOOKS} another"),
    ("valve-drain", f"patch {HOOKS} valve"),
    ("valve-drain", "delete pods"),
    ("valve-drain", "delete nodes"),
    ("valve-drain", "get secrets"),
    ("valve-drain", "patch valve.gpu/gpuharvestnodes/status"),
]
RBAC = "/apis/rbac.authorization.k8s.io/v1"
GOLDEN = Path(__file__).resolve().parents[1] / "helm/golden/default.yaml"


@pytest.fixture(scope="module", autouse=True)
def roles_of_the_rest(control_plane: ControlPlane, chart: Helm) -> Iterator[None]:
    """The fixture's chart has no webhook, and helm makes the hook's role only when it runs the hook."""
    stored = []
    for one in filter(None, yaml.safe_load_all(GOLDEN.read_text())):
        name, kind = one["metadata"]["name"], f"{one['kind'].lower()}s"
        if one["apiVersion"] == RBAC.removeprefix("/apis/") and name in ("valve-webhook", "valve-drain"):
            room = f"{RBAC}/namespaces/valve-system/{kind}" if one["kind"].startswith("Role") else f"{RBAC}/{kind}"
            control_plane.api.post(room, one)
            stored.append(f"{room}/{name}")
    for account, right in (("valve-webhook", f"get {HOOKS} valve"), ("valve-drain", "list nodes")):
        wait_for("the role", lambda account=account, right=right: may(control_plane, account, right))
    wait_for("the role in its namespace", lambda: may(control_plane, "valve-webhook", "get secrets valve-webhook-tls"))
    yield
    for path in stored:
        control_plane.api.delete(path)


def test_the_daemon_needs_a_privileged_namespace_and_the_rest_none(control_plane: ControlPlane) -> None:
    """As the API server judges the pods; a quick start without that label ends with no daemon."""
    templates = {
        one["metadata"]["name"]: one["spec"].get("template", {}).get("spec") or one["spec"]
        for one in filter(None, yaml.safe_load_all(GOLDEN.read_text()))
        if one["kind"] in ("DaemonSet", "Deployment", "Job", "Pod")
    }
    said = {}
    for level in ("privileged", "baseline", "restricted"):
        room = f"security-{level}"
        labels = {"pod-security.kubernetes.io/enforce": level}
        control_plane.api.post("/api/v1/namespaces", {"metadata": {"name": room, "labels": labels}})
        said[level] = {name: refusal(control_plane, room, name, spec) for name, spec in templates.items()}
        control_plane.api.delete(f"/api/v1/namespaces/{room}")

    assert len(templates) == 6
    assert set(said["privileged"].values()) == {""}
    for level in ("baseline", "restricted"):
        assert "violates PodSecurity" in said[level].pop("valve-daemon")
        assert set(said[level].values()) == {""}


def refusal(plane: ControlPlane, namespace: str, name: str, spec: Json) -> str:
    # What only exists where the chart is installed has no say in this.
    absent = ("serviceAccountName", "runtimeClassName")
    pod = {"metadata": {"name": name}, "spec": {key: value for key, value in spec.items() if key not in absent}}
    path = f"/api/v1/namespaces/{namespace}"
    wait_for("the account", lambda: plane.api.get(f"{path}/serviceaccounts/default"))
    try:
        plane.api.post(f"{path}/pods?dryRun=All", {"apiVersion": "v1", "kind": "Pod", **pod})
    except ApiRefused as refused:
        return str(refused)
    return ""


def user(account: str) -> str:
    return f"system:serviceaccount:valve-system:{account}"


def may(plane: ControlPlane, account: str, right: str) -> bool:
    """`right` is VERB [GROUP/]RESOURCE[/SUBRESOURCE], and for the one of a name in Valve's own namespace, NAME."""
    verb, resource, *name = right.split()
    groups = (names.DOMAIN, "resource.k8s.io", "events.k8s.io", "admissionregistration.k8s.io")
    group = next((group for group in groups if resource.startswith(f"{group}/")), "")
    kind, _, subresource = resource.removeprefix(f"{group}/" if group else "").partition("/")
    attributes = {"verb": verb, "group": group, "resource": kind, "subresource": subresource}
    attributes |= {"namespace": "valve-system", "name": name[0]} if name else {"namespace": "default"}
    everybody = ["system:serviceaccounts", "system:authenticated"]
    spec = {"user": user(account), "groups": everybody, "resourceAttributes": attributes}
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


@pytest.fixture
def people(control_plane: ControlPlane) -> Iterator[None]:
    """A viewer and an editor of one namespace, and somebody who may explain."""
    stored = []
    for name, role, room in (
        ("viewer", "view", "/namespaces/default"),
        ("editor", "edit", "/namespaces/default"),
        ("asker", "valve-explain", ""),
        ("operator", "valve-operator", ""),
        ("onlooker", "valve-viewer", ""),
    ):
        kind = "rolebindings" if room else "clusterrolebindings"
        subject = {"kind": "ServiceAccount", "name": name, "namespace": "valve-system"}
        reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role}
        body = {"metadata": {"name": name}, "roleRef": reference, "subjects": [subject]}
        stored += [f"{RBAC}{room}/{kind}/{name}", f"/api/v1/namespaces/valve-system/serviceaccounts/{name}"]
        control_plane.api.post(f"{RBAC}{room}/{kind}", body)
        control_plane.api.post("/api/v1/namespaces/valve-system/serviceaccounts", {"metadata": {"name": name}})
    yield
    for path in stored:
        control_plane.api.delete(path)


@pytest.mark.usefixtures("people")
def test_people_of_a_namespace_bring_profiles_and_read_what_their_jobs_were_promised(
    control_plane: ControlPlane,
) -> None:
    for account, right in (
        ("viewer", "list valve.gpu/offlineworkloads"),
        ("editor", "create valve.gpu/offlineprofiles"),
        ("editor", "patch valve.gpu/offlineprofiles/status"),
    ):
        # A controller adds the chart's rules to the roles.
        wait_for(f"{account}: {right}", lambda account=account, right=right: may(control_plane, account, right))

    assert not may(control_plane, "viewer", "create valve.gpu/offlineprofiles")
    assert not may(control_plane, "editor", "patch valve.gpu/offlineworkloads/status")
    assert not may(control_plane, "editor", "create valve.gpu/harvestpolicies")


@pytest.mark.usefixtures("people")
def test_a_tenant_never_calls_its_own_profile_measured(control_plane: ControlPlane) -> None:
    """The controller believes such a profile, and moves pods by it."""
    profiles = f"/apis/{names.API_VERSION}/namespaces/default/offlineprofiles"
    wait_for("the right", lambda: may(control_plane, "editor", "patch valve.gpu/offlineprofiles/status"))
    groups = ("system:serviceaccounts", "system:authenticated")
    tenant, controller = (control_plane.api.user(user(name), *groups) for name in ("editor", "valve-controller"))
    point = {"freeMiB": 0, "tokensPerSecond": 1}
    spec = {"workload": {"model": "m"}, "standaloneTokensPerSecond": 1, "curve": [point]}
    kind = {"apiVersion": names.API_VERSION, "kind": "OfflineProfile"}
    made = tenant.post(profiles, kind | {"metadata": {"name": "mine"}, "spec": spec})
    status = f"{profiles}/mine/status"
    tenant.patch(status, {"status": {"phase": "Ready", "source": "Manual"}})

    with pytest.raises(ApiRefused, match="only Valve calls a profile MeasuredByNode"):
        tenant.patch(status, {"status": {"source": "MeasuredByNode"}})
    version = {"resourceVersion": made["metadata"]["resourceVersion"]}  # the tenant has written since
    with pytest.raises(ApiRefused, match="object has been modified"):
        controller.patch(status, {"metadata": version, "status": {"source": "MeasuredByNode"}})
    tenant.patch(status, {"status": {"source": "Measured"}})  # a former release's word is anybody's
    controller.patch(status, {"status": {"source": "MeasuredByNode"}})
    with pytest.raises(ApiRefused, match="only Valve calls a profile MeasuredByNode"):
        tenant.patch(f"{profiles}/mine", {"spec": {"standaloneTokensPerSecond": 100}})
    tenant.patch(status, {"status": {"source": "Manual"}})
    tenant.patch(f"{profiles}/mine", {"spec": {"standaloneTokensPerSecond": 100}})
    for part in PARTS:  # the controller believes what was made since then
        assert controller.get(f"{names.ADMISSION_PATH}/{part}/{POLICY}")["metadata"]["creationTimestamp"]
    tenant.delete(f"{profiles}/mine")


@pytest.mark.usefixtures("people")
def test_the_role_for_it_is_enough_to_explain_a_pod_of_ones_own_namespace(control_plane: ControlPlane) -> None:
    control_plane.api.post(PODS, offline_pod("why"))
    access = control_plane.account_kubeconfig("valve-system", "asker")
    command = [str(Path(sys.executable).parent / "valve"), "explain", "pod", "why", f"--kubeconfig={access}", "--json"]

    def explained() -> Json:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return json.loads(done.stdout) if done.returncode == 0 else {}

    assert wait_for("the answer", explained)["pod"] == "default/why"
    absent = subprocess.run([*command, "--namespace=valve-system"], capture_output=True, text=True, check=False)
    assert "404" in absent.stderr


@pytest.mark.usefixtures("people")
def test_an_operator_pauses_the_fleet_by_kubectl_and_an_onlooker_only_looks(control_plane: ControlPlane) -> None:
    plugin = str(Path(sys.executable).parent / "kubectl-valve")

    def run(account: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        access = control_plane.account_kubeconfig("valve-system", account)
        command = [plugin, *arguments, f"--kubeconfig={access}"]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    wait_for("the operator's rights", lambda: run("operator", "pause", "--wait=0").returncode == 0)
    try:
        assert control_plane.api.get(f"{names.API_PATH}/harvestpolicies/valve-pause")["spec"]["paused"] is True
        assert run("onlooker", "status", "--json").returncode == 0
        refused = run("onlooker", "resume")
        assert (refused.returncode, "kubectl valve: 403" in refused.stderr) == (1, True)
        for account, right in (("operator", "delete pods"), ("operator", "patch valve.gpu/gpuharvestnodes/status")):
            assert not may(control_plane, account, right)
    finally:
        assert run("operator", "resume").returncode == 0


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


@pytest.mark.parametrize("account", ["valve-controller", "valve-drain"])
def test_valve_may_touch_one_annotation_of_nodes_and_nothing_else(
    control_plane: ControlPlane, nodes: int, account: str
) -> None:
    api = control_plane.api.user(user(account), "system:serviceaccounts", "system:authenticated")
    path = f"/api/v1/nodes/{node_name(1)}"

    api.patch(path, {"metadata": {"annotations": {names.EPOCH: "5"}}})

    for forbidden in (
        {"spec": {"unschedulable": True}},
        {"metadata": {"labels": {"a": "b"}}},
        {"metadata": {"annotations": {"a": "b"}}},
    ):
        with pytest.raises(ApiRefused, match="and nothing else"):
            api.patch(path, forbidden)
    api.patch(path, {"metadata": {"annotations": {names.EPOCH: None}}})


def test_a_daemon_reports_for_its_own_node_only(control_plane: ControlPlane, nodes: int) -> None:
    """Its token says on which node it runs; the API server puts that into the request."""
    path = f"{names.API_PATH}/gpuharvestnodes/{node_name(1)}/status"
    patch = {"status": {"phase": "Harvesting"}}
    groups = ("system:serviceaccounts", "system:authenticated")
    daemon = control_plane.api.user(user("valve-daemon"), *groups)

    with pytest.raises(ApiRefused, match="own node only"):
        daemon.patch(path, patch)
    with pytest.raises(ApiRefused, match="own node only"):
        daemon.with_extra("authentication.kubernetes.io/node-name", node_name(2)).patch(path, patch)

    daemon.with_extra("authentication.kubernetes.io/node-name", node_name(1)).patch(path, patch)


def test_what_is_made_with_an_owner_passes_where_owners_are_guarded(control_plane: ControlPlane) -> None:
    """As on OpenShift: whoever blocks the deletion of an owner must have rights on it. Nothing of Valve does."""
    api, everybody = control_plane.api, ("system:serviceaccounts", "system:authenticated")
    pod = api.post(PODS, offline_pod("owns"))
    workload = new_workload(pod, 0.3)
    controller = api.user(user("valve-controller"), *everybody)

    stored = controller.post(WORKLOADS, workload)
    (owner,) = stored["metadata"]["ownerReferences"]
    assert owner["uid"] == pod["metadata"]["uid"]
    blocking = {"name": "blocks", "ownerReferences": [{**owner, "blockOwnerDeletion": True}]}
    with pytest.raises(ApiRefused, match="cannot set blockOwnerDeletion"):  # the guard is up
        controller.post(WORKLOADS, {**workload, "metadata": blocking})

    api.delete(f"{WORKLOADS}/{stored['metadata']['name']}")


def test_the_drain_hook_needs_no_more_than_its_role(control_plane: ControlPlane) -> None:
    api, policy = control_plane.api, f"{names.API_PATH}/harvestpolicies/valve-drain"
    accounts = "/api/v1/namespaces/valve-system/serviceaccounts"
    api.post(accounts, {"metadata": {"name": "valve-drain"}})
    access = control_plane.account_kubeconfig("valve-system", "valve-drain")
    command = [sys.executable, "-m", "valve_scheduler.main", f"--kubeconfig={access}", "drain", "--timeout=30"]

    runs = [subprocess.run(command, capture_output=True, text=True, check=False) for _ in range(2)]
    made = api.get(policy)
    api.delete(policy)
    api.delete(f"{accounts}/valve-drain")

    assert [run.returncode for run in runs] == [0, 0], [run.stderr for run in runs]
    assert made["metadata"]["ownerReferences"][0]["name"] == "valve-controller"


@pytest.mark.parametrize("key", [names.GPUS, names.PREDICTED, names.DECISION])
def test_nobody_writes_a_placement_by_hand(control_plane: ControlPlane, key: str) -> None:
    api = control_plane.api
    with pytest.raises(ApiRefused, match="written by Valve alone"):
        api.post(PODS, offline_pod("forged") | {"metadata": {"name": "forged", "annotations": {key: "x"}, **role()}})
    api.post(PODS, offline_pod("honest"))

    with pytest.raises(ApiRefused, match="written by Valve alone"):
        api.patch(f"{PODS}/honest", {"metadata": {"annotations": {key: "x"}}})


def role() -> Json:
    return {"labels": {names.ROLE: names.OFFLINE}}


def test_the_placement_and_the_role_of_a_placed_pod_never_change(control_plane: ControlPlane) -> None:
    api = control_plane.api
    api.post(PODS, offline_pod("p0"))
    with pytest.raises(ApiRefused, match="cannot change"):  # nor of one that waits: it would hold GPUs unseen
        api.patch(f"{PODS}/p0", {"metadata": {"labels": {names.ROLE: None}}})
    binding = {
        "apiVersion": "v1",
        "kind": "Binding",
        "metadata": {"name": "p0", "annotations": {names.GPUS: "GPU-a"}},
        "target": {"apiVersion": "v1", "kind": "Node", "name": "n"},
    }
    api.post(f"{PODS}/p0/binding", binding)

    for change in ({"annotations": {names.GPUS: None}}, {"annotations": {names.GPUS: "GPU-b"}}):
        with pytest.raises(ApiRefused, match="written by Valve alone"):
            api.patch(f"{PODS}/p0", {"metadata": change})
    with pytest.raises(ApiRefused, match="cannot change"):
        api.patch(f"{PODS}/p0", {"metadata": {"labels": {names.ROLE: None}}})
    api.patch(f"{PODS}/p0", {"metadata": {"annotations": {"mine": "x"}}})


def test_a_pod_that_is_offline_by_an_annotation_alone_is_never_let_in_while_the_webhook_is_away(
    control_plane: ControlPlane,
) -> None:
    """The webhook makes a label of it; here it is not installed. No watch of Valve would show such a pod."""
    pod = offline_pod("hidden") | {"metadata": {"name": "hidden", "annotations": {names.ROLE: names.OFFLINE}}}
    pod["spec"]["containers"][0].pop("resources")

    with pytest.raises(ApiRefused, match="of offline work must say offline"):
        control_plane.api.post(PODS, pod)
