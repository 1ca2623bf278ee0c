"""Says which GPUs the pods of this node hold by ResourceClaims (DRA), from allocations and the driver's ResourceSlices.

The scheduler writes an allocation before it binds the pod, and it stays as it is while a pod uses the claim; so each
claim is read once per pod. A result names a driver, a pool and a device; the slices of this node give the UUID. What
cannot be told is unknown, and whoever may hold it guards every GPU: a service must never run unheard because an
answer is late.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from valve_kube import names
from valve_kube.client import ApiError, KubeClient, Unreachable
from valve_kube.reflector import Reflector, Sink

from valved.kube.pods import Pod

log = logging.getLogger("valved.kube")

Json = Mapping[str, Any]
API = "/apis/resource.k8s.io/v1"  # Kubernetes 1.34 and newer
ASK_AGAIN_S = 600.0  # whether an upgrade has brought the API
UUIDS = ("uuid", "parentUUID")  # of a GPU; of a part of one (MIG)


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One device of a DRA driver, as its ResourceSlices name it."""

    driver: str
    pool: str
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Claimed:
    """What a container holds by one claim. `devices` None: nobody could say yet."""

    container: str
    devices: frozenset[Device] | None


class Claims:
    def __init__(self, client: KubeClient, node: str) -> None:
        self._client = client
        self._results: dict[tuple[str, str], frozenset[Device]] = {}  # (pod UID, claim)
        self._slices: dict[str, tuple[tuple[str, str, int], dict[Device, str]]] = {}  # by name: its pool, its devices
        self.slices = Reflector(
            client,
            f"{API}/resourceslices",
            Sink(replace=self._replace, put=self._put, drop=self._drop),
            query={"fieldSelector": f"spec.nodeName={node}"},
        )

    async def run(self) -> None:
        """Follow the slices until cancelled. A cluster without the API has no claims."""
        while not await self._is_served():
            await asyncio.sleep(ASK_AGAIN_S)
        await self.slices.run()

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

    async def read(self, pods: Iterable[Pod]) -> None:
        """Have the allocation of every claim of these pods; forget those of pods that went."""
        wanted = {(pod.uid, claim): pod for pod in pods for claim in pod.claims}
        self._results = {key: found for key, found in self._results.items() if key in wanted}
        for (uid, claim), pod in wanted.items():
            if (uid, claim) not in self._results:
                found = await self._devices_of(pod.namespace, claim)
                if found is not None:
                    self._results[uid, claim] = found

    async def _devices_of(self, namespace: str, claim: str) -> frozenset[Device] | None:
        try:
            found = await self._client.request("GET", f"{API}/namespaces/{namespace}/resourceclaims/{claim}")
        except Unreachable:
            return None
        except ApiError as error:
            if error.status not in (403, 404):
                return None
            log.warning("ResourceClaim not read", extra={"facts": {"claim": claim, "error": str(error)}})
            return frozenset()
        return allocated(found)

    def held_by(self, pod: Pod) -> Iterable[Claimed]:
        """Per container and claim, GPUs only."""
        for claim, containers in pod.claims.items():
            devices = self._results.get((pod.uid, claim))
            if devices is None or any(device.driver in names.ONLINE_RESOURCES for device in devices):
                for container in sorted(containers):
                    yield Claimed(container=container, devices=devices)

    def uuid(self, device: Device) -> str:
        """Empty while no slice names the device. Of a pool only the newest generation counts."""
        found = [
            (pool[2], devices[device])
            for pool, devices in self._slices.values()
            if pool[:2] == (device.driver, device.pool) and device in devices
        ]
        return max(found, default=(0, ""))[1]

    def named(self, driver: str, text: str) -> str:
        """The same of POOL/DEVICE, as the kubelet says it."""
        pool, _, name = text.rpartition("/")
        return self.uuid(Device(driver=driver, pool=pool, name=name))

    # From the API server's watch

    def _replace(self, items: list[Any]) -> None:
        self._slices.clear()
        for item in items:
            self._put(item)

    def _put(self, item: Any) -> None:
        self._slices[item["metadata"]["name"]] = read_slice(item.get("spec") or {})

    def _drop(self, item: Any) -> None:
        self._slices.pop(item["metadata"]["name"], None)


def read_slice(spec: Json) -> tuple[tuple[str, str, int], dict[Device, str]]:
    """(driver, pool, generation) and the UUIDs of the devices that have one."""
    driver, pool = str(spec.get("driver", "")), spec.get("pool") or {}
    name = str(pool.get("name", ""))
    devices = {
        Device(driver=driver, pool=name, name=str(device.get("name", ""))): uuid
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


def allocated(claim: Json) -> frozenset[Device] | None:
    """The devices of an allocation; None while there is none. What is only watched (adminAccess) nobody holds."""
    allocation = (claim.get("status") or {}).get("allocation")
    if allocation is None:
        return None
    results = (allocation.get("devices") or {}).get("results") or []
    return frozenset(
        Device(driver=str(one.get("driver")), pool=str(one.get("pool")), name=str(one.get("device")))
        for one in results
        if not one.get("adminAccess")
    )
