"""A process that ends while another one keeps its files: what it computed ends with it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from node_rig import Offline, Online
from valve_tools.demo.node import EmulatedNode
from valve_tools.emulator.client import NodeMoment, RunlistChannel


@pytest.fixture
def heir(node: EmulatedNode) -> Iterator[tuple[Offline, int]]:
    """An offline job that runs, and a child of it that has its files."""
    offline = Offline(node, "batch")
    offline.wait_running()
    offline.process.send_signal(signal.SIGUSR2)
    children = Path(f"/proc/{offline.process.pid}/task/{offline.process.pid}/children")
    child = int(node.wait_for(lambda: children.read_text().split(), "it forked")[0])
    yield offline, child
    os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize("is_gated", [False, True], ids=["open", "gated"])
def test_no_work_of_a_dead_job_goes_on_because_a_child_keeps_its_files(node, heir, is_gated):
    """Nobody could stop it: with its process its channels left valved's books."""
    offline, child = heir
    online = Online(node, "chat")
    online.wait_ready()
    if is_gated:
        online.hint(1)
        offline.wait_stopped()

    offline.process.kill()
    offline.process.wait()

    def theirs(state: NodeMoment) -> list[RunlistChannel]:
        return [channel for channel in state.of(offline.process.pid) if channel.is_compute]

    node.emulator.wait(lambda state: all(channel.reset for channel in theirs(state)), "the driver stops them")
    online.launch(us=20_000)
    assert Path(f"/proc/{child}").exists()
    left = theirs(node.emulator.state())
    assert left
    assert not any(channel.active or channel.granted for channel in left)
    assert [client.pid for client in node.status().clients] == [online.process.pid]


def test_no_card_stays_closed_because_a_child_keeps_the_files_of_a_dead_job(node, heir):
    offline, _ = heir
    offline.process.kill()
    offline.process.wait()

    another = Offline(node, "next")
    another.wait_running()
    assert not node.status().gpus[0].guarded_because
