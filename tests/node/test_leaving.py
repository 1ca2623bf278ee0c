"""Offline work that must leave, end to end: real processes on the emulated card beside a service that stays busy."""

from __future__ import annotations

import signal
import subprocess

import pytest
from node_rig import Offline, Online, nothing_left_off, service, set_mode
from valve.v1 import node_pb2


def drain(node):
    subprocess.Popen(node.valve_command("drain", "--stop"), env=node.environment(), stdout=subprocess.DEVNULL)


@pytest.fixture(params=["obeys", "ignores"])
def workloads(make_node, request):
    """A beating offline job, which obeys SIGTERM or ignores it, and an online service that has let go."""
    node = make_node(config="leave_grace_s = 1.0")
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN if request.param == "ignores" else signal.SIG_DFL)
    offline = Offline(node, "batch")  # the disposition goes with it
    signal.signal(signal.SIGTERM, before)
    offline.wait_running()
    online = Online(node, "chat")
    online.wait_ready()
    node.wait_for(lambda: not service(node, "chat").busy, "the service lets go")
    offline.wait_running()
    return node, offline, online


@pytest.mark.parametrize(
    "switch", [lambda node: set_mode(node, node_pb2.MODE_OBSERVE), drain], ids=["observe", "drain"]
)
def test_no_offline_kernel_ends_beside_a_busy_service_while_its_process_leaves(workloads, switch):
    node, offline, online = workloads
    online.hint(1)  # from here on it is busy without a break
    online.launch(us=100)
    offline.wait_stopped()
    beats = offline.beats

    switch(node)

    while offline.process.poll() is None:
        online.launch(us=100)
    assert offline.beats == beats
    assert offline.process.returncode in (-signal.SIGTERM, -signal.SIGKILL)
    node.wait_for(lambda: nothing_left_off(node), "no channel is off")
    online.launch(us=100)
