"""The device plugin: slots of `harvested-gpu` to the kubelet, the shim and the GPUs to the container.

Lives as long as its kubelet: one that restarts empties the folder of sockets, so we look at the files every second,
serve anew and register again. Stopping closes the stream, and the kubelet counts no slot of ours from then on; what
runs keeps running.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio
from valve.kube import deviceplugin_pb2 as pb
from valve.kube import deviceplugin_pb2_grpc as rpc
from valve_kube import names
from valve_kube.injection import InjectionSettings

from valved.kube import cdi, slots
from valved.kube.shimfiles import LOADER_LIST
from valved.kube.starter import MayNotStart, Starter
from valved.paths import grpc_address

log = logging.getLogger("valved.kube")

API_VERSION = "v1beta1"
KUBELET_SOCKET = "kubelet.sock"
LOOK_S = 1.0  # how long a kubelet that restarted waits for us
REGISTER_S = 5.0


class Slots:
    """What is offered, and the streams that wait for a change of it."""

    def __init__(self, count: int) -> None:
        self.ids = slots.slot_ids(count)
        self.health: Mapping[str, bool] = dict.fromkeys(self.ids, False)
        self._changed = asyncio.Event()
        self._released: dict[str, int] = {}
        self._releases = 0
        self._in_use: frozenset[str] = frozenset()

    def update(self, in_use: Collection[str], harvestable: int) -> None:
        for slot in sorted(self._in_use.difference(in_use)):
            self._releases += 1
            self._released[slot] = self._releases
        self._in_use = frozenset(in_use)
        health = slots.health(self.ids, in_use, harvestable)
        if health != self.health:
            self.health = health
            self._changed.set()
            self._changed = asyncio.Event()

    async def follow(self) -> AsyncIterator[Mapping[str, bool]]:
        """What is offered now, then every change. A reader that is slow misses states, never the last one."""
        sent: Mapping[str, bool] | None = None
        while True:
            changed = self._changed
            if self.health != sent:
                sent = self.health
                yield sent
            else:
                await changed.wait()

    def prefer(self, available: Collection[str], must: Collection[str], size: int) -> tuple[str, ...]:
        return slots.prefer(list(available), list(must), size, self._released)


class Servicer(rpc.DevicePluginServicer):
    """Method names are the API's."""

    def __init__(self, offered: Slots, starter: Starter, settings: InjectionSettings) -> None:
        self._offered = offered
        self._starter = starter
        self._settings = settings

    async def GetDevicePluginOptions(self, request: pb.Empty, context: Any) -> pb.DevicePluginOptions:
        return pb.DevicePluginOptions(pre_start_required=True, get_preferred_allocation_available=True)

    async def ListAndWatch(self, request: pb.Empty, context: Any) -> AsyncIterator[pb.ListAndWatchResponse]:
        async for health in self._offered.follow():
            words = {slot: "Healthy" if is_healthy else "Unhealthy" for slot, is_healthy in health.items()}
            yield pb.ListAndWatchResponse(devices=[pb.Device(ID=slot, health=word) for slot, word in words.items()])

    async def GetPreferredAllocation(
        self, request: pb.PreferredAllocationRequest, context: Any
    ) -> pb.PreferredAllocationResponse:
        answers = []
        for one in request.container_requests:
            chosen = self._offered.prefer(one.available_deviceIDs, one.must_include_deviceIDs, one.allocation_size)
            answers.append(pb.ContainerPreferredAllocationResponse(deviceIDs=chosen))
        return pb.PreferredAllocationResponse(container_responses=answers)

    async def Allocate(self, request: pb.AllocateRequest, context: Any) -> pb.AllocateResponse:
        answers = [self._allocation(one.devices_ids) for one in request.container_requests]
        return pb.AllocateResponse(container_responses=answers)

    def _allocation(self, ids: Collection[str]) -> pb.ContainerAllocateResponse:
        """No GPU yet: which ones is in the pod. The shim comes by mounts, which no pod spec needs to allow."""
        settings = self._settings
        # The loader's own list, beside LD_PRELOAD: a program that clears its environment keeps the shim.
        loader = (f"{settings.shim_folder}/{LOADER_LIST}", f"/etc/{LOADER_LIST}")
        mounts = [
            pb.Mount(container_path=path, host_path=source, read_only=True)
            for source, path in (*settings.mounts, loader)
        ]
        devices = [pb.CDIDevice(name=cdi.device(slot)) for slot in sorted(ids)]
        return pb.ContainerAllocateResponse(
            # VALVE_REQUIRE: a process of offline work that cannot register ends instead of running ungated.
            envs={"LD_PRELOAD": settings.preload, "VALVE_ROLE": names.OFFLINE, "VALVE_REQUIRE": "1"},
            mounts=mounts,
            cdi_devices=devices if self._starter.cdi_folder is not None else [],
        )

    async def PreStartContainer(
        self, request: pb.PreStartContainerRequest, context: Any
    ) -> pb.PreStartContainerResponse:
        try:
            pod = await self._starter.start(request.devices_ids)
        except MayNotStart as reason:
            log.warning("offline container not started", extra={"facts": {"reason": str(reason)}})
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"valve: {reason}")
            raise
        log.info("offline container starts", extra={"facts": {"pod": pod.key, "gpus": ",".join(pod.gpus)}})
        return pb.PreStartContainerResponse()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Files:
    """Identities of both sockets: a socket made anew is another file."""

    kubelet: tuple[int, int] | None
    ours: tuple[int, int] | None


