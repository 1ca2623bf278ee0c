"""`valve cluster pause` and `resume`: all harvesting, or none, within seconds.

One HarvestPolicy says it for good, also to nodes that join later; the spec of every node is patched at once by the
command itself, so that nothing waits for the controller. With the API server dead `valve pause` on a node does it by a
file.
"""

import asyncio
import time
from dataclasses import dataclass

from valve_scheduler import names
from valve_scheduler.errors import SchedulerError
from valve_scheduler.kube.client import MERGE_PATCH, ApiError, Json, KubeClient

POLICY = "valve-pause"
_POLICIES = f"{names.API_PATH}/harvestpolicies"
_NODES = f"{names.API_PATH}/gpuharvestnodes"
# GPUs are let go by the daemons; what counts is that each of them was told.
_LOOK_EVERY_S = 0.5


class NotAll(SchedulerError):
    """Some nodes did not confirm in time; the text names them and the way that needs no API server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Paused:
    """told_s: until every node's object said so; confirmed: nodes whose daemons reported it."""

    nodes: int
    told_s: float
    confirmed: int


async def pause(client: KubeClient, *, wait_s: float) -> Paused:
    """Stop harvesting everywhere; waits up to `wait_s` for the daemons' own word."""
    begin_s = time.monotonic()
    body = {"apiVersion": names.API_VERSION, "kind": "HarvestPolicy", "metadata": {"name": POLICY}}
    try:
        await client.request("POST", _POLICIES, body={**body, "spec": {"paused": True}})
    except ApiError as error:
        if error.status != 409:
            raise
        await _patch(client, f"{_POLICIES}/{POLICY}", {"spec": {"paused": True}})
    nodes = await _tell(client, paused=True)
    told_s = time.monotonic() - begin_s
    left = await _harvesting(client)
    while left and time.monotonic() - begin_s < wait_s:
        await asyncio.sleep(_LOOK_EVERY_S)
        left = await _harvesting(client)
    if left and wait_s > 0:
        shown = ", ".join(left[:5])
        raise NotAll(
            f"{len(left)} of {nodes} nodes have not confirmed the pause: {shown}; "
            "on such a node `valve pause` needs no API server"
        )

    return Paused(nodes=nodes, told_s=told_s, confirmed=nodes - len(left))


async def resume(client: KubeClient) -> Paused:
    begin_s = time.monotonic()
    try:
        await client.request("DELETE", f"{_POLICIES}/{POLICY}")
    except ApiError as error:
        if error.status != 404:
            raise
    nodes = await _tell(client, paused=False)

    return Paused(nodes=nodes, told_s=time.monotonic() - begin_s, confirmed=0)


async def _tell(client: KubeClient, *, paused: bool) -> int:
    nodes, _ = await client.list(_NODES)
    told = [_patch(client, f"{_NODES}/{node['metadata']['name']}", {"spec": {"paused": paused}}) for node in nodes]
    failed = [error for error in await asyncio.gather(*told, return_exceptions=True) if error is not None]
    if failed:
        raise SchedulerError(f"{len(failed)} of {len(nodes)} nodes could not be told, first: {failed[0]}")

    return len(nodes)


async def _harvesting(client: KubeClient) -> list[str]:
    nodes, _ = await client.list(_NODES)
    return [_name(node) for node in nodes if (node.get("status") or {}).get("phase") == "Harvesting"]


async def _patch(client: KubeClient, path: str, patch: Json) -> None:
    await client.request("PATCH", path, body=patch, content_type=MERGE_PATCH)


def _name(node: Json) -> str:
    return str(node["metadata"]["name"])
