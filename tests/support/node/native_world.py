"""The services of a node over the native gate and a fake driver: what native stamps really make of the books."""

from __future__ import annotations

import os
import time
from pathlib import Path

from gates import Launcher, Rig, wait_until
from lent_fds import lend
from node_world import World
from valve_tools.bench import region_pages
from virtual import VirtualClock

from valved.abi.link import Channel, LinkType, RmClient
from valved.model.ids import ClientId


class NativeWorld:
    """A `World` whose gate is the rig's. Its clock follows the real one, for native threads know no other."""

    def __init__(self, folder: Path, rig: Rig, **more) -> None:
        self.rig = rig
        self.world = World(folder, gate=rig.gate, clock=VirtualClock(time.monotonic_ns()), **more)
        self._pages: list[region_pages.Page] = []
        self._launchers: list[Launcher] = []

    def pump(self) -> None:
        """What the event loop would do now: stamps, then timers. The watchers of all services live."""
        for launcher in self._launchers:
            launcher.region["watcher_ns"] = time.monotonic_ns()
        self.world.gating.drain()
        self.world.clock.advance(max(0, time.monotonic_ns() - self.world.clock.now_ns()))

    def until(self, condition, what: str) -> None:
        wait_until(lambda: (self.pump(), condition())[1], what)

    def allocate(self, gpu: int = 0) -> tuple[Channel, RmClient]:
        """A channel that the driver has, and nobody has told of."""
        driver = self.rig.driver
        fd, subdevice = driver.ffi.new("int *"), driver.ffi.new("uint32_t *")
        h_client = driver.lib.fake_client(fd, subdevice, gpu)
        os.close(fd[0])
        cid = driver.lib.fake_channel(h_client, 0x5C000010, gpu)
        channel = Channel(
            gpu_uuid=bytes(16),
            device_instance=gpu,
            h_client=h_client,
            h_channel=0x5C000010,
            cid=cid,
            h_tsg=1,
            engine=1,
            compute=True,
        )
        owner = RmClient(
            gpu_uuid=bytes(16), device_instance=gpu, h_client=h_client, h_device=6, h_subdevice=subdevice[0], has_fd=1
        )
        return channel, owner

    def tell(self, client: ClientId, channel: Channel, owner: RmClient) -> tuple[int, int]:
        self.world.register.handle(client, self.world.packet(LinkType.RM_CLIENT, owner), [lend()])
        self.world.register.handle(client, self.world.packet(LinkType.CHANNEL_ADD, channel), [])
        return channel.h_client, channel.h_channel

    def _channel(self, client: ClientId, gpu: int) -> tuple[int, int]:
        return self.tell(client, *self.allocate(gpu))

    def offline(self, gpu: int = 0) -> tuple[ClientId, tuple[int, int]]:
        """A process with one channel: its client id and the channel."""
        client = self.world.offline(gpus=())
        return client, self._channel(client, gpu)

    def online(self, gpu: int = 0) -> Launcher:
        client = self.world.online(gpus=())
        _, _, _, fds = self.world.connections[client].sent[0]
        launcher = Launcher.__new__(Launcher)
        launcher.fds = self.rig.gate._clients[client].fds
        launcher.client = client
        launcher.control, launcher.region = region_pages.control_page(fds[0]), region_pages.region_page(fds[1])
        launcher.submitted = 0
        region_pages.fill_region(launcher.region)
        self._pages += [launcher.control, launcher.region]
        self._launchers.append(launcher)
        self._channel(client, gpu)
        return launcher

    def is_on(self, channel: tuple[int, int]) -> bool:
        return bool(self.rig.driver.lib.fake_is_on(*channel) == 1)

    def close(self) -> None:
        for page in self._pages:
            page.close()
