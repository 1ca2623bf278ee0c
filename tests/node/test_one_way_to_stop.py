"""Every switch in every state of offline work, with daemons that end and are killed in between, on the emulated card:
while an online service is busy no beat of the offline kernel follows its stop, whatever is switched or restarted.

tests/service has the same table on virtual time, for every pair of switches; here the processes, the driver's refusals
and the lease are real.
"""

from __future__ import annotations

import signal
import subprocess

import pytest
from node_rig import Offline, Online, nothing_left_off, set_mode
from valve.v1 import node_pb2
from valve_tools.demo.node import NodeError

from valved.cli.client import is_running
from valved.cli.exits import CliError


def begin(node, *arguments):
    """A command that ends when offline work has left."""
    node.adopt(subprocess.Popen(node.valve_command(*arguments), env=node.environment(), stdout=subprocess.DEVNULL))

    def has_begun():
        try:
            return node.status().draining
        except (CliError, NodeError):  # it may end between two questions
            return not is_running(node.run_dir)

    node.wait_for(has_begun, "the drain has begun")


def write_pause_file(node):
    (node.run_dir / "pause").write_text("the night shift\n")
    node.wait_for(lambda: node.status().paused, "the file was read")


SWITCHES = {
    "pause": lambda node: subprocess.run(node.valve_command("pause"), check=True, env=node.environment()),
    "pause file": write_pause_file,
    "off": lambda node: set_mode(node, node_pb2.MODE_OFF),
    "observe": lambda node: set_mode(node, node_pb2.MODE_OBSERVE),
    "drain": lambda node: begin(node, "drain"),
    "drain and stop": lambda node: begin(node, "drain", "--stop"),
}
MUST_LEAVE = ("off", "observe", "drain", "drain and stop")


class Pair:
    """A beating offline job and an online service that is busy without a break from `be_busy` on."""

    def __init__(self, node):
        self.node = node
        self.online = Online(node, "chat")
        self.online.wait_ready()
        self.offline = Offline(node, "batch")
        self.is_busy = False
        self.has_come = False  # the offline process was registered once

    def be_busy(self):
        if not self.is_busy:
            self.is_busy = True
            self.online.hint(1)
        self.online.launch(us=100)

    def be_idle(self):
        self.is_busy = False
        self.online.hint(0)

    def is_over(self):
        return self.offline.process.poll() is not None

    def wait_back(self):
        """Whoever lives is known to the daemon of the moment, and offline work is off again. A shim that had stopped
        its own channels when the lease ended lets them go as it comes back, just before valved stops them: for those
        milliseconds nothing is asserted here."""
        living = 1 + (not self.is_over() and self.has_come)
        self.node.wait_for(lambda: self.is_over() or len(self.node.status().clients) >= living, "the clients are back")
        self.wait_stopped()

    def stays_stopped(self):
        """From here on no beat follows, however often the service launches."""
        beats = self.offline.beats
        for _ in range(5):
            self.be_busy()
        assert self.offline.beats == beats, "it ran beside a busy service"

    def wait_stopped(self):
        """It has ended, or its channels are off and no executor is active, or it has not got so far as to have any."""

        def is_stopped():
            compute = [one for one in self.node.emulator.state().of(self.offline.process.pid) if one.is_compute]
            return self.is_over() or (all(one.disabled for one in compute) and not any(one.active for one in compute))

        self.node.wait_for(is_stopped, "the offline channels are off, or it has ended")


def running(pair):
    pair.offline.wait_running()
    pair.has_come = True


def stopped(pair):
    running(pair)
    pair.be_busy()
    pair.offline.wait_stopped()


def not_connected(pair):
    """On its way to its first channel while the service is busy already."""
    pair.be_busy()


def left_by_a_predecessor(pair):
    stopped(pair)
    restart(pair, signal.SIGKILL)


STATES = {"running": running, "stopped": stopped, "not connected": not_connected, "left": left_by_a_predecessor}


def restart(pair, how):
    """The daemon of the moment ends, unless it has; the service computes while there is none."""
    node = pair.node
    code = node.stop_valved(how) if is_running(node.run_dir) else node.valved.wait(200)
    assert code == (-how if how is signal.SIGKILL else 0), "valved crashed at its end"
    pair.be_busy()
    node.start_valved()


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("switch", SWITCHES)
def test_no_offline_kernel_ends_beside_a_busy_service_whatever_is_switched_and_restarted(make_node, switch, state):
    node = make_node(config="leave_grace_s = 1.0")
    pair = Pair(node)
    STATES[state](pair)

    SWITCHES[switch](node)
    pair.be_busy()
    pair.wait_stopped()
    pair.stays_stopped()
    for how in (signal.SIGTERM, signal.SIGKILL):
        restart(pair, how)
        pair.wait_back()
        pair.stays_stopped()

    if switch in ("pause", "pause file", "drain"):  # files, which outlive a daemon
        subprocess.run(node.valve_command("resume"), check=True, env=node.environment(), stdout=subprocess.DEVNULL)
    pair.be_idle()
    if pair.is_over():
        assert switch in MUST_LEAVE or state == "not connected", "nobody else is ended"
        assert pair.offline.process.returncode != 0
    else:
        pair.offline.wait_running()
    pair.offline.process.kill()
    pair.offline.process.wait()
    node.wait_for(lambda: nothing_left_off(node), "no channel is left off")
