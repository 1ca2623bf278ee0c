"""Leader election for the controller: one Lease, taken when it is free or its holder has stopped renewing.

As in client-go a lease counts as expired when *we* saw no renewal for its duration: clocks of nodes are not
compared."""

import asyncio
import logging
import math
from collections.abc import Awaitable
from datetime import datetime, timezone

from valve_kube.client import ApiError, Json, KubeClient, Unreachable

log = logging.getLogger(__name__)

DURATION_S = 15.0  # renewed after a third of it, ours until two thirds have passed


class Lease:
    def __init__(
        self, client: KubeClient, namespace: str, name: str, identity: str, duration_s: float = DURATION_S
    ) -> None:
        self._client = client
        self._collection = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        self._name = name
        self._identity = identity
        self._duration_s = duration_s
        self._seen: tuple[str, str] = ("", "")
        self._seen_at_s = 0.0
        self._held_until_s = float("-inf")

    @property
    def held(self) -> bool:
        """False early rather than late: our own right ends before another process may take it."""
        return asyncio.get_running_loop().time() < self._held_until_s

    async def run(self) -> None:
        while True:
            try:
                await self._try()
            except (ApiError, Unreachable) as error:
                log.warning("lease not renewed", extra={"lease": self._name, "error": str(error)})
            await asyncio.sleep(self._duration_s / 3)

    async def while_held(self, act: Awaitable[None]) -> None:
        """Until it is done or the lease is ours no more, whichever comes first: what it began while it led must not go
        on beside the next leader."""
        task = asyncio.ensure_future(act)
        loop = asyncio.get_running_loop()
        try:
            while not task.done() and self.held:
                await asyncio.wait({task}, timeout=self._held_until_s - loop.time())
            if not task.done():
                log.warning("round ended: the lease is not ours any more", extra={"lease": self._name})
                return
        finally:
            while not task.done():  # before Python 3.12 wait_for swallows a cancellation that meets its answer
                task.cancel()
                await asyncio.wait({task}, timeout=0.1)
        task.result()

    async def _try(self) -> None:
        now_s = asyncio.get_running_loop().time()
        try:
            lease = await self._client.request("GET", f"{self._collection}/{self._name}")
        except ApiError as error:
            if error.status != 404:
                raise
            await self._write("POST", self._collection, {"metadata": {"name": self._name}}, now_s)
            return
        spec = lease.get("spec") or {}
        renewed = (spec.get("holderIdentity") or "", spec.get("renewTime") or "")
        if renewed != self._seen:
            self._seen, self._seen_at_s = renewed, now_s
        ours = renewed[0] in ("", self._identity)
        if ours or now_s - self._seen_at_s > self._duration_s:
            # The resourceVersion in the body makes this fail for all but one of several candidates.
            await self._write("PUT", f"{self._collection}/{self._name}", lease, now_s)

    async def _write(self, method: str, path: str, lease: Json, now_s: float) -> None:
        renewed = datetime.now(timezone.utc).isoformat(timespec="microseconds").replace("+00:00", "Z")
        spec = {
            "holderIdentity": self._identity,
            "leaseDurationSeconds": math.ceil(self._duration_s),
            "renewTime": renewed,
        }
        body = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", **lease, "spec": spec}
        await self._client.request(method, path, body=body)
        if not self.held:
            log.info("leads", extra={"lease": self._name, "identity": self._identity})
        self._held_until_s = now_s + self._duration_s * 2 / 3