class Plugin:
    """Serves one resource and stays registered until cancelled."""

    def __init__(
        self, folder: Path, resource: str, servicer: rpc.DevicePluginServicer, *, look_s: float = LOOK_S
    ) -> None:
        self.is_registered = False
        self._folder = folder
        self._resource = resource
        self._servicer = servicer
        self._look_s = look_s
        # Its own name: while a successor waits, both sockets lie in the folder.
        self._socket = folder / f"{resource.rpartition('/')[2]}-{os.getpid()}.sock"

    async def run(self) -> None:
        said = ""
        while True:
            server = grpc.aio.server()
            rpc.add_DevicePluginServicer_to_server(self._servicer, server)  # type: ignore[no-untyped-call]
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
                self._socket.unlink(missing_ok=True)
                server.add_insecure_port(grpc_address(self._socket))
                await server.start()
                seen = self._files()
                await self._register()
                self.is_registered = True
                log.info("registered with the kubelet", extra={"facts": {"resource": self._resource}})
                await self._until_changed(seen)
                log.info("the kubelet began anew")
                said = ""
            except (OSError, RuntimeError, grpc.aio.AioRpcError) as error:
                if _words(error) != said:  # once, not every second of a long absence
                    said = _words(error)
                    log.info("kubelet not reached", extra={"facts": {"error": said}})
            finally:
                self.is_registered = False
                await server.stop(grace=None)
                self._socket.unlink(missing_ok=True)
            await asyncio.sleep(self._look_s)

    async def _register(self) -> None:
        request = pb.RegisterRequest(
            version=API_VERSION,
            endpoint=self._socket.name,
            resource_name=self._resource,
            options=await self._servicer.GetDevicePluginOptions(pb.Empty(), None),  # type: ignore[no-untyped-call]
        )
        channel_options = [("grpc.enable_http_proxy", 0)]
        target = grpc_address(self._folder / KUBELET_SOCKET)
        async with grpc.aio.insecure_channel(target, options=channel_options) as channel:
            await rpc.RegistrationStub(channel).Register(request, timeout=REGISTER_S)  # type: ignore[no-untyped-call]

    async def _until_changed(self, seen: _Files) -> None:
        while self._files() == seen:
            await asyncio.sleep(self._look_s)

    def _files(self) -> _Files:
        return _Files(kubelet=_identity(self._folder / KUBELET_SOCKET), ours=_identity(self._socket))


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_ctime_ns


def _words(error: Exception) -> str:
    return str(error.details()) if isinstance(error, grpc.aio.AioRpcError) else str(error)
