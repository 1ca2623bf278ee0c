"""The chart through its life with real helm: install, upgrade, rollback, drain, uninstall."""

import base64
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from cluster_helm import CHART, Helm
from cluster_pods import PODS
from goldens import golden
from valve_kube import names
from valve_kube.objects import mode_in_force
from valve_tools.cluster.api import ApiRefused
from valve_tools.cluster.controlplane import ControlPlane, wait_for
from valve_tools.cluster.fleet import CRDS, offline_pod

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

WEBHOOKS = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations"
LABEL = "labelSelector=app.kubernetes.io%2Fname%3Dvalve"
KINDS = [
    "/api/v1/configmaps",
    "/api/v1/services",
    "/api/v1/serviceaccounts",
    "/apis/apps/v1/deployments",
    "/apis/apps/v1/daemonsets",
    "/apis/policy/v1/poddisruptionbudgets",
    "/apis/rbac.authorization.k8s.io/v1/clusterroles",
    "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings",
    "/apis/rbac.authorization.k8s.io/v1/roles",
    "/apis/rbac.authorization.k8s.io/v1/rolebindings",
    "/apis/scheduling.k8s.io/v1/priorityclasses",
    "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies",
    "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicybindings",
    WEBHOOKS,
]


@pytest.fixture
def release(control_plane: ControlPlane, helm: Helm) -> Iterator[Helm]:
    helm.install()
    yield helm
    control_plane.api.delete(f"{names.API_PATH}/gpuharvestnodes")  # a test that failed may have left its own
    if "valve" in helm.run("list", "--namespace=valve-system", "--short"):
        helm.uninstall()


# Kinds of other projects, which this server does not serve.
FOREIGN = ("monitoring.coreos.com/v1", "cert-manager.io/v1")


@pytest.fixture
def own_class(control_plane: ControlPlane) -> Iterator[None]:
    """The priority class that one of the values files names as the operator's own."""
    classes = "/apis/scheduling.k8s.io/v1/priorityclasses"
    control_plane.api.post(classes, {"metadata": {"name": "ours"}, "value": 1000})
    yield
    control_plane.api.delete(f"{classes}/ours")


@pytest.mark.parametrize("name", ["airgapped", "certmanager", "default", "policy"])
@pytest.mark.usefixtures("release", "own_class")  # namespace, accounts and what values name are there
def test_the_server_takes_every_rendered_object_to_the_letter(control_plane: ControlPlane, name: str) -> None:
    """Server-side apply as a dry run: admission and defaults are the server's own, an unknown field is an error."""
    api = control_plane.api
    rendered = [one for one in yaml.safe_load_all(golden(name)) if one]
    asked = [one for one in rendered if one["apiVersion"] not in FOREIGN]
    how = "dryRun=All&fieldManager=tests&force=true&fieldValidation=Strict"

    for one in asked:
        path = f"{resource_path(control_plane, one)}/{one['metadata']['name']}?{how}"
        stored = api.call("PATCH", path, one, content_type="application/apply-patch+yaml")
        assert stored["kind"] == one["kind"]

    path = f"{resource_path(control_plane, asked[0])}/{asked[0]['metadata']['name']}?{how}"
    with pytest.raises(ApiRefused, match="spce"):
        api.call("PATCH", path, {**asked[0], "spce": {}}, content_type="application/apply-patch+yaml")


def resource_path(plane: ControlPlane, found: dict[str, Any]) -> str:
    """Where objects of this kind are, as the server says it."""
    version = found["apiVersion"]
    root = f"/apis/{version}" if "/" in version else f"/api/{version}"
    served = plane.api.get(root)["resources"]
    kind = next(one for one in served if one["kind"] == found["kind"] and "/" not in one["name"])
    namespace = found["metadata"].get("namespace", "valve-system")
    return f"{root}/namespaces/{namespace}/{kind['name']}" if kind["namespaced"] else f"{root}/{kind['name']}"


def left(plane: ControlPlane) -> list[str]:
    return [
        f"{kind}/{item['metadata']['name']}" for kind in KINDS for item in plane.api.get(f"{kind}?{LABEL}")["items"]
    ]


