"""A stand-in for NVIDIA's device plugin: registers nvidia.com/gpu with the node's UUIDs, hands whole GPUs out.

    python -m valve_tools.cluster.gpuplugin UUID...

To the kubelet, and to programs that read its pod resources, it looks like the real one in its default strategy,
`envvar`.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from valve.kube import deviceplugin_pb2 as pb
from valve.kube import deviceplugin_pb2_grpc as rpc

from valved.kube.deviceplugin import Plugin

FOLDER = Path("/var/lib/kubelet/device-plugins")
RESOURCE = "nvidia.com/gpu"


class WholeGpus(rpc.DevicePluginServicer):
    """Method names are the API's."""

    def __init__(self, uuids: Sequence[str]) -> None:
        self._uuids = uuids

    async def GetDevicePluginOptions(self, request: pb.Empty, context: Any) -> pb.DevicePluginOptions:
        return pb.DevicePluginOptions()

    async def ListAndWatch(self, request: pb.Empty, context: Any) -> AsyncIterator[pb.ListAndWatchResponse]:
        yield pb.ListAndWatchResponse(devices=[pb.Device(ID=uuid, health="Healthy") for uuid in self._uuids])
        await asyncio.Event().wait()

    async def Allocate(self, request: pb.AllocateRequest, context: Any) -> pb.AllocateResponse:
        answers = [
            pb.ContainerAllocateResponse(envs={"NVIDIA_VISIBLE_DEVICES": ",".join(sorted(one.devices_ids))})
            for one in request.container_requests
        ]
        return pb.AllocateResponse(container_responses=answers)


def main() -> None:
    logging.basicConfig(level=logging.INFO)
    asyncio.run(Plugin(FOLDER, RESOURCE, WholeGpus(sys.argv[1:])).run())


if __name__ == "__main__":
    main()
