"""Says which GPUs the pods of this node hold by ResourceClaims (DRA), from allocations and the driver's ResourceSlices.

The scheduler writes an allocation before it binds the pod, and it stays as it is while a pod uses the claim; so each
claim is read once per pod, and asked for again until the API server has told it. A result names a driver, a pool and a
device; the slices of this node give the UUID. What cannot be told is unknown, and a pod that may hold it guards every
GPU: a service must never run unheard because an answer is late or refused. Nothing waits for a read.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from valve_kube import names
from valve_kube.client import ApiError, KubeClient, Unreachable
from valve_kube.errors import SchedulerError
from valve_kube.reflector import Reflector, Sink

from valved.kube.pods import Pod
from valved.node.upkeep import end

log = logging.getLogger("valved.kube")

Json = Mapping[str, Any]
API = "/apis/resource.k8s.io/v1"  # Kubernetes 1.34 and newer
ASK_AGAIN_S = 600.0  # whether an upgrade has brought the API
AGAIN_S, MOST_AGAIN_S = 1.0, 30.0  # after a claim that could not be told, twice as long each time
UUIDS = ("parentUUID", "uuid")  # a part of a GPU (MIG) has both, and only its parent is a card


@dataclass(frozen=True, slots=True, kw_only=True)
class DraDevice:
    """One device of a DRA driver, as its ResourceSlices name it."""

    driver: str
    pool: str
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Claimed:
    """What a container holds by one claim. `devices` None: not known yet."""

    container: str
    devices: frozenset[DraDevice] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """What a claim got. A device that is only watched (adminAccess) is not held."""

    held: frozenset[DraDevice]
    watched: frozenset[DraDevice]


class Claims:
    def __init__(
        self,
        client: KubeClient,
        node: str,
        *,
        again_s: float = AGAIN_S,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        """`changed`: a claim came to be known."""
        self._client = client
        self._changed = changed
        self._again_s = again_s
        self._results: dict[tuple[str, str], Allocation] = {}  # (pod UID, claim)
        self._reads: dict[tuple[str, str], asyncio.Task[None]] = {}  # those that are under way
        self._slices: dict[str, tuple[tuple[str, str, int], dict[DraDevice, str]]] = {}  # by name: pool, devices
        self.slices = Reflector(
            client,
            f"{API}/resourceslices",
            Sink(replace=self._replace, put=self._put, drop=self._drop),
            query={"fieldSelector": f"spec.nodeName={node}"},
        )

    async def run(self) -> None:
        """Follow the slices until cancelled. A cluster without the API has no claims."""
        try:
            while not await self._is_served():
                await asyncio.sleep(ASK_AGAIN_S)
            await self.slices.run()
        finally:
            reads, self._reads = self._reads, {}
            await end(reads.values())

    async def _is_served(self) -> bool:
        while True:
            try:
                await self._client.request("GET", API)
                return True
            except ApiError as error:
                if error.status == 404:
                    return False
            except Unreachable as error:
                log.info("ResourceSlices not read", extra={"facts": {"error": str(error)}})
            await asyncio.sleep(1.0)

    def want(self, pods: Iterable[Pod]) -> None:
        """Have every claim of these pods read, each by a task of its own; forget those of pods that went."""
        wanted = {(pod.uid, claim): pod.namespace for pod in pods for claim in pod.claims}
        self._results = {key: found for key, found in self._results.items() if key in wanted}
        for key in self._reads.keys() - wanted.keys():
            self._reads.pop(key).cancel()
        for key in wanted.keys() - self._results.keys() - self._reads.keys():
            self._reads[key] = asyncio.ensure_future(self._read(key, wanted[key]))

    async def _read(self, key: tuple[str, str], namespace: str) -> None:
        again_s = self._again_s
        try:
            while (found := await self._allocation(namespace, key[1])) is None:
                await asyncio.sleep(again_s)
                again_s = min(2 * again_s, MOST_AGAIN_S)
            self._results[key] = found
            self._changed()
        finally:
            if self._reads.get(key) is asyncio.current_task():
                del self._reads[key]

    async def _allocation(self, namespace: str, claim: str) -> Allocation | None:
        """None: unknown. A refusal says nothing about what the pod holds."""
        try:
            return allocated(await self._client.request("GET", f"{API}/namespaces/{namespace}/resourceclaims/{claim}"))
        except SchedulerError as error:
            log.warning("ResourceClaim not read", extra={"facts": {"claim": claim, "error": str(error)}})
            return None

    def unread(self) -> bool:
        """A claim that is wanted could not be told yet."""
        return bool(self._reads)

    def held_by(self, pod: Pod) -> Iterable[Claimed]:
        """Per container and claim, GPUs only."""
        for claim, containers in pod.claims.items():
            found = self._results.get((pod.uid, claim))
            devices = found.held if found is not None else None
            if devices is None or any(device.driver in names.ONLINE_RESOURCES for device in devices):
                for container in sorted(containers):
                    yield Claimed(container=container, devices=devices)

    def uuid(self, device: DraDevice) -> str:
        """Empty while no slice names the device. Of a pool only the newest generation counts."""
        found = [
            (pool[2], devices[device])
            for pool, devices in self._slices.values()
            if pool[:2] == (device.driver, device.pool) and device in devices
        ]
        return max(found, default=(0, ""))[1]

    def named(self, driver: str, text: str) -> str:
        """The same of POOL/DEVICE, as the kubelet says it."""
        return self.uuid(_told(driver, text))

    def is_watched(self, pod: Pod, driver: str, text: str) -> bool:
        """The pod has this POOL/DEVICE by adminAccess alone: the kubelet lists it, and the pod does not hold it."""
        results = [found for claim in pod.claims if (found := self._results.get((pod.uid, claim))) is not None]
        device = _told(driver, text)
        return any(device in one.watched for one in results) and not any(device in one.held for one in results)

    # From the API server's watch

    def _replace(self, items: list[Any]) -> None:
        self._slices.clear()
        for item in items:
            self._put(item)

    def _put(self, item: Any) -> None:
        self._slices[item["metadata"]["name"]] = read_slice(item.get("spec") or {})

    def _drop(self, item: Any) -> None:
        self._slices.pop(item["metadata"]["name"], None)


def _told(driver: str, text: str) -> DraDevice:
    pool, _, name = text.rpartition("/")
    return DraDevice(driver=driver, pool=pool, name=name)


def read_slice(spec: Json) -> tuple[tuple[str, str, int], dict[DraDevice, str]]:
    """(driver, pool, generation) and the UUIDs of the devices that have one."""
    driver, pool = str(spec.get("driver", "")), spec.get("pool") or {}
    name = str(pool.get("name", ""))
    devices = {
        DraDevice(driver=driver, pool=name, name=str(device.get("name", ""))): uuid
        for device in spec.get("devices") or []
        if (uuid := _uuid_of(device, driver))
    }
    return (driver, name, int(pool.get("generation", 0))), devices


def _uuid_of(device: Json, driver: str) -> str:
    """Attributes may be written with the driver's name in front."""
    attributes = device.get("attributes") or {}
    for key in UUIDS:
        said = attributes.get(key) or attributes.get(f"{driver}/{key}") or {}
        if said.get("string"):
            return str(said["string"])
    return ""


def allocated(claim: Json) -> Allocation | None:
    """What its allocation names; None while there is none."""
    allocation = (claim.get("status") or {}).get("allocation")
    if allocation is None:
        return None
    results = (allocation.get("devices") or {}).get("results") or []
    return Allocation(
        held=frozenset(_device(one) for one in results if not one.get("adminAccess")),
        watched=frozenset(_device(one) for one in results if one.get("adminAccess")),
    )


def _device(result: Json) -> DraDevice:
    return DraDevice(driver=str(result.get("driver")), pool=str(result.get("pool")), name=str(result.get("device")))
