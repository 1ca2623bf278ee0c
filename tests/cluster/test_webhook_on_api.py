"""The webhook behind a real API server: pods as they are stored, its certificate, and what happens while it is down."""

import base64
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from cluster_helm import Helm
from cluster_pods import PODS
from valve_kube import names
from valve_scheduler.webhook.certificates import LEAF_LIFE, expires_at, renew
from valve_tools.cluster.api import ApiRefused
from valve_tools.cluster.controlplane import ControlPlane, wait_for
from valve_tools.cluster.fleet import offline_pod
from valve_tools.cluster.webhook import CONFIGURATION, start_webhook

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

Json = dict[str, Any]
SECRET = "/api/v1/namespaces/valve-system/secrets/valve-webhook-tls"
JOBS = "/apis/batch/v1/namespaces/default/jobs"
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
    with pytest.raises(ApiRefused, match=why):
        webhook.api.post(PODS, minimal_offline("p0", **annotations))


@pytest.mark.parametrize("role", [names.ONLINE, ""])
def test_harvested_gpus_are_for_offline_work_alone(webhook: ControlPlane, role: str) -> None:
    """Neither pod meets the offline webhook; without a placement it would be stuck on its node."""
    pod = offline_pod("p0") | {"metadata": {"name": "p0", "labels": {names.ROLE: role} if role else {}}}

    wait_refused(webhook, pod, "must say offline, and the annotation nothing else")


@pytest.mark.parametrize(
    ("resource", "why"),
    [
        ("nvidia.com/gpu.shared", "must not ask for nvidia.com/gpu.shared"),  # the webhook, before the policy
        ("nvidia.com/mig-1g.10gb", "may not take GPUs of nvidia.com"),
        ("nvidia.com/pgpu", "may not take GPUs of nvidia.com"),
    ],
)
def test_an_offline_pod_takes_no_other_gpus(webhook: ControlPlane, resource: str, why: str) -> None:
    pod = offline_pod("p0")
    sidecar = {"name": "more", "image": "example.invalid/more:1", "resources": {"limits": {resource: "1"}}}
    pod["spec"]["containers"].append(sidecar)

    wait_refused(webhook, pod, why)


def test_an_offline_pod_brings_no_devices_that_nobody_can_count(webhook: ControlPlane) -> None:
    pod = offline_pod("p0")
    pod["spec"]["resourceClaims"] = [{"name": "gpu", "resourceClaimTemplateName": "gpu"}]

    wait_refused(webhook, pod, "must not bring resourceClaims")


def test_a_network_card_of_the_same_vendor_is_nothing_to_refuse(webhook: ControlPlane) -> None:
    pod = offline_pod("p0")
    pod["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/hostdev"] = "1"

    webhook.api.post(PODS, pod)


def wait_refused(plane: ControlPlane, pod: Json, why: str) -> None:
    """The API server learns of a new policy a little after the policy is stored."""

    def is_refused() -> bool:
        try:
            plane.api.post(f"{PODS}?dryRun=All", pod)
        except ApiRefused as error:
            return why in str(error)
        return False

    wait_for(f"the refusal: {why}", is_refused)


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


def offline_job(name: str, restarts: str) -> Json:
    """Without a podFailurePolicy, and without a retry to spend."""
    pod = minimal_offline(name)
    template = {"metadata": {"annotations": pod["metadata"]["annotations"]}, "spec": pod["spec"]}
    template["spec"]["restartPolicy"] = restarts
    metadata = {"name": name}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": metadata,
        "spec": {"template": template, "backoffLimit": 0},
    }


def move(plane: ControlPlane, job: str) -> None:
    """One pod of it as Valve evicts it; the rest is what scheduler and kubelet would do."""
    api = plane.api
    pods = f"{PODS}?labelSelector=batch.kubernetes.io/job-name%3D{job}"

    def living() -> Json | None:
        return next((one for one in api.get(pods)["items"] if not one["metadata"].get("deletionTimestamp")), None)

    name = wait_for(f"a pod of {job}", living)["metadata"]["name"]
    target = {"apiVersion": "v1", "kind": "Node", "name": "n"}
    api.post(f"{PODS}/{name}/binding", {"metadata": {"name": name}, "target": target})
    api.patch(f"{PODS}/{name}/status", {"status": {"phase": "Running"}})
    api.post(f"{PODS}/{name}/eviction", {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name}})
    api.patch(f"{PODS}/{name}/status", {"status": {"phase": "Failed"}})
    api.delete(f"{PODS}/{name}", {"gracePeriodSeconds": 0})


