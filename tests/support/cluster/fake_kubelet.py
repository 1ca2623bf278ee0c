"""The kubelet's side of the device plugin and pod resources APIs: real gRPC over real unix sockets, in a folder."""

from __future__ import annotations

import asyncio
import contextlib

import grpc.aio
from valve.kube import deviceplugin_pb2 as pb
from valve.kube import deviceplugin_pb2_grpc as rpc
from valve.kube import podresources_pb2 as resources
from valve.kube import podresources_pb2_grpc as resources_rpc

from valved.paths import grpc_address

PATIENCE_S = 200.0  # ends only a hung test


class FakeKubelet(rpc.RegistrationServicer, resources_rpc.PodResourcesListerServicer):
    """`start` empties the folder, as a kubelet does; `devices` is what the plugin that registered last offers."""

    def __init__(self, folder):
        self.plugins, self.pod_resources = folder / "dp", folder / "pr/k.sock"  # a path has 107 characters
        self.registered = []
        self.devices = {}
        self.streams_ended = 0
        self.claimed = []  # (namespace, pod, container, driver, device)
        self.held = []  # (namespace, pod, container, resource, ids)
        self.lists = 0
        self._server = None
        self._following = None
        self._channel = None

    async def start(self):
        self.plugins.mkdir(parents=True, exist_ok=True)
        self.pod_resources.parent.mkdir(parents=True, exist_ok=True)
        for path in [*self.plugins.iterdir(), self.pod_resources]:
            path.unlink(missing_ok=True)
        self.devices = {}
        self._server = grpc.aio.server()
        rpc.add_RegistrationServicer_to_server(self, self._server)
        resources_rpc.add_PodResourcesListerServicer_to_server(self, self._server)
        self._server.add_insecure_port(grpc_address(self.plugins / "kubelet.sock"))
        self._server.add_insecure_port(grpc_address(self.pod_resources))
        await self._server.start()

    async def stop(self):
        if self._following is not None:
            self._following.cancel()
            await asyncio.gather(self._following, return_exceptions=True)
            await self._channel.close()
            self._following = None
        await self._server.stop(grace=None)

    async def Register(self, request, context):
        self.registered.append(request)
        if self._following is not None:  # the same resource again replaces the endpoint
            self._following.cancel()
            await self._channel.close()
        self._channel = grpc.aio.insecure_channel(grpc_address(self.plugins / request.endpoint))
        self._following = asyncio.ensure_future(self._follow())
        return pb.Empty()

    async def List(self, request, context):
        self.lists += 1
        answer = resources.ListPodResourcesResponse()
        for namespace, pod, container, resource, ids in self.held:
            entry = answer.pod_resources.add(namespace=namespace, name=pod).containers.add(name=container)
            for one in ids:  # the kubelet lists every device on its own
                entry.devices.add(resource_name=resource, device_ids=[one])
        for namespace, pod, container, driver, device in self.claimed:
            entry = answer.pod_resources.add(namespace=namespace, name=pod).containers.add(name=container)
            given = entry.dynamic_resources.add(claim_name="c").claim_resources.add()
            given.driver_name, given.pool_name, given.device_name = driver, "node-1", device
        return answer

    async def _follow(self):
        with contextlib.suppress(grpc.aio.AioRpcError):
            async for answer in self.plugin.ListAndWatch(pb.Empty(), wait_for_ready=True):
                self.devices = {device.ID: device.health for device in answer.devices}
        self.devices = dict.fromkeys(self.devices, "Unhealthy")
        self.streams_ended += 1

    @property
    def plugin(self):
        return rpc.DevicePluginStub(self._channel)

    @property
    def healthy(self):
        return sorted(slot for slot, health in self.devices.items() if health == "Healthy")

    async def allocate(self, *ids):
        request = pb.AllocateRequest(container_requests=[pb.ContainerAllocateRequest(devices_ids=ids)])
        return (await self.plugin.Allocate(request, timeout=PATIENCE_S)).container_responses[0]

    async def pre_start(self, *ids):
        """None when the container may start, else what the kubelet would put into its event."""
        try:
            await self.plugin.PreStartContainer(pb.PreStartContainerRequest(devices_ids=ids), timeout=PATIENCE_S)
        except grpc.aio.AioRpcError as error:
            return error.details()
        return None

    async def prefer(self, available, size, must=()):
        request = pb.PreferredAllocationRequest(
            container_requests=[
                pb.ContainerPreferredAllocationRequest(
                    available_deviceIDs=available, must_include_deviceIDs=must, allocation_size=size
                )
            ]
        )
        answer = await self.plugin.GetPreferredAllocation(request, timeout=PATIENCE_S)
        return list(answer.container_responses[0].deviceIDs)
