"""`valve cluster pause` and `resume`: all harvesting, or none, within seconds.

One HarvestPolicy says it: every daemon and every extender watches that object, so that a pause is one write however
many nodes there are, and nodes that join later pause too. With the API server dead `valve pause` on a node does it by a
file.
"""

import asyncio
import time
from dataclasses import dataclass

from valve_kube import names
from valve_kube.client import MERGE_PATCH, ApiError, KubeClient, Unreachable, create
from valve_kube.errors import SchedulerError
from valve_kube.policies import BRAKE

_POLICIES = f"{names.API_PATH}/harvestpolicies"
_PATH = f"{_POLICIES}/{BRAKE}"
_NODES = f"{names.API_PATH}/gpuharvestnodes"
# Name and phase of a thousand nodes instead of five megabytes of reports.
_TABLE = "application/json;as=Table;g=meta.k8s.io;v=v1"
_LOOK_EVERY_S = 0.5


class NotAll(SchedulerError):
    """Some nodes did not confirm in time; the text names them and the way that needs no API server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Paused:
    """confirmed: nodes whose daemons reported that they do not harvest, after took_s; written_s: the pause itself."""

    nodes: int
    confirmed: int
    written_s: float
    took_s: float


async def pause(client: KubeClient, *, wait_s: float) -> Paused:
    """Stop harvesting everywhere; waits up to `wait_s` for the daemons' own word."""
    begin_s = time.monotonic()
    body = {"apiVersion": names.API_VERSION, "kind": "HarvestPolicy", "metadata": {"name": BRAKE}}
    wish = {"spec": {"paused": True, "nodeSelector": None}}
    if not await create(client, _POLICIES, {**body, "spec": {"paused": True}}):
        await client.request("PATCH", _PATH, body=wish, content_type=MERGE_PATCH)
    written_s = time.monotonic() - begin_s
    phases = await _settled(client, begin_s + wait_s)
    left = _harvesting(phases)
    if left and wait_s > 0:
        raise NotAll(
            f"the pause is set; {len(left)} of {len(phases)} nodes have not confirmed it: {', '.join(left[:5])}; "
            "on such a node `valve pause` needs no API server"
        )
    took_s = time.monotonic() - begin_s

    return Paused(nodes=len(phases), confirmed=len(phases) - len(left), written_s=written_s, took_s=took_s)


async def resume(client: KubeClient) -> bool:
    """Whether there was a pause to lift."""
    try:
        await client.request("DELETE", _PATH)
    except ApiError as error:
        if error.status != 404:
            raise
        return False

    return True


async def _settled(client: KubeClient, deadline_s: float) -> dict[str, str]:
    """The nodes' phases once none harvests, or at the deadline. An API server too busy to answer is asked again."""
    while True:
        try:
            phases = await _phases(client)
            if not _harvesting(phases) or time.monotonic() >= deadline_s:
                return phases
        except Unreachable as error:
            if time.monotonic() >= deadline_s:
                raise NotAll(f"the pause is set, but it is unknown which nodes have heard of it: {error}") from error
        await asyncio.sleep(_LOOK_EVERY_S)


async def _phases(client: KubeClient) -> dict[str, str]:
    """What each node said last that it does."""
    table = await client.request("GET", _NODES, query={"includeObject": "None"}, accept=_TABLE)
    columns = [column["name"] for column in table["columnDefinitions"]]
    name, phase = columns.index("Name"), columns.index("Phase")

    return {str(row["cells"][name]): str(row["cells"][phase] or "") for row in table.get("rows") or []}


def _harvesting(phases: dict[str, str]) -> list[str]:
    return sorted(node for node, phase in phases.items() if phase == "Harvesting")
