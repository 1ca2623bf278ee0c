"""What this node asks of the API server, and what it writes there: its own report, nothing else."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from datetime import datetime, timezone
from typing import Any

from valve_kube import names
from valve_kube.access import Access, from_kubeconfig, in_cluster
from valve_kube.client import APPLY_PATCH, ApiError, KubeClient, Unreachable, create
from valve_kube.policies import BRAKE, is_brake
from valve_kube.reflector import Reflector, Sink

from valved.kube import status
from valved.kube.nodeclock import NodeClock, stored_at_s
from valved.kube.pods import COPY, Pod, PodBook

log = logging.getLogger("valved.kube")

Json = dict[str, Any]
NODES_PATH = f"{names.API_PATH}/gpuharvestnodes"
POLICIES_PATH = f"{names.API_PATH}/harvestpolicies"
MANAGER = "valved"


def access(kubeconfig: str, environment: dict[str, str]) -> Access:
    return from_kubeconfig(kubeconfig) if kubeconfig else in_cluster(environment)


def brake_view(client: KubeClient, braked: Callable[[bool], None]) -> Reflector:
    """The one policy that pauses every node, watched by each: a pause of a fleet is one write."""
    sink = Sink(
        replace=lambda items: braked(any(map(is_brake, items))),
        put=lambda item: braked(is_brake(item)),
        drop=lambda _: braked(False),
    )
    return Reflector(client, POLICIES_PATH, sink, query={"fieldSelector": f"metadata.name={BRAKE}"})


class ApiServer:
    def __init__(
        self,
        client: KubeClient,
        node: str,
        book: PodBook,
        braked: Callable[[bool], None],
        *,
        found: Callable[[Json], None],
        wall_s: Callable[[], float] = time.time,
    ) -> None:
        """`found` gets the node's own object, at every change."""
        self.written = 0
        self.failed = 0
        self.found = found
        self.clock = NodeClock()
        self._wall_s = wall_s
        self._client = client
        self._node = node
        self._book = book
        self._path = f"{NODES_PATH}/{node}"
        self.pods = Reflector(
            client,
            "/api/v1/pods",
            Sink(replace=book.replace, put=book.put, drop=book.drop),
            query={"fieldSelector": f"spec.nodeName={node}"},
        )
        self.namespaces = Reflector(
            client,
            "/api/v1/namespaces",
            Sink(replace=book.replace_namespaces, put=book.put_namespace, drop=book.drop_namespace),
        )
        self.own = Reflector(
            client,
            NODES_PATH,
            Sink(replace=self._all_found, put=self.found, drop=lambda item: None),
            query={"fieldSelector": f"metadata.name={node}"},
        )

        self.brake = brake_view(client, braked)

    async def run(self) -> None:
        """Follow pods, what namespaces say, the own object and the fleet's brake until cancelled."""
        await asyncio.gather(self.pods.run(), self.namespaces.run(), self.own.run(), self.brake.run())

    async def fetch_pod(self, namespace: str, name: str) -> None:
        """Have one pod in the book now; OSError when the API server cannot say."""
        if (found := await self._pod(namespace, name)) is not None:
            self._book.put(found)

    async def is_gone(self, pod: Pod) -> bool:
        """Whether the API server has neither it nor, of a static one, a copy; OSError when it cannot say. A static one
        runs on without a copy. Where none but the runtime told of it, its name shows what it is: the kubelet puts the
        node's behind it."""
        found = await self._pod(pod.namespace, pod.name)
        if found is None:
            return pod.is_told or not pod.name.endswith(f"-{self._node}")
        metadata: Json = found["metadata"]
        return pod.uid not in (metadata["uid"], (metadata.get("annotations") or {}).get(COPY))

    async def _pod(self, namespace: str, name: str) -> Json | None:
        try:
            found: Json = await self._client.request("GET", f"/api/v1/namespaces/{namespace}/pods/{name}")
            return found
        except ApiError as error:
            if error.status != 404:
                raise OSError(str(error)) from error
        except Unreachable as error:
            raise OSError(str(error)) from error
        return None

    def now_s(self) -> float:
        """The API server's time, as far as reports have told it."""
        return self._wall_s() - self.clock.ahead_s

    async def write(self, report: Json) -> bool:
        """Apply the report; the object is made at the first. False: not written, to be tried again in time."""
        try:
            try:
                await self._apply(report)
            except ApiError as error:
                if error.status != 404:
                    raise
                await self._create()
                await self._apply(report)
        except (ApiError, Unreachable) as error:
            self.failed += 1
            log.warning("report not written", extra={"facts": {"error": str(error)}})
            return False
        self.written += 1
        return True

    async def _apply(self, report: Json) -> None:
        query = {"fieldManager": MANAGER, "force": "true"}
        body = status.apply_body(self._node, report)
        path, sent_s = f"{self._path}/status", self._wall_s()
        answer = await self._client.request("PATCH", path, query=query, body=body, content_type=APPLY_PATCH)
        if (stored_s := stored_at_s(answer, MANAGER)) is not None:
            self.clock.stored(sent_s, self._wall_s(), stored_s)

    async def _create(self) -> None:
        # No mode: what the daemon is configured for must give way to policies and to the operator's word.
        body = {
            "apiVersion": names.API_VERSION,
            "kind": "GPUHarvestNode",
            "metadata": {"name": self._node},
            "spec": {},
        }
        await create(self._client, NODES_PATH, body, {"fieldManager": MANAGER})  # or somebody was faster

    def _all_found(self, items: list[Json]) -> None:
        for item in items:
            self.found(item)

    def close(self) -> None:
        self._client.close()


def now_text() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")
