"""Claims on a real API server with a played DRA driver: its objects, no process. Kubernetes' own scheduler allocates;
the node's reader must name the very card that the slices name."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from cluster_helm import Helm
from cluster_pods import PODS
from valve_kube import names
from valve_kube.access import from_kubeconfig
from valve_kube.client import KubeClient
from valve_tools.cluster.api import ApiRefused
from valve_tools.cluster.controlplane import ControlPlane, wait_for
from valve_tools.cluster.webhook import start_webhook

from valved.kube.claims import Claims
from valved.kube.pods import read_pod

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

Json = dict[str, Any]
RESOURCE = "/apis/resource.k8s.io/v1"
DRIVER, NODE = "gpu.nvidia.com", "dra-node"
UUIDS = [f"GPU-{index}0000000-0000-4000-8000-000000000000" for index in range(4)]


def device_class() -> Json:
    selector = {"cel": {"expression": f"device.driver == '{DRIVER}'"}}
    return {"apiVersion": "resource.k8s.io/v1", "kind": "DeviceClass", "metadata": {"name": DRIVER}} | {
        "spec": {"selectors": [selector]}
    }


def resource_slice() -> Json:
    devices = [
        {"name": f"gpu-{index}", "attributes": {"uuid": {"string": uuid}, "index": {"int": index}}}
        for index, uuid in enumerate(UUIDS)
    ]
    pool = {"name": NODE, "generation": 1, "resourceSliceCount": 1}
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceSlice",
        "metadata": {"name": f"{NODE}-gpus"},
        "spec": {"driver": DRIVER, "nodeName": NODE, "pool": pool, "devices": devices},
    }


def template(count: int) -> Json:
    request = {"name": "gpu", "exactly": {"deviceClassName": DRIVER, "count": count}}
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaimTemplate",
        "metadata": {"name": f"gpus-{count}"},
        "spec": {"spec": {"devices": {"requests": [request]}}},
    }


def claiming_pod(name: str, count: int = 1, role: str = names.ONLINE) -> Json:
    """It names no resource at all."""
    work = {"name": "serve", "image": "example.invalid/online:1", "resources": {"claims": [{"name": "gpu"}]}}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {names.ROLE: role}},
        "spec": {
            "automountServiceAccountToken": False,
            "containers": [work, {"name": "log", "image": "example.invalid/log:1"}],
            "resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": f"gpus-{count}"}],
        },
    }


@pytest.fixture(scope="module")
def dra(control_plane: ControlPlane) -> Iterator[ControlPlane]:
    """One node with four GPUs of a DRA driver, and Kubernetes' own scheduler for online pods."""
    api = control_plane.api
    node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": NODE}}
    api.post("/api/v1/nodes", node)
    room = {"cpu": "8", "memory": "64Gi", "pods": "110"}
    ready = [{"type": "Ready", "status": "True", "reason": "Played", "message": "played"}]
    api.patch(f"/api/v1/nodes/{NODE}/status", {"status": {"capacity": room, "allocatable": room, "conditions": ready}})
    api.patch(f"/api/v1/nodes/{NODE}", {"spec": {"taints": None}})
    api.post(f"{RESOURCE}/deviceclasses", device_class())
    api.post(f"{RESOURCE}/resourceslices", resource_slice())
    for count in (1, 2):
        api.post(f"{RESOURCE}/namespaces/default/resourceclaimtemplates", template(count))
    control_plane.start_default_scheduler()
    try:
        yield control_plane
    finally:
        control_plane.kill("default-scheduler")
        for count in (1, 2):
            api.delete(f"{RESOURCE}/namespaces/default/resourceclaimtemplates/gpus-{count}")
        api.delete(f"{RESOURCE}/resourceslices/{NODE}-gpus")
        api.delete(f"{RESOURCE}/deviceclasses/{DRIVER}")
        api.delete(f"/api/v1/nodes/{NODE}")


def placed(plane: ControlPlane, name: str) -> Json:
    def look() -> Json | None:
        pod = plane.api.get(f"{PODS}/{name}")
        return pod if pod["spec"].get("nodeName") and pod["status"].get("resourceClaimStatuses") else None

    found = wait_for(f"the placement of {name}", look)
    assert found is not None
    return found


def held(plane: ControlPlane, *pods: Json) -> dict[str, set[str]]:
    """What the node's reader says: container -> UUIDs."""

    async def ask() -> dict[str, set[str]]:
        client = KubeClient(from_kubeconfig(str(plane.kubeconfig)))
        claims = Claims(client, NODE)
        following = asyncio.ensure_future(claims.run())
        try:
            await asyncio.wait_for(claims.slices.wait_synced(), 100)
            read = [read_pod(pod) for pod in pods]
            claims.want(read)
            while claims.unread():
                await asyncio.sleep(0.05)
            return {
                f"{pod.name}/{one.container}": {claims.uuid(device) for device in one.devices or ()}
                for pod in read
                for one in claims.held_by(pod)
            }
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
            client.close()

    return asyncio.run(ask())


def test_claims_that_the_scheduler_allocated_are_told_by_card(dra: ControlPlane) -> None:
    dra.api.post(PODS, claiming_pod("one"))
    dra.api.post(PODS, claiming_pod("two", 2))

    found = held(dra, placed(dra, "one"), placed(dra, "two"))

    assert sorted(found) == ["one/serve", "two/serve"], "the sidecars hold nothing"
    assert (len(found["one/serve"]), len(found["two/serve"])) == (1, 2)
    assert found["one/serve"] | found["two/serve"] < set(UUIDS)
    assert not found["one/serve"] & found["two/serve"]


@pytest.mark.parametrize("engine", ["webhook", "policy"])
def test_an_online_pod_that_only_claims_its_gpus_is_injected(dra: ControlPlane, helm: Helm, engine: str) -> None:
    helm.install(f"--set=admission.online.engine={engine}")
    try:
        if engine == "webhook":
            start_webhook(dra)
        dra.api.patch("/api/v1/namespaces/default", {"metadata": {"labels": {names.INJECT: "enabled"}}})

        def injected() -> Json | None:
            pod = dra.api.post(f"{PODS}?dryRun=All", claiming_pod("dry"))
            return pod if pod["spec"].get("volumes") else None

        found = wait_for("an injected pod", injected)
        assert found is not None
        serve, log = found["spec"]["containers"]
        assert any(entry["name"] == "LD_PRELOAD" for entry in serve["env"])
        assert not log.get("env")
        assert found["metadata"]["annotations"][names.INJECTION] == "ok"
        plain = claiming_pod("nobody")
        del plain["metadata"]["labels"]
        assert not any(
            volume["name"].startswith("valve-")
            for volume in dra.api.post(f"{PODS}?dryRun=All", plain)["spec"].get("volumes") or []
        ), "a pod that says nothing may claim a network card"
        if engine == "webhook":
            with pytest.raises(ApiRefused, match="resourceClaims"):
                dra.api.post(f"{PODS}?dryRun=All", claiming_pod("batch", role=names.OFFLINE))
            dra.kill("webhook")
    finally:
        dra.api.patch("/api/v1/namespaces/default", {"metadata": {"labels": {names.INJECT: None}}})
        helm.uninstall()
