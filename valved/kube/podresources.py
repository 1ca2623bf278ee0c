"""Asks the kubelet which container holds which devices (pod resources API, v1)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import grpc.aio
from valve.kube import podresources_pb2 as pb
from valve.kube import podresources_pb2_grpc as rpc

from valved.paths import grpc_address

# A List takes 2 to 4 ms on a loaded node; a kubelet that needs longer is restarting.
TIMEOUT_S = 2.0
MAX_ANSWER_BYTES = 16 * 1024 * 1024  # what the kubelet's own clients allow


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldDevices:
    """Devices of one resource in one container. `driver` claims of DRA come as a resource of the driver's name."""

    namespace: str
    pod: str
    container: str
    resource: str
    ids: tuple[str, ...]
    is_claimed: bool = False  # by a ResourceClaim: the resource is a driver, the ids are POOL/DEVICE


class Holdings(Protocol):
    async def list(self) -> tuple[HeldDevices, ...]:
        """Raises OSError when the kubelet does not answer."""
        ...


class KubeletHoldings:
    """Asks the kubelet. Each question opens a channel, because a restarted kubelet has another socket file."""

    def __init__(self, socket: Path) -> None:
        self._target = grpc_address(socket)

    async def list(self) -> tuple[HeldDevices, ...]:
        options = [("grpc.max_receive_message_length", MAX_ANSWER_BYTES), ("grpc.enable_http_proxy", 0)]
        try:
            async with grpc.aio.insecure_channel(self._target, options=options) as channel:
                lister = rpc.PodResourcesListerStub(channel)  # type: ignore[no-untyped-call]
                answer = await lister.List(pb.ListPodResourcesRequest(), timeout=TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise OSError(f"pod resources: {error.code().name}: {error.details()}") from error
        return tuple(_read(answer))


def _read(answer: pb.ListPodResourcesResponse) -> Iterator[HeldDevices]:
    """One entry per container and resource. (The kubelet lists each device of a resource on its own.)"""
    for pod in answer.pod_resources:
        for container in pod.containers:
            ids: dict[tuple[str, bool], list[str]] = {}
            for devices in container.devices:
                ids.setdefault((devices.resource_name, False), []).extend(devices.device_ids)
            for claim in container.dynamic_resources:
                for given in claim.claim_resources:
                    ids.setdefault((given.driver_name, True), []).append(f"{given.pool_name}/{given.device_name}")
            for (resource, is_claimed), held in ids.items():
                yield HeldDevices(
                    namespace=pod.namespace,
                    pod=pod.name,
                    container=container.name,
                    resource=resource,
                    ids=tuple(sorted(held)),
                    is_claimed=is_claimed,
                )
