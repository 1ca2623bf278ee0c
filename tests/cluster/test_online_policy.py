"""The MutatingAdmissionPolicy engine does to online pods what the webhook's own function does, in a real API server."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
from cluster_helm import Helm
from cluster_pods import PODS
from valve_kube import names
from valve_kube.injection import Skipped
from valve_scheduler.webhook.admission import AdmissionSettings, mutate_online
from valve_tools.cluster.controlplane import ControlPlane, wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

Json = dict[str, Any]
GPU = {"limits": {names.ONLINE_RESOURCE: "1"}}


def pod(container: Json | None = None, notes: Json | None = None, **spec: Any) -> Json:
    work = {"name": "serve", "image": "i", "resources": GPU, **(container or {})}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "p", "annotations": {names.ROLE: names.ONLINE, **(notes or {})}},
        "spec": {
            "automountServiceAccountToken": False,
            "containers": [work, {"name": "log", "image": "i"}],
            **spec,
        },
    }


PODS_OF_ALL_KINDS = {
    "plain": pod(),
    "with a preload of its own": pod(
        {"env": [{"name": "A", "value": "1"}, {"name": "LD_PRELOAD", "value": "/own.so"}]}
    ),
    "with folders of its own": pod(
        {"volumeMounts": [{"name": "d", "mountPath": "/data"}]}, volumes=[{"name": "d", "emptyDir": {}}]
    ),
    "opted out": pod(notes={names.INJECT: "false"}),
    "without a GPU": pod({"resources": {}}),
    "in the host's processes": pod(hostPID=True),
    "preload from a reference": pod(
        {"env": [{"name": "LD_PRELOAD", "valueFrom": {"configMapKeyRef": {"name": "c", "key": "k"}}}]}
    ),
    "variables from a map": pod({"envFrom": [{"configMapRef": {"name": "c"}}]}),
    "our path taken": pod(
        {"volumeMounts": [{"name": "d", "mountPath": "/run/valve"}]}, volumes=[{"name": "d", "emptyDir": {}}]
    ),
}


@pytest.fixture(scope="module")
def policy(control_plane: ControlPlane, helm: Helm) -> Iterator[ControlPlane]:
    """The chart with the policy in the place of the webhook's online entry."""
    helm.install("--set=admission.online.engine=policy")
    api = control_plane.api
    api.patch("/api/v1/namespaces/default", {"metadata": {"labels": {names.INJECT: "enabled"}}})
    try:
        wait_for("the policy", lambda: stored(control_plane, pod())["spec"].get("volumes"))
        yield control_plane
    finally:
        api.patch("/api/v1/namespaces/default", {"metadata": {"labels": {names.INJECT: None}}})
        helm.uninstall()


def stored(plane: ControlPlane, given: Json) -> Json:
    return plane.api.post(f"{PODS}?dryRun=All", given)


def injected(given: Json) -> list[Any]:
    """What the routes have in common; the order of entries has no meaning."""
    found = []
    for container in given["spec"]["containers"]:
        env = sorted((entry["name"], entry.get("value")) for entry in container.get("env") or [])
        mounts = sorted((mount["mountPath"], mount["name"]) for mount in container.get("volumeMounts") or [])
        found.append((container["name"], env, mounts))
    return [*found, sorted(volume["name"] for volume in given["spec"].get("volumes") or [])]


@pytest.mark.parametrize("kind", PODS_OF_ALL_KINDS)
def test_the_policy_leaves_a_pod_as_the_webhook_would(policy: ControlPlane, kind: str) -> None:
    given = PODS_OF_ALL_KINDS[kind]
    try:
        expected = mutate_online(copy.deepcopy(given), AdmissionSettings())
    except Skipped:
        expected = given

    assert injected(stored(policy, given)) == injected(expected)


def test_the_webhook_has_no_online_entry_beside_it(policy: ControlPlane) -> None:
    found = policy.api.get("/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations/valve")

    assert [hook["name"] for hook in found["webhooks"]] == ["offline.valve.gpu", "job.valve.gpu"]
