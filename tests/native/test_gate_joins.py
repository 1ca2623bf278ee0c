"""What one more channel costs valved when there are many already."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from gates import Rig, compile_c
from instructions import instructions_of
from msgspec.structs import replace
from native_world import NativeWorld

from valved.abi.link import Channel, LinkType, RmClient
from valved.model.ids import ClientId, GpuIndex


class Joining:
    def __init__(self, native: NativeWorld) -> None:
        self.native, self.world = native, native.world

    def process(self, channels: int) -> tuple[ClientId, Channel, RmClient]:
        client, found = self.world.offline(gpus=()), self.native.allocate()
        self.native.tell(client, *found)
        self.more(client, found[0], 1, channels)
        return client, *found

    def more(self, client: ClientId, like: Channel, start: int, end: int) -> None:
        for handle in range(like.h_channel + start, like.h_channel + end):
            cid = self.native.rig.driver.lib.fake_channel(like.h_client, handle, 0)
            channel = replace(like, h_channel=handle, cid=cid)
            self.world.register.handle(client, self.world.packet(LinkType.CHANNEL_ADD, channel), [])

    def cost(self, processes: int, channels: int) -> int:
        """Of one more channel of a process that has `channels`, beside as many others."""
        for _ in range(processes - 1):
            self.process(channels)
        client, like, _ = self.process(channels)
        return instructions_of(lambda: self.more(client, like, channels, channels + 1))


def test_a_channel_that_comes_never_costs_more_where_many_are(rig: Rig, tmp_path: Path) -> None:
    native = NativeWorld(tmp_path, rig)
    joining = Joining(native)
    native.online()
    few, many = joining.cost(2, 4), joining.cost(14, 24)

    assert native.world.gating.gpus[GpuIndex(0)].channels == 2 * 4 + 14 * 24 + 2
    assert many < 1.2 * few
    native.close()


@pytest.fixture(scope="module")
def work(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, int], int]:
    """Basic blocks that the gate's threads run to replace the plan of so many processes of so many channels."""
    program = tmp_path_factory.mktemp("work") / "work"
    native = sorted((repository / "valved/native").rglob("*.c"))
    ours = [repository / "tests/native" / name for name in ("work.c", "fake_rm.c")]
    compile_c(program, native + ours, "-O1", "-fsanitize-coverage=trace-pc")

    def run(processes: int, channels: int) -> int:
        environment = {**os.environ, "LD_PRELOAD": ""}
        command = [program, str(processes), str(channels)]
        return int(subprocess.run(command, capture_output=True, check=True, env=environment).stdout)

    return run


def test_a_plan_of_many_processes_never_costs_its_issuer_more_than_one_of_one_process(
    work: Callable[[int, int], int],
) -> None:
    """An edge waits for a plan that comes meanwhile."""
    assert work(128, 8) < 1.5 * work(1, 1024)


def test_a_report_of_the_ways_never_costs_more_where_many_channels_are(rig: Rig, tmp_path: Path) -> None:
    """Each stop of a service with several GPUs asks for it."""
    native = NativeWorld(tmp_path, rig)
    joining = Joining(native)
    joining.process(4)
    few = instructions_of(lambda: rig.gate.channels.reach(GpuIndex(0)))
    joining.cost(10, 24)
    many = instructions_of(lambda: rig.gate.channels.reach(GpuIndex(0)))

    assert many <= few
    native.close()