def test_every_object_of_the_chart_is_accepted_by_the_server_and_gone_after_an_uninstall(
    control_plane: ControlPlane, release: Helm
) -> None:
    """All but the CRDs, which keep what was measured, and the certificate, which is the webhook's own."""
    found = left(control_plane)
    assert all(any(name.startswith(kind) for name in found) for kind in KINDS)

    release.uninstall()

    assert left(control_plane) == []
    assert len(control_plane.api.get(CRDS)["items"]) == 5


def test_an_upgrade_and_a_rollback_keep_the_published_authority(control_plane: ControlPlane, release: Helm) -> None:
    """helm must not take back what the webhook wrote: offline pods would be refused until its next round."""
    hooks = control_plane.api.get(f"{WEBHOOKS}/valve")["webhooks"]
    bundle = base64.b64encode(b"what the webhook wrote").decode()
    for hook in hooks:
        hook["clientConfig"]["caBundle"] = bundle
    control_plane.api.patch(f"{WEBHOOKS}/valve", {"webhooks": hooks})

    flags = ("--namespace=valve-system", "--no-hooks")
    release.run("upgrade", "valve", str(CHART), *flags, "--set=mode=harvest,admission.online.allGpuPods=true")
    upgraded = control_plane.api.get(f"{WEBHOOKS}/valve")["webhooks"]
    release.run("rollback", "valve", "1", *flags)
    rolled_back = control_plane.api.get(f"{WEBHOOKS}/valve")["webhooks"]

    assert len(hooks) == len(upgraded) == len(rolled_back)
    assert {hook["clientConfig"]["caBundle"] for hook in (*upgraded, *rolled_back)} == {bundle}
    online = [next(hook for hook in of if hook["name"] == "online.valve.gpu") for of in (upgraded, rolled_back)]
    assert [len(hook["matchConditions"]) for hook in online] == [1, 2]


def former(folder: Path) -> Path:
    """The chart as a release before this one had it: one CRD and some fields fewer."""
    chart = folder / "former"
    shutil.copytree(CHART, chart)
    (chart / "files/crds/harvestaccounts.yaml").unlink()
    file = chart / "files/crds/gpuharvestnodes.yaml"
    crd = yaml.safe_load(file.read_text())
    properties = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]
    del properties["spec"]["properties"]["resolved"], properties["status"]["properties"]["services"]
    file.write_text(yaml.safe_dump(crd))

    return chart


def test_an_upgrade_from_a_former_release_and_the_rollback_keep_nodes_profiles_and_running_pods(
    control_plane: ControlPlane, release: Helm, tmp_path: Path
) -> None:
    # The CRDs of the session were not made by helm.
    api, flags = control_plane.api, ("--namespace=valve-system", "--no-hooks", "--force-conflicts")
    release.run("upgrade", "valve", str(former(tmp_path)), *flags)
    before = release.revision()
    report = {"phase": "Harvesting", "services": [{"podUID": "u", "namespace": "web", "lentSeconds": 1}]}
    api.post(f"{names.API_PATH}/gpuharvestnodes", harvest_node())
    pods = api.get(PODS)["items"]

    release.run("upgrade", "valve", str(CHART), *flags)
    api.patch(f"{names.API_PATH}/gpuharvestnodes/n", {"spec": {"resolved": {"reclaimsPerHour": 3}}})
    api.patch(f"{names.API_PATH}/gpuharvestnodes/n/status", {"status": report})
    upgraded = api.get(f"{names.API_PATH}/gpuharvestnodes/n")
    release.run("rollback", "valve", str(before), *flags)
    api.patch(f"{names.API_PATH}/gpuharvestnodes/n/status", {"status": {"phase": "Observing"}})
    rolled_back = api.get(f"{names.API_PATH}/gpuharvestnodes/n")
    api.delete(f"{names.API_PATH}/gpuharvestnodes/n")

    assert upgraded["spec"]["resolved"] == {"reclaimsPerHour": 3}
    assert upgraded["status"]["services"][0]["lentSeconds"] == 1
    assert rolled_back["spec"] == {"mode": "harvest"}  # what the older one does not know is gone, the rest is whole
    assert rolled_back["status"] == {"phase": "Observing"}
    assert api.get(PODS)["items"] == pods
    assert any(crd["metadata"]["name"].startswith("harvestaccounts") for crd in api.get(CRDS)["items"])


