"""Every switch, in every state of offline work, with daemons that end and come back in between: at no moment does an
offline channel run beside a busy online service, and who may go on does so in the end.

The driver's memory of what is off outlives a daemon here, as on a machine; processes obey signals or do not.
"""

from __future__ import annotations

import itertools

import pytest
from fake_gate import FakeGate
from node_world import World
from virtual import VirtualClock

from valved.daemon import take_over
from valved.model.ids import Mode, Role
from valved.policy.stopping import Work

ONLINE, OFFLINE = 300, 400


class Driver(FakeGate):
    """A gate on a card that remembers: `off` is the card's, and the next daemon's gate finds it."""

    def __init__(self, clock, off=None):
        super().__init__(clock, 1)
        self.off = off if off is not None else {}

    def enable_foreign(self, channels):
        for channel in channels:
            self.off.pop((channel.h_client, channel.h_channel), None)
        return super().enable_foreign(channels)


class Machine:
    """One card, an online service, an offline job, and the daemon of the moment."""

    def __init__(self, folder, *, obeys):
        self.folder, self.obeys = folder, obeys
        self.off = {}
        self.is_busy = False
        self.has_channel = False  # the offline process, on the card
        self.world = None
        self.clients = {}
        self._start(None)
        self.world.processes.add(ONLINE)
        self.world.processes.add(OFFLINE)

    def _start(self, before):
        clock, processes = (before.clock, before.processes) if before else (None, None)
        clock = clock or VirtualClock()
        self.world = World(self.folder, clock=clock, processes=processes, gate=Driver(clock, self.off))
        self.world._signal = self.signal
        self.world.ladder._signal = self.world.leaving._signal = self.signal
        self.world.register._exits.processes = self.world.processes
        self.clients = {}

    def signal(self, process, number):
        if number.name == "SIGKILL" or (number.name == "SIGTERM" and self.obeys):
            self.world.clock.call_at_ns(self.world.clock.now_ns(), lambda: self.end(process.pid))
        return self.world.processes.start_time(process.pid) is not None

    def end(self, pid):
        """Its end closes its link; the card forgets its channels."""
        client = self.clients.pop(pid, None)
        self.world.processes.end(pid)
        if client in self.world.books.clients:
            self.world.register.leave(client, "exit")
        if pid == OFFLINE:
            self.off.clear()

    def connect(self, pid):
        if pid in self.clients or self.world.processes.start_time(pid) is None:
            return
        role = Role.ONLINE if pid == ONLINE else Role.OFFLINE
        client = self.world.hello(pid, role).client
        assert client is not None, "whoever is turned away runs ungated"
        self.clients[pid] = client
        self.world.add_channel(client, gpu=0, h_client=0xC1D00000 + pid)
        self.has_channel |= pid == OFFLINE

    def launch(self):
        """The online process computes, whether a daemon hears it or not."""
        self.is_busy = True
        if ONLINE in self.clients:
            self.world.gate.launch(self.clients[ONLINE])
        self.check()

    def finish(self):
        self.is_busy = False
        if ONLINE in self.clients:
            self.world.gate.finish(self.clients[ONLINE])

    def run(self, ms, step=5):
        for _ in range(ms // step):
            self.world.run(step)
            if ONLINE in self.clients:
                self.world.gate.beat(self.clients[ONLINE])
            self.check()

    def serve(self):
        """Two requests with idle time between them and after."""
        for _ in range(2):
            self.launch()
            self.run(20)
            self.finish()
            self.run(100, step=20)

    def is_running(self):
        """The offline process lives, has a channel, and that is on."""
        lives = self.world.processes.start_time(OFFLINE) is not None
        return lives and self.has_channel and not self.off

    def check(self):
        assert not (self.is_busy and self.is_running()), "offline runs beside a busy online service"

    def restart(self, how):
        if how == "none":
            return
        before = self.world
        if how == "SIGTERM":
            before.brake.hand_over()
        before.handover.save()
        before.leaving.take_back()
        before.gate.off = {}  # the rest of its timers does nothing to the card from now on
        is_held = bool(self.off)
        self.clients = {}
        if is_held or how == "SIGTERM":
            self.launch()
        self._start(before)
        take_over(self.world, self.world.config, self.folder)
        self.check()
        self.connect(OFFLINE)
        self.check()
        self.connect(ONLINE)
        if self.is_busy and ONLINE in self.clients:
            self.world.gate.launch(self.clients[ONLINE])
        self.check()
        self.run(50)
        self.finish()


SWITCHES = {
    "pause": lambda world: world.node.pause("test"),
    "off": lambda world: world.node.set_policy(Mode.OFF, {}, 0),
    "observe": lambda world: world.node.set_policy(Mode.OBSERVE, {}, 0),
    "policy deleted": lambda world: world.brake.set_mode(Mode.OBSERVE, "GPUHarvestNode"),
    "drain": lambda world: world.node.drain("test", stop=False),
    "drain and stop": lambda world: world.node.drain("test", stop=True),
    "harvest": lambda world: (world.node.resume(), world.node.set_policy(Mode.HARVEST, {}, 0)),
}


def running(machine):
    machine.world.node.launch(OFFLINE, OFFLINE * 10, Role.OFFLINE, "batch")
    machine.connect(OFFLINE)
    machine.run(300)
    assert machine.is_running()


def stopped(machine):
    running(machine)
    machine.launch()


def not_connected(machine):
    machine.world.node.launch(OFFLINE, OFFLINE * 10, Role.OFFLINE, "batch")


def left_by_a_predecessor(machine):
    stopped(machine)
    machine.restart("crash")
    machine.launch()


STATES = {"running": running, "stopped": stopped, "not connected": not_connected, "left": left_by_a_predecessor}
RESTARTS = ("none", "SIGTERM", "crash")


def machine_with(folder, state, *, obeys):
    machine = Machine(folder, obeys=obeys)
    machine.world.node.launch(ONLINE, ONLINE * 10, Role.ONLINE, "chat")
    machine.connect(ONLINE)
    machine.launch()
    machine.finish()
    STATES[state](machine)
    return machine


@pytest.mark.parametrize("restart", RESTARTS)
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("switch", SWITCHES)
def test_offline_never_runs_beside_a_busy_service_whatever_is_switched_and_restarted(tmp_path, switch, state, restart):
    for number, (second, again) in enumerate(zip(SWITCHES, itertools.cycle(RESTARTS), strict=False)):
        folder = tmp_path / str(number)
        folder.mkdir()
        machine = machine_with(folder, state, obeys=bool(number % 2))

        SWITCHES[switch](machine.world)
        machine.check()
        machine.serve()
        machine.connect(OFFLINE)
        machine.restart(restart)
        machine.serve()
        SWITCHES[second](machine.world)
        machine.serve()
        machine.restart(again)
        machine.serve()

        machine.world.brake.set_mode(Mode.HARVEST, "test")
        machine.world.node.resume()
        machine.connect(OFFLINE)
        machine.run(3000, step=50)
        machine.world.check()
        lives = machine.world.processes.start_time(OFFLINE) is not None
        assert machine.is_running() is lives, f"{second}, {again}: who was not ended goes on"


@pytest.mark.parametrize("switch", ["off", "observe", "policy deleted", "drain", "drain and stop"])
def test_who_ignores_the_request_to_leave_stays_stopped_and_is_gone_after_its_time(tmp_path, switch):
    machine = machine_with(tmp_path, "running", obeys=False)

    SWITCHES[switch](machine.world)
    machine.launch()
    machine.run(100)
    machine.finish()
    machine.run(58_900, step=500)
    assert machine.world.brake.work is Work.LEAVING
    assert machine.off, "also while online is idle"
    machine.run(3_000, step=100)

    assert machine.world.brake.work is Work.EMPTY
    assert machine.world.processes.start_time(OFFLINE) is None
    assert not machine.off
    assert machine.world.stopped is (switch == "drain and stop")
