"""The webhook behind a real API server: pods as they are stored, its certificate, and what happens while it is down."""

from collections.abc import Iterator
from typing import Any

import pytest
from cluster_helm import Helm
from cluster_pods import PODS
from cluster_webhook import CONFIGURATION, start_webhook
from valve_scheduler import names
from valve_tools.cluster.api import Refused
from valve_tools.cluster.controlplane import ControlPlane, wait_for
from valve_tools.cluster.fleet import offline_pod

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

Json = dict[str, Any]
RUNTIMES = "/apis/node.k8s.io/v1/runtimeclasses"


@pytest.fixture(scope="module")
def webhook(control_plane: ControlPlane, helm: Helm) -> Iterator[ControlPlane]:
    """The chart's configuration, pointed at a process on loopback with the rights of its service account."""
    api = control_plane.api
    runtime = {"apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass", "metadata": {"name": "nvidia"}}
    api.post(RUNTIMES, runtime | {"handler": "nvidia"})  # as NVIDIA's operator makes it
    helm.install()
    try:
        start_webhook(control_plane)
        api.patch("/api/v1/namespaces/default", {"metadata": {"labels": {names.INJECT: "enabled"}}})
        wait_for("a first pod", lambda: api.post(f"{PODS}?dryRun=All", offline_pod("dry")))
        yield control_plane
        control_plane.kill("webhook")
    finally:
        api.patch("/api/v1/namespaces/default", {"metadata": {"labels": {names.INJECT: None}}})
        api.delete(f"{RUNTIMES}/nvidia")
        helm.uninstall()


def online_pod(name: str, **metadata: Any) -> Json:
    container = {
        "name": "serve",
        "image": "example.invalid/online:1",
        "resources": {"limits": {"nvidia.com/gpu": "1"}},
        "env": [{"name": "LD_PRELOAD", "value": "/lib/own.so"}],
    }
    annotations = {names.ROLE: names.ONLINE, **metadata}

    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "annotations": annotations},
        "spec": {"containers": [container, {"name": "log", "image": "example.invalid/log:1"}]},
    }


def minimal_offline(name: str, **annotations: str) -> Json:
    """As a user writes it: a role, an image, nothing else."""
    container = {"name": "work", "image": "example.invalid/offline:1"}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "annotations": {names.ROLE: names.OFFLINE, **annotations}},
        "spec": {"containers": [container]},
    }


def test_a_bare_offline_pod_becomes_one_that_valve_schedules(webhook: ControlPlane) -> None:
    spec = webhook.api.post(PODS, minimal_offline("p0"))["spec"]

    container = spec["containers"][0]
    assert (spec["schedulerName"], spec["priorityClassName"], spec["priority"]) == (
        "valve-scheduler",
        "valve-offline",
        -100,
    )
    assert spec["preemptionPolicy"] == "Never"
    assert container["resources"] == {"limits": {names.RESOURCE: "1"}, "requests": {names.RESOURCE: "1"}}
    assert [entry["name"] for entry in container["env"]] == ["NVIDIA_VISIBLE_DEVICES", "ENGINE_TIMEOUT", "LD_PRELOAD"]
    assert spec["runtimeClassName"] == "nvidia"


@pytest.mark.parametrize(
    ("annotations", "why"),
    [
        ({names.SLA: "30%"}, r"is '30%', must be a number in \(0, 1\]"),
        ({names.SLA: "0.3"}, "needs valve.gpu/profile"),
        ({names.GPUS_REQUIRED: "16"}, "must be 1 to 8"),
        ({names.GPUS: "GPU-mine"}, "written by Valve alone"),
    ],
)
def test_a_user_who_got_it_wrong_is_told_at_once(webhook: ControlPlane, annotations: dict[str, str], why: str) -> None:
    with pytest.raises(Refused, match=why):
        webhook.api.post(PODS, minimal_offline("p0", **annotations))


def test_an_online_pod_is_injected_and_its_sidecar_is_not(webhook: ControlPlane) -> None:
    pod = webhook.api.post(PODS, online_pod("o0"))

    serve, log = pod["spec"]["containers"]
    assert pod["metadata"]["annotations"][names.INJECTION] == "ok"
    assert serve["env"][0]["value"] == "/var/lib/valve/shim/current/libvalve.so:/lib/own.so"
    assert "env" not in log
    assert pod["spec"]["schedulerName"] == "default-scheduler"


def test_an_online_pod_that_opts_out_says_so_and_is_left_alone(webhook: ControlPlane) -> None:
    pod = webhook.api.post(PODS, online_pod("o0", **{names.INJECT: "false"}))

    assert pod["metadata"]["annotations"][names.INJECTION] == "skipped-opt-out"
    assert pod["spec"]["containers"][0]["env"][0]["value"] == "/lib/own.so"


def test_a_pod_without_a_role_never_meets_the_webhook(webhook: ControlPlane) -> None:
    pod = online_pod("plain")
    del pod["metadata"]["annotations"]

    stored = webhook.api.post(PODS, pod)

    assert names.INJECTION not in stored["metadata"].get("annotations", {})


def test_while_it_is_down_online_pods_start_and_offline_ones_are_refused_clearly(webhook: ControlPlane) -> None:
    webhook.kill("webhook")
    try:
        online = webhook.api.post(PODS, online_pod("o0"))
        with pytest.raises(Refused, match="failed calling webhook") as refused:
            webhook.api.post(PODS, minimal_offline("p0"))
    finally:
        webhook.restart("webhook")

    assert names.INJECTION not in online["metadata"]["annotations"]
    assert "offline.valve.gpu" in str(refused.value)
    wait_for("the webhook back", lambda: webhook.api.post(PODS, minimal_offline("p1")))


def test_a_restart_serves_the_same_certificate_so_nothing_has_to_be_published_anew(webhook: ControlPlane) -> None:
    before = webhook.api.get(CONFIGURATION)["webhooks"][0]["clientConfig"]["caBundle"]

    webhook.kill("webhook")
    webhook.restart("webhook")
    wait_for("the webhook back", lambda: webhook.api.post(f"{PODS}?dryRun=All", minimal_offline("p1")))

    assert webhook.api.get(CONFIGURATION)["webhooks"][0]["clientConfig"]["caBundle"] == before
