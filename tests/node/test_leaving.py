"""Offline work that must leave, end to end: real processes on the emulated card beside a service that stays busy."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest
from node_rig import WORKLOAD, Offline, Online, nothing_left_off, service, set_mode
from valve.v1 import node_pb2

WAITED = "disabled channels of pid"  # tools/emulator/server/uvm.c: the driver waited for one that died so
# Workers that die with it (PR_SET_PDEATHSIG), as all of a container do with its first process; then what is to run.
LAUNCHER = """
import ctypes, os, signal, subprocess, sys
pages, argv = sys.argv[2].split(","), sys.argv[3:]
def dies_with_us(): ctypes.CDLL(None).prctl(1, int(signal.SIGKILL))
for page in pages:
    subprocess.Popen([sys.executable, sys.argv[1], "offline", page], preexec_fn=dies_with_us)
os.execv(argv[0], argv)
"""


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


def test_no_driver_call_waits_for_workers_that_die_with_their_launcher(make_node, tmp_path):
    node = make_node(config="leave_grace_s = 1.0")
    pages = [tmp_path / f"worker-{number}" for number in range(4)]
    for page in pages:
        page.write_bytes(bytes(4096))
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it goes with them
    paths = ",".join(map(str, pages))
    launcher = Offline(node, "batch", prefix=[sys.executable, "-c", LAUNCHER, str(WORKLOAD), paths])
    signal.signal(signal.SIGTERM, before)
    launcher.wait_running()
    node.wait_for(lambda: all(any(page.read_bytes()[:8]) for page in pages), "the workers beat")
    online = Online(node, "chat")
    online.wait_ready()
    online.hint(1)
    online.launch(us=100)
    launcher.wait_off()

    set_mode(node, node_pb2.MODE_OBSERVE)
    launcher.process.wait(200)
    node.wait_for(lambda: node.status().gpus[0].channels == 0, "their channels leave the books")

    online.launch(us=100)
    assert WAITED not in node.emulator.kernel_log()
