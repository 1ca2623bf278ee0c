"""A machine of one card, an online service, an offline job and the daemon of the moment, on virtual time.

The driver's memory of what is off outlives a daemon here, as on a machine; processes obey signals or do not. Whatever
happens, `check` says whether an offline channel is on while the online process computes.
"""

from __future__ import annotations

from dataclasses import replace

from fake_gate import FakeGate
from node_world import World
from virtual import VirtualClock

from valved.config import Config
from valved.daemon import take_over
from valved.model.ids import Role

ONLINE, OFFLINE = 300, 400
SECOND_NS = 1_000_000_000


class Driver(FakeGate):
    """A gate on a card that remembers: `off` is the card's, and the next daemon's gate finds it."""

    def __init__(self, clock, off=None):
        super().__init__(clock, 1)
        self.off = off if off is not None else {}


class Machine:
    """One card, an online service, an offline job, and the daemon of the moment."""

    def __init__(self, folder, *, obeys, config=None):
        self.folder, self.obeys, self.config = folder, obeys, config or Config()
        self.started = lambda world: None  # what the surroundings of a daemon tell each one that starts
        self.off = {}
        self.signals = []  # what daemons sent
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
        self.world = World(
            self.folder, config=self.config, clock=clock, processes=processes, gate=Driver(clock, self.off)
        )
        self.world._signal = self.signal
        self.world.register._exits.processes = self.world.processes
        self.clients = {}

    def signal(self, process, number):
        self.signals.append((process.pid, number.name))
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

    def open_breaker(self):
        """The online service was delayed beyond its budget: nothing is harvested beside it for a while."""
        world = self.world
        for online in world.gating.online.values():
            online.breaker = replace(online.breaker, open_until_ns=world.clock.now_ns() + SECOND_NS)
        world.gating.permits.look_at_all()

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
        self.started(self.world)
        self.check()
        self.connect(OFFLINE)
        self.check()
        self.connect(ONLINE)
        if self.is_busy and ONLINE in self.clients:
            self.world.gate.launch(self.clients[ONLINE])
        self.check()
        self.run(50)
        self.finish()


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


def machine_with(folder, state, *, obeys, config=None, started=lambda world: None):
    machine = Machine(folder, obeys=obeys, config=config)
    machine.started = started
    started(machine.world)
    machine.world.node.launch(ONLINE, ONLINE * 10, Role.ONLINE, "chat")
    machine.connect(ONLINE)
    machine.launch()
    machine.finish()
    STATES[state](machine)
    return machine
