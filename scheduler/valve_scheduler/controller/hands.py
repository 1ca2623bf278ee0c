"""What the controller does to the cluster: evictions, events and patches, each asked for once and its refusal told."""

import logging
from collections.abc import Callable, Container

from valve_kube.client import MERGE_PATCH, ApiError, Json, KubeClient, Unreachable, create
from valve_kube.objects import Object

from valve_scheduler import metrics
from valve_scheduler.controller.conditions import Told, event

log = logging.getLogger(__name__)

_METADATA = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"  # objects without spec and status


class Hands:
    def __init__(self, client: KubeClient, now_s: Callable[[], float]) -> None:
        self._client = client
        self._now_s = now_s
        self._said: set[tuple[str, str]] = set()  # UID and reason of what is told once

    async def patch(self, path: str, patch: Json) -> bool:
        try:
            await self._client.request("PATCH", path, body=patch, content_type=MERGE_PATCH)
        except (ApiError, Unreachable) as error:
            log.warning("patch refused", extra={"path": path, "error": str(error)})
            return False
        return True

    async def pods_of(self, node: str) -> list[Json]:
        """Metadata of all pods on a node; nothing where the API server does not answer."""
        query = {"fieldSelector": f"spec.nodeName={node}"}
        try:
            return (await self._client.list("/api/v1/pods", query, accept=_METADATA))[0]
        except (ApiError, Unreachable) as error:
            log.warning("pods not read", extra={"node": node, "error": str(error)})
            return []

    async def evict(self, pod: Object, reason: Told, note: str) -> bool:
        """Ask for an eviction; a disruption budget may refuse it, and then the next round asks again. False: it has
        certainly not happened."""
        metadata = pod["metadata"]
        path = f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}"
        body = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": metadata["name"], "namespace": metadata["namespace"]},
            "deleteOptions": {"preconditions": {"uid": metadata["uid"]}},
        }
        found = {"pod": path, "reason": reason.value, "note": note}
        try:
            await self._client.request("POST", f"{path}/eviction", body=body)
        except (ApiError, Unreachable) as error:
            blocked = isinstance(error, ApiError) and error.status == 429
            metrics.evictions.labels("blocked" if blocked else "failed").inc()
            log.warning("eviction refused", extra={**found, "error": str(error)})
            return not isinstance(error, ApiError) or error.status >= 500
        metrics.evictions.labels("evicted").inc()
        log.info("evicted", extra=found)
        await self.tell(event(pod, reason, note, self._now_s()))

        return True

    async def tell_once(self, pod: Object, reason: Told, note: str) -> None:
        mark = (pod["metadata"]["uid"], reason.value)
        if mark not in self._said:
            told = event(pod, reason, note, self._now_s(), once=True)
            if await self.tell(told):
                self._said.add(mark)

    async def tell(self, told: Json) -> bool:
        """One event on the object, where its owner looks first. True: it stands there."""
        path = f"/apis/events.k8s.io/v1/namespaces/{told['metadata']['namespace']}/events"
        try:
            await create(self._client, path, told)  # or it was told before we began
        except (ApiError, Unreachable) as error:
            log.warning("event refused", extra={"error": str(error)})
            return False
        return True

    def forget_all_but(self, live: Container[str]) -> None:
        """What was told of pods that are no more."""
        self._said = {mark for mark in self._said if mark[0] in live}
