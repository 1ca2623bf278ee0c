"""API servers that die, or answer 500, while pods are bound: nothing half done, no GPU given twice.

VALVE_FAULTS says how often (default 3).
"""

import json
import os
from typing import Any

import pytest
from cluster_cli import shown
from cluster_pods import PODS, held_gpus, submit, wait_bound
from valve_tools.cluster.api import ApiRefused
from valve_tools.cluster.controlplane import ControlPlane, wait_for
from valve_tools.cluster.fleet import delete_pods, offline_pod

FAULTS = int(os.environ.get("VALVE_FAULTS", "3"))

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300 + 90 * FAULTS)]

PODS_AT_ONCE = 120
HOOKS = "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations"


def test_an_api_server_killed_while_pods_are_bound_comes_back_to_whole_placements(scheduling: ControlPlane) -> None:
    for round_number in range(FAULTS):
        submit(scheduling.api, PODS_AT_ONCE)
        wait_bound(scheduling.api, (5, 60, 30)[round_number % 3])

        scheduling.kill("kube-apiserver")
        scheduling.restart("kube-apiserver")

        pods = wait_bound(scheduling.api, PODS_AT_ONCE)
        assert set(held_gpus(pods).values()) == {1}, f"round {round_number}"
        delete_pods(scheduling.api)


def test_bindings_answered_with_500_are_made_good_once_the_server_can(scheduling: ControlPlane) -> None:
    """An admission webhook that nobody serves makes the API server itself answer so."""
    rule = {"apiGroups": [""], "apiVersions": ["v1"], "resources": ["pods/binding"], "operations": ["CREATE"]}
    hook = {
        "name": "nobody.example.com",
        "clientConfig": {"url": "https://127.0.0.1:1/"},
        "rules": [rule],
        "admissionReviewVersions": ["v1"],
        "sideEffects": "None",
        "failurePolicy": "Fail",
    }
    scheduling.api.post(HOOKS, {"metadata": {"name": "nobody"}, "webhooks": [hook]})
    try:
        scheduling.api.post(PODS, waits_for_nobody())
        wait_for("the 500s", lambda: answers_500(scheduling))
        submitted = submit(scheduling.api, 5)
        wait_for("the refused Bindings", lambda: all(lost(scheduling, name) for name in submitted))
        assert not any(pod["spec"].get("nodeName") for pod in scheduling.api.get(PODS)["items"])
        told = [shown(scheduling, "explain", name) for name in submitted]
        assert {one["state"] for one in told} == {"undecided"}, "nobody knows whether a 500 was stored"
        assert all(one["node"].startswith("gpu-") and one["node"] in one["advice"] for one in told)
    finally:
        scheduling.api.delete(f"{HOOKS}/nobody")

    assert set(held_gpus(wait_bound(scheduling.api, 5)).values()) == {1}


def lost(plane: ControlPlane, name: str) -> bool:
    return "failed calling webhook" in json.dumps(plane.api.get(f"{PODS}/{name}"))


def waits_for_nobody() -> dict[str, Any]:
    pod = offline_pod("probe")
    return pod | {"spec": pod["spec"] | {"schedulerName": "nobody"}}


def answers_500(plane: ControlPlane) -> bool:
    """The API server learns of the hook a little after it is stored; asked with a pod that no scheduler places."""
    target = {"apiVersion": "v1", "kind": "Node", "name": "nowhere"}
    binding = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": "probe"}, "target": target}
    try:
        plane.api.post(f"{PODS}/probe/binding?dryRun=All", binding)
    except ApiRefused as refused:
        return "failed calling webhook" in str(refused)
    return False
