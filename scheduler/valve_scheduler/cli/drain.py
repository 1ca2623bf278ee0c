"""Before an uninstall: webhooks gone, nodes off and unmarked, no offline pod running; then the chart may go.

Nodes are off by a HarvestPolicy that an object of the release owns. The garbage collector takes it when the release has
gone, so a new installation finds the nodes with the modes they had.
"""

import asyncio
import contextlib
import logging
from dataclasses import dataclass

from valve_kube import names
from valve_kube.client import MERGE_PATCH, ApiError, Json, KubeClient, create
from valve_kube.errors import SchedulerError
from valve_kube.objects import pod_place
from valve_kube.policies import DRAIN_POLICY

from valve_scheduler.placement.views import OFFLINE_PODS

log = logging.getLogger(__name__)

_LOOK_EVERY_S = 2.0
# Part of every release, and among the last that go.
_OWNER = {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole", "name": "valve-controller"}


class DrainTimeout(SchedulerError):
    """Offline pods were still there at the end; the text names them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainSettings:
    """timeout_s covers a grace period of 30 s and a disruption budget that lets go one by one."""

    configuration: str = "valve"
    timeout_s: float = 240.0


async def drain(client: KubeClient, settings: DrainSettings) -> None:
    """Safe to run again at any point; raises DrainTimeout with what is left."""
    # First: a webhook that outlives its server refuses every offline pod, and uninstalls have left some behind.
    with contextlib.suppress(ApiError):
        await client.request("DELETE", f"{names.WEBHOOKS_PATH}/{settings.configuration}")
    await _forbid(client)
    nodes, _ = await client.list(f"{names.API_PATH}/gpuharvestnodes")
    for node in nodes:
        await _off(client, node)
    end_s = asyncio.get_running_loop().time() + settings.timeout_s
    while running := await _running(client):
        if asyncio.get_running_loop().time() > end_s:
            raise DrainTimeout(f"{len(running)} offline pods still run: {', '.join(map(_title, running[:10]))}")
        for pod in running:
            await _evict(client, pod)
        await asyncio.sleep(_LOOK_EVERY_S)
    await _unmark(client)
    log.info("drained", extra={"nodes": len(nodes)})


async def _forbid(client: KubeClient) -> None:
    """Nothing is placed from here on, nor on nodes that join later."""
    role = await client.request("GET", f"/apis/{_OWNER['apiVersion']}/clusterroles/{_OWNER['name']}")
    metadata = {"name": DRAIN_POLICY, "ownerReferences": [{**_OWNER, "uid": role["metadata"]["uid"]}]}
    body = {"apiVersion": names.API_VERSION, "kind": "HarvestPolicy", "metadata": metadata, "spec": {"drain": True}}
    await create(client, f"{names.API_PATH}/harvestpolicies", body)  # or an attempt before this one has


async def _off(client: KubeClient, node: Json) -> None:
    """As the controller does, so that nothing waits for it."""
    path = f"{names.API_PATH}/gpuharvestnodes/{node['metadata']['name']}"
    body = {"spec": {"resolved": {"drain": f"HarvestPolicy {DRAIN_POLICY}"}}}
    await client.request("PATCH", path, body=body, content_type=MERGE_PATCH)


async def _unmark(client: KubeClient) -> None:
    """Last: with every node off the controller marks none any more."""
    nodes, _ = await client.list("/api/v1/nodes")
    gone = {"metadata": {"annotations": {names.EPOCH: None}}}
    for node in nodes:
        if names.EPOCH in (node["metadata"].get("annotations") or {}):
            path = f"/api/v1/nodes/{node['metadata']['name']}"
            await client.request("PATCH", path, body=gone, content_type=MERGE_PATCH)


async def _running(client: KubeClient) -> list[Json]:
    pods, _ = await client.list("/api/v1/pods", OFFLINE_PODS)
    return [pod for pod in pods if pod_place(pod).node and not pod_place(pod).finished]


async def _evict(client: KubeClient, pod: Json) -> None:
    metadata = pod["metadata"]
    path = f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}/eviction"
    name = {"name": metadata["name"], "namespace": metadata["namespace"]}
    try:
        await client.request("POST", path, body={"apiVersion": "policy/v1", "kind": "Eviction", "metadata": name})
    except ApiError as error:
        log.warning("eviction refused", extra={"pod": _title(pod), "error": str(error)})


def _title(pod: Json) -> str:
    return f"{pod['metadata']['namespace']}/{pod['metadata']['name']}"