def ended(plane: ControlPlane, job: str) -> Json | None:
    conditions = plane.api.get(f"{JOBS}/{job}").get("status", {}).get("conditions") or []
    return next((one for one in conditions if one["type"] == "Failed"), None)


def test_a_job_without_a_retry_never_fails_by_being_moved(webhook: ControlPlane) -> None:
    webhook.api.post(JOBS, offline_job("moved", "Never"))

    for _ in range(3):
        move(webhook, "moved")

    status = webhook.api.get(f"{JOBS}/moved")["status"]
    assert (ended(webhook, "moved"), status.get("failed", 0)) == (None, 0)
    webhook.api.delete(f"{JOBS}/moved", {"propagationPolicy": "Background"})


def test_a_job_that_starts_its_containers_anew_can_be_spared_nothing(webhook: ControlPlane) -> None:
    """Why the webhook warns of it: Kubernetes takes no podFailurePolicy beside it, and the eviction is its failure."""
    webhook.api.post(JOBS, offline_job("anew", "OnFailure"))

    move(webhook, "anew")

    failed = wait_for("its end", lambda: ended(webhook, "anew"))
    assert failed["reason"] == "BackoffLimitExceeded"
    webhook.api.delete(f"{JOBS}/anew", {"propagationPolicy": "Background"})


def test_while_it_is_down_online_pods_start_and_offline_ones_are_refused_clearly(webhook: ControlPlane) -> None:
    webhook.kill("webhook")
    try:
        online = webhook.api.post(PODS, online_pod("o0"))
        with pytest.raises(ApiRefused, match="failed calling webhook") as refused:
            webhook.api.post(PODS, minimal_offline("p0"))
    finally:
        webhook.restart("webhook")

    assert names.INJECTION not in online["metadata"]["annotations"]
    assert "offline.valve.gpu" in str(refused.value)
    wait_for("the webhook back", lambda: webhook.api.post(PODS, minimal_offline("p1")))


def test_an_expired_certificate_is_replaced_and_online_pods_start_meanwhile(webhook: ControlPlane) -> None:
    """As after a year in which no webhook ran."""
    stale = renew(None, b"", ("127.0.0.1",), datetime.now(timezone.utc) - LEAF_LIFE - timedelta(days=1))
    parts = {"ca.crt": stale.bundle, "ca.key": stale.ca_key, "tls.crt": stale.certificate, "tls.key": stale.key}
    webhook.kill("webhook")
    webhook.api.patch(SECRET, {"data": {key: base64.b64encode(part).decode() for key, part in parts.items()}})

    webhook.restart("webhook")

    webhook.api.post(PODS, online_pod("o0"))
    wait_for("an offline pod", lambda: webhook.api.post(PODS, minimal_offline("p0")))
    served = base64.b64decode(webhook.api.get(SECRET)["data"]["tls.crt"])
    assert expires_at(served) > datetime.now(timezone.utc) + LEAF_LIFE / 2


def test_a_restart_serves_the_same_certificate_so_nothing_has_to_be_published_anew(webhook: ControlPlane) -> None:
    before = webhook.api.get(CONFIGURATION)["webhooks"][0]["clientConfig"]["caBundle"]

    webhook.kill("webhook")
    webhook.restart("webhook")
    wait_for("the webhook back", lambda: webhook.api.post(f"{PODS}?dryRun=All", minimal_offline("p1")))

    assert webhook.api.get(CONFIGURATION)["webhooks"][0]["clientConfig"]["caBundle"] == before


def test_a_pod_whose_review_is_too_large_is_refused_with_the_reason(webhook: ControlPlane) -> None:
    """What the API server takes as a megabyte of `<` it writes for a webhook as six."""
    given = offline_pod("huge")
    given["spec"]["containers"][0]["env"] = [{"name": "A", "value": "<" * (1 << 20)}]

    with pytest.raises(ApiRefused, match="at most 3145728 are taken"):
        webhook.api.post(f"{PODS}?dryRun=All", given)
    webhook.api.post(f"{PODS}?dryRun=All", offline_pod("after"))