def test_a_drain_removes_webhooks_and_marks_switches_nodes_off_and_names_pods_that_stay(
    control_plane: ControlPlane, release: Helm
) -> None:
    api = control_plane.api
    api.post(f"{names.API_PATH}/gpuharvestnodes", harvest_node())
    marked = {"name": "n", "annotations": {names.EPOCH: "7", "example.com/kept": "yes"}}
    api.post("/api/v1/nodes", {"apiVersion": "v1", "kind": "Node", "metadata": marked})
    hooks = api.get(f"{WEBHOOKS}/valve")["webhooks"]
    for hook in hooks:  # no server stands behind them here
        hook["failurePolicy"] = "Ignore"
    api.patch(f"{WEBHOOKS}/valve", {"webhooks": hooks})
    # The server obeys the change a moment after it has stored it.
    wait_for("the pod to pass", lambda: api.post(PODS, offline_pod("stays")))
    binding = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": "stays"}}
    api.post(f"{PODS}/stays/binding", binding | {"target": {"apiVersion": "v1", "kind": "Node", "name": "n"}})
    api.patch(f"{PODS}/stays", {"metadata": {"finalizers": ["example.com/stay"]}})

    stuck = drain(control_plane, 1)
    api.patch(f"{PODS}/stays", {"metadata": {"finalizers": None}})
    api.delete(f"{PODS}/stays", {"gracePeriodSeconds": 0})
    done = drain(control_plane, 30)

    assert (stuck.returncode, stuck.stderr.splitlines()[-1]) == (
        1,
        "valve-scheduler drain: 1 offline pods still run: default/stays",
    )
    assert done.returncode == 0
    assert api.get(WEBHOOKS)["items"] == []
    spec = api.get(f"{names.API_PATH}/gpuharvestnodes/n")["spec"]
    assert (spec["mode"], mode_in_force(spec)) == ("harvest", "off")
    kept = api.get("/api/v1/nodes/n")["metadata"]["annotations"]
    assert names.EPOCH not in kept
    assert kept["example.com/kept"] == "yes"
    api.delete(f"{names.API_PATH}/gpuharvestnodes/n")
    api.delete("/api/v1/nodes/n")


def test_after_uninstall_and_install_a_node_has_the_mode_that_a_person_gave_it(
    control_plane: ControlPlane, release: Helm
) -> None:
    api, path = control_plane.api, f"{names.API_PATH}/gpuharvestnodes/n"
    api.post(f"{names.API_PATH}/gpuharvestnodes", harvest_node())

    assert drain(control_plane, 30).returncode == 0
    assert mode_in_force(api.get(path)["spec"]) == "off"
    release.uninstall()
    wait_for("the drain to end", lambda: not api.get(f"{names.API_PATH}/harvestpolicies")["items"])
    release.install()
    control_plane.start_controller("--namespace=valve-system")
    wait_for("the new release's word", lambda: mode_in_force(api.get(path)["spec"]) == "harvest")
    control_plane.kill("controller")


def harvest_node() -> dict[str, object]:
    kind = {"apiVersion": names.API_VERSION, "kind": "GPUHarvestNode"}
    return kind | {"metadata": {"name": "n"}, "spec": {"mode": "harvest"}}


def drain(plane: ControlPlane, timeout_s: int) -> subprocess.CompletedProcess[str]:
    access = f"--kubeconfig={plane.kubeconfig}"
    command = [sys.executable, "-m", "valve_scheduler.main", access, "drain", f"--timeout={timeout_s}"]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("offlineworkloads", {"spec": {"ownerUID": "u", "sla": 1.5}}),
        ("offlineworkloads", {"spec": {}}),
        ("offlineprofiles", {"spec": {"workload": {"model": "m", "tensorParallel": 16}}}),
        ("offlineprofiles", {"spec": {"workload": {"model": "m"}, "curve": [{"freeMiB": -1, "tokensPerSecond": 1}]}}),
    ],
)
def test_an_object_that_cannot_be_is_refused_by_the_schema(
    control_plane: ControlPlane, kind: str, body: dict[str, object]
) -> None:
    kinds = {"offlineworkloads": "OfflineWorkload", "offlineprofiles": "OfflineProfile"}
    identity = {"apiVersion": names.API_VERSION, "kind": kinds[kind], "metadata": {"name": "bad"}}

    with pytest.raises(ApiRefused) as refused:
        control_plane.api.post(f"/apis/{names.API_VERSION}/namespaces/default/{kind}", identity | body)

    assert refused.value.status == 422
