"""What one more channel costs valved when there are many already."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

from gates import Rig
from native_world import NativeWorld

from valved.abi.link import Channel, LinkType, RmClient
from valved.model.ids import ClientId, GpuIndex


def steps(call: Callable[[], object]) -> int:
    """Python instructions that it takes: what load does not change."""
    count = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(None)
    return count


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
        return steps(lambda: self.more(client, like, channels, channels + 1))


def test_a_channel_that_comes_never_costs_more_where_many_are(rig: Rig, tmp_path: Path) -> None:
    native = NativeWorld(tmp_path, rig)
    joining = Joining(native)
    native.online()
    few, many = joining.cost(2, 4), joining.cost(14, 24)

    assert native.world.gating.gpus[GpuIndex(0)].channels == 2 * 4 + 14 * 24 + 2
    assert many < 1.2 * few
    native.close()


def arming_s(rig: Rig, gpu: int) -> float:
    """CPU time of all threads, while the plan of a GPU is replaced; the least of many."""
    spent = []
    for _ in range(40):
        began_s = time.process_time()
        assert rig.gate.channels._arm(GpuIndex(gpu)) == 0
        spent.append(time.process_time() - began_s)
    return min(spent)


def test_a_plan_of_many_processes_never_costs_its_issuer_more_than_one_of_one_process(rig: Rig) -> None:
    """An edge waits for a plan that comes meanwhile."""
    rig.offline(gpu=0).add(1024)
    for _ in range(128):
        rig.offline(gpu=1).add(8)

    assert arming_s(rig, 1) < 3 * arming_s(rig, 0)


def test_a_report_of_the_ways_never_costs_more_where_many_channels_are(rig: Rig, tmp_path: Path) -> None:
    """Each stop of a service with several GPUs asks for it."""
    native = NativeWorld(tmp_path, rig)
    joining = Joining(native)
    joining.process(4)
    few = steps(lambda: rig.gate.channels.reach(GpuIndex(0)))
    joining.cost(10, 24)
    many = steps(lambda: rig.gate.channels.reach(GpuIndex(0)))

    assert many <= few
    native.close()
