"""A whole node of services on virtual time: fake gate, fake processes, connections that record what they are sent."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import msgspec
from fake_gate import FakeGate
from fake_outside import FakeOutside
from fake_prover import FakeProver
from lent_fds import lend
from virtual import VirtualClock

from valved.abi.link import Channel, EndingMessage, Feature, Hello, LinkType, Packet, RefusedMessage, RmClient, Schedule
from valved.clients.accounts import account_of
from valved.compose import Outer, build
from valved.config import Config
from valved.kv import journey
from valved.machine.signals import Signals
from valved.model.ids import GpuIndex, ProcessId, Role
from valved.model.states import DriverState
from valved.state import saved as state

MS = 1_000_000
SECOND = 1_000_000_000
DRIVER = DriverState(version="580.159.04", branch=580, known=True, open_modules=True)


class FakeProcesses:
    """A ProcessPort over a made-up process table. Pidfds are pipes that nobody writes to."""

    def __init__(self, reactor):
        self.table = {1: (0, 0, "/", "init")}
        self.ending = set()  # in the table still, but no code of theirs runs any more
        self.near = set()  # they could end valved
        self.slow_to_stop = set()  # they have not met their stop signal yet
        self.many = {}  # how many looks the threads of a process take
        self._reactor = reactor
        self._pid_of = {}  # by descriptor; one that was closed may have become another process's

    def add(self, pid, parent=1, start=None, cgroup="/login", comm="work"):
        self.table[pid] = (start if start is not None else pid * 10, parent, cgroup, comm)
        return pid

    def end(self, pid):
        """The process ends: its pidfds become readable."""
        self.table.pop(pid, None)
        for fd in [fd for fd, owner in self._pid_of.items() if owner == pid]:  # callbacks close and open some
            callback = self._reactor.readers.get(fd)
            if callback is not None and self._pid_of.get(fd) == pid:
                callback()

    def start_time(self, pid):
        return self.table[pid][0] if pid in self.table else None

    def is_gone(self, process):
        try:
            return self.start_time(process.pid) != process.start_time
        except OSError:
            return False

    def is_ending(self, pid, start_time):
        return pid in self.ending or self.start_time(pid) != start_time

    def is_stopped(self, pid, stood=None):
        stood = set() if stood is None else stood
        if pid in self.slow_to_stop:
            return False
        stood.add(str(len(stood)))
        return True if len(stood) >= self.many.get(pid, 1) else None

    def ancestors(self, pid, most=64):
        chain = []
        while pid in self.table and pid > 0 and len(chain) < most:
            chain.append(ProcessId(pid=pid, start_time=self.start_time(pid)))
            pid = self.table[pid][1]
        return chain

    def could_end_us(self, pid, uid):
        return pid in self.near

    def cgroup(self, pid):
        return self.table[pid][2] if pid in self.table else None

    def comm(self, pid):
        return self.table[pid][3] if pid in self.table else ""

    def open_pidfd(self, pid):
        if pid not in self.table:
            return -1
        fd = lend()
        self._pid_of[fd] = pid
        return fd


class FakeReactor:
    def __init__(self):
        self.readers = {}

    def add_reader(self, fd, callback):
        self.readers[fd] = callback

    def remove_reader(self, fd):
        return self.readers.pop(fd, None) is not None


class FakeCloser:
    def close_in_turn(self, fds):
        for fd in fds:
            os.close(fd)


class FakeWork:
    """A WorkPort that does its jobs at once; `later` keeps them until `finish`."""

    def __init__(self):
        self.later = False
        self._jobs = []

    def do(self, job, then):
        self._jobs.append((job, then))
        if not self.later:
            self.finish()

    def finish(self):
        while self._jobs:
            job, then = self._jobs.pop(0)
            try:
                result, error = job(), None
            except Exception as caught:
                result, error = None, caught
            then(result, error)


class FakePrompt:
    """A PromptPort that does its jobs at once."""

    def do(self, job):
        return job()

    ask = do


class FakeConnection:
    def __init__(self, pid, uid=1000):
        self.pid, self.uid = pid, uid
        self.account = account_of(uid, "")
        self.sent = []
        self.is_open = True
        self.on_send = lambda kind, body, seq, fds: None  # the peer hears at once
        self.is_full = False  # its socket: what is sent waits in valved
        self.queue = []

    def send(self, kind, body, seq, fds=(), arrived=None):
        if not self.is_open:
            return False
        self.queue.append((kind, body, seq, fds, arrived))
        if not self.is_full:
            self.flush()
        return True

    def is_dead(self):
        return False

    def has_left(self):
        return False

    def belong(self, account):
        self.account = account

    def flush(self):
        while self.queue:
            *packet, arrived = self.queue.pop(0)
            self.sent.append(tuple(packet))
            if arrived is not None:
                arrived()
            self.on_send(*packet)

    def close(self):
        self.is_open = False
        self.queue.clear()

    @property
    def last(self):
        return self.sent[-1][1]

    def acks(self):
        return [(seq, body.status) for kind, body, seq, _ in self.sent if kind is LinkType.ACK]


class Shares:
    """Which share of its columns every offline engine is lent at most."""

    def __init__(self, share):
        self.share = share

    def share_of(self, cgroup):
        return self.share


class FakeThawer:
    def __init__(self):
        self.standing = set()
        self.put, self.drop = self.standing.add, self.standing.discard


class FakeSignals(Signals):
    """Waits as the real one does; what would be sent goes to its world."""

    def __init__(self, world):
        super().__init__(world.processes, world.clock, world.thawer)
        self._world = world

    def _send(self, process, queue):
        if self._world.is_scarce:
            raise OSError(errno.EMFILE, "too many open files")
        return [self._world._signal(process, number) for number in queue][-1]


class World:
    """A daemon as main builds it, with the outside replaced. `folder` holds the state and the pause file."""

    is_scarce = False  # no descriptor is left to signal anybody with
    kept_bytes: int | None = None  # of valved's memory, by links that have ended
    shim_features = Feature.GAPS | Feature.KV_STEP | Feature.KV_RUNS

    def __init__(
        self,
        folder: Path,
        gpus=2,
        config=None,
        gate=None,
        clock=None,
        processes=None,
        boot="boot",
        pods=None,
        shares=None,
        prompt=None,
        driver=DRIVER,
    ):
        self.folder = folder
        self.journey_failures: list[object] = []
        journey.failed = self.journey_failures.append
        self.config, self.clock = config or Config(), clock or VirtualClock()
        self.reactor = FakeReactor()
        self.processes = processes or FakeProcesses(self.reactor)
        self.processes._reactor = self.reactor
        self.gate = gate or FakeGate(self.clock, gpus)
        self.prover, self.outside, self.worker = FakeProver(), FakeOutside(self.clock), FakeWork()
        self.disk, self.event_disk = FakeWork(), FakeWork()
        self.signals, self.stopped, self.thawer = [], False, FakeThawer()
        outer = Outer(
            gate=self.gate,
            processes=self.processes,
            clock=self.clock,
            reactor=self.reactor,
            prover=self.prover,
            uvm=self.outside,
            work=self.worker,
            disk=self.disk,
            prompt=prompt or FakePrompt(),
            event_disk=self.event_disk,
            closer=FakeCloser(),
            signals=FakeSignals(self),
            fd_limit=65536,
            driver=driver,
            boot=boot,
            stop=self._stop,
            version="test",
            kept_bytes=lambda: self.kept_bytes,
            pods=pods,
            shares=shares,
        )
        daemon = build(msgspec.structs.replace(self.config, guard_bystanders=False), folder, outer)
        for name in daemon.__slots__:
            setattr(self, name, getattr(daemon, name))
        self.gate.on_stamps = self.gating.drain
        self.brake.set_mode(self.config.mode, "test")
        self.connections, self._seq = {}, 0

    def _signal(self, process, number):
        self.signals.append((process.pid, number.name))
        return True

    def _stop(self):
        self.stopped = True

    # Playing clients

    def packet(self, kind, body):
        self._seq += 1
        return Packet(type=kind, seq=self._seq, sent_ns=0, body=body)

    def hello(self, pid, wanted=Role.OFFLINE, uid=1000, features=Feature.GAPS, abi=(1, 1)):
        """Connect a process. Returns its connection; its client id, or None, is in `connection.client`."""
        connection = FakeConnection(pid, uid)
        hello = Hello(
            abi_min=abi[0],
            abi_max=abi[1],
            features=int(features),
            wanted_role=int(wanted),
            driver=580159004,
            build="test",
            comm="work",
        )
        connection.client = self.register.hello(connection, self.packet(LinkType.HELLO, hello))
        if connection.client is not None:
            self.connections[connection.client] = connection
        return connection

    def online(self, pid=None, name="chat", gpus=(0,), parent=1, uid=1000):
        """A claimed online process with a channel on each GPU. Returns its client id."""
        pid = pid or 100 + len(self.processes.table)
        if pid not in self.processes.table:
            self.processes.add(pid, parent)
        if self.books.find_claim(self._chain(pid), "") is None:
            assert self.node.launch(pid, self.processes.start_time(pid), Role.ONLINE, name)
        client = self.hello(pid, Role.ONLINE, uid=uid, features=self.shim_features).client
        for gpu in gpus:
            self.add_channel(client, gpu=gpu, h_client=0xC1D00000 + client)
        return client

    def offline(self, pid=None, name="batch", gpus=(0,), claimed=True, uid=1000):
        pid = pid or 100 + len(self.processes.table)
        if pid not in self.processes.table:
            self.processes.add(pid)
        if claimed:
            self.node.launch(pid, self.processes.start_time(pid), Role.OFFLINE, name)
        client = self.hello(pid, Role.OFFLINE, uid=uid, features=self.shim_features).client
        for gpu in gpus:
            self.add_channel(client, gpu=gpu, h_client=0xC1D00000 + client)
        return client

    def hook(self, client):
        """The engine hook in the process of another client."""
        pid = self.books.clients[client].process.pid
        hook = self.hello(pid, Role.HOOK, features=Feature.HINT).client
        self.gate.hint(hook, 0, 0)
        return hook

    def _chain(self, pid):
        from valved.clients.identity import identify

        return identify(pid, 1000, self.processes).chain

    def channel(self, gpu=0, h_client=0xC1D00001, h_channel=0xCAF00001, cid=7, compute=True, h_tsg=0xCAF00000):
        return Channel(
            gpu_uuid=bytes([gpu + 1]) * 16,
            device_instance=gpu,
            h_client=h_client,
            h_channel=h_channel,
            cid=cid,
            h_tsg=h_tsg,
            engine=1,
            compute=compute,
        )

    def show_rm_client(self, client, gpu=0, h_client=0xC1D00001, fds=None):
        """RM_CLIENT, with the file that proves it unless `fds` says otherwise. What is left of `fds` is returned."""
        body = RmClient(
            gpu_uuid=bytes([gpu + 1]) * 16, device_instance=gpu, h_client=h_client, h_device=6, h_subdevice=7, has_fd=1
        )
        fds = [lend()] if fds is None else fds
        packet = self.packet(LinkType.RM_CLIENT, body)
        self.register.handle(client, packet, fds)
        return packet.seq

    def add_channel(self, client, *, proven=True, **fields):
        """A channel as a shim tells of it: its RM client first, once, with its file."""
        fields.setdefault("h_channel", 0xCAF00001 + fields.get("gpu", 0))
        body = self.channel(**fields)
        gpu, h_client = GpuIndex(fields.get("gpu", 0)), body.h_client
        if proven and not self.register.channels.possession.is_proven(client, h_client, gpu):
            self.show_rm_client(client, gpu, h_client)
        packet = self.packet(LinkType.CHANNEL_ADD, body)
        self.register.handle(client, packet, [])
        return packet.seq

    def schedule(self, client, h_client, kind=LinkType.SCHEDULE_WAIT):
        packet = self.packet(kind, Schedule(h_client=h_client, h_object=0xCAF00000))
        self.register.handle(client, packet, [])
        return packet.seq

    def say_ending(self, client):
        packet = self.packet(LinkType.ENDING, EndingMessage(signal=15))
        self.register.handle(client, packet, [])
        return packet.seq

    def refusal(self, connection):
        assert isinstance(connection.last, RefusedMessage)
        return connection.last.code

    def run(self, ms):
        self.clock.advance(int(ms * MS))

    def work(self, client, ms):
        """One burst of GPU work: launch, run, proven done. Returns whether the launch rang."""
        rang = self.gate.launch(client)
        self.run(ms)
        self.gate.finish(client)
        return rang

    def beat_all(self):
        for client, entry in self.gate.clients.items():
            if entry.role is Role.ONLINE:
                self.gate.beat(client)

    def service_of(self, client):
        return self.books.clients[client].service

    def state(self, client):
        """The online service of a client, at run time."""
        return self.gating.online[self.service_of(client)]

    def events(self, *kinds):
        return self.journal.recent(lambda event: event.kind in kinds, 10_000)

    def check(self):
        """Books balance, and no channel is off on a GPU that nobody holds, but of who left and lives on."""
        assert not self.journey_failures
        self.gating.drain()  # whoever reads its books begins so
        self.books.check_integrity()
        self.kv.check_integrity()
        waiting = [left.channel for left in self.register.channels.leftovers.all() if left.has_left]
        for ref in self.gate.off.values():
            assert ref in waiting or self.gate.is_gated(ref.gpu)
        for gpu, account in self.gating.gpus.items():
            holders = {s for s, entry in self.gate.services.items() if entry.holds and gpu in entry.gpus}
            assert account.holders == holders, f"GPU {gpu}: booked {account.holders}, held by {holders}"
        self._check_told()

    def _check_told(self):
        """A look at rest leaves nothing untold: whatever changes what is told raises `Books.revision`, or is asked."""
        listener = self.gating.listener
        listener.time_passed()
        before = self._told()
        listener.clients_changed()
        assert before == self._told()
        listener.time_passed()  # from here on only what changes is told

    def _told(self):
        port = self.gate.granting
        return port.grantable, dict(port.consents), dict(port.offers), port.sliceable, self.sharing._written


def successor(first, boot="boot", driver=None, *, was_killed=False, **changes):
    """A new valved on the same machine: new gate, same processes, the state file between them."""
    if not was_killed:
        first.handover.save()
    gate = FakeGate(first.clock, 2)
    if driver:
        gate.driver_version = lambda: driver
    second = World(first.folder, gate=gate, clock=first.clock, processes=first.processes, boot=boot, **changes)
    saved, problem = state.load(first.folder / "state.json")
    assert not problem
    second.come_back.begin(2.0, is_first=False)
    second.handover.restore(saved, come_back_s=2.0)
    return second
