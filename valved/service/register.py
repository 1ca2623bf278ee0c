"""The conversation with shims and engine hooks: who joins, what channels they have, when they leave.

Messages come in from service/link_server.py, already parsed. Each is answered at once except SCHEDULE_WAIT while a
GPU of the client is gated: that ioctl would enable the channels again, so its ACK is held until the GPU opens. A hold
longer than `schedule_hold_s` is answered with EAGAIN and the shim asks again. SCHEDULE_DONE closes the race of a gate
that falls between the ACK and the ioctl: the channels are stopped once more.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from valved.config import LinkTable, QuotaTable
from valved.mechanism.clock import Clock, TimerHandle
from valved.mechanism.link import (
    ABI,
    Ack,
    Body,
    Channel,
    Feature,
    Hello,
    LinkType,
    Note,
    NoteMessage,
    Packet,
    Refusal,
    Refused,
    RmClient,
    Schedule,
    Welcome,
)
from valved.mechanism.ports import ClientFds, GatePort, ProcessPort
from valved.model.events import EventKind
from valved.model.ids import ChannelRef, ClientId, GpuIndex, Mode, ProcessId, Reach, Role, ServiceId
from valved.service.books import Books, Claim, ClientEntry
from valved.service.gate import GateService
from valved.service.harvest import Harvest
from valved.service.identity import NoPlace, Peer, identify, own_cgroup, place
from valved.service.journal import Journal
from valved.service.leftovers import Leftovers

SECOND_NS = 1_000_000_000
CONTROL_BYTES = 4096  # VALVE_CONTROL_BYTES
REGION_BYTES = 4096 + 256 * 64 + 4096  # VALVE_REGION_BYTES
DAEMON_FEATURES = (
    Feature.GAPS | Feature.HINT | Feature.SELF_GATE | Feature.HOLD | Feature.SCHEDULE_DONE | Feature.PLAIN_COUNT
)
NO_UUID = bytes(16)


class Connection(Protocol):
    """One peer's socket, as this service sees it."""

    @property
    def pid(self) -> int: ...

    @property
    def uid(self) -> int: ...

    def send(self, kind: LinkType, body: Body, seq: int, fds: tuple[int, ...] = ()) -> None: ...

    def close(self) -> None: ...


class Reactor(Protocol):
    """The part of the asyncio loop that watches descriptors."""

    def add_reader(self, fd: int, callback: Callable[[], None], /) -> None: ...

    def remove_reader(self, fd: int, /) -> bool: ...


@dataclass(slots=True, kw_only=True)
class HeldSchedule:
    client: ClientId
    seq: int
    gpus: frozenset[GpuIndex]
    timer: TimerHandle


@dataclass(slots=True)
class Exits:
    """Pidfds of clients and of claimed processes, by who asked."""

    reactor: Reactor
    processes: ProcessPort
    _fds: dict[object, int] = field(default_factory=dict)

    def watch(self, key: object, pid: int, gone: Callable[[], None]) -> bool:
        """False: the process is gone already."""
        fd = self.processes.open_pidfd(pid)
        if fd < 0:
            return False
        self._fds[key] = fd
        self.reactor.add_reader(fd, gone)
        return True

    def forget(self, key: object) -> None:
        fd = self._fds.pop(key, -1)
        if fd >= 0:
            self.reactor.remove_reader(fd)
            os.close(fd)

    def close(self) -> None:
        for key in list(self._fds):
            self.forget(key)


class Register:
    def __init__(
        self,
        gate: GatePort,
        books: Books,
        keeper: GateService,
        journal: Journal,
        clock: Clock,
        processes: ProcessPort,
        reactor: Reactor,
        quota: QuotaTable,
        link: LinkTable,
    ) -> None:
        self.mode = Mode.HARVEST
        self.is_draining = False
        self.harvest = Harvest(keeper.gpus)
        self.leftovers = Leftovers()
        self.past_tokens: dict[ServiceId, int] = {}  # useful tokens of hooks that left, by service
        self.changed: Callable[[], None] = lambda: None  # the books changed: save them soon
        self._gate = gate
        self._books = books
        self._keeper = keeper
        self._journal = journal
        self._clock = clock
        self._processes = processes
        self._exits = Exits(reactor, processes)
        self._quota = quota
        self._link = link
        self._connections: dict[ClientId, Connection] = {}
        self._held: list[HeldSchedule] = []
        self._by_uuid = {info.uuid: info.index for info in gate.gpus()}
        self._by_instance = {info.device_instance: info.index for info in gate.gpus()}
        keeper.after_wake.append(self.release_schedules)

    # Claims

    def claim(self, pid: int, start_time: int, role: Role, name: str) -> Claim | None:
        """Claim a process for a role. None: it is gone, or its number means another process by now."""
        root = ProcessId(pid=pid, start_time=start_time)
        if self._processes.start_time(pid) != start_time:
            return None
        known = self._books.claims.get(root)
        if known is not None and known.role is not role:
            self._drop_claim(known)
        cgroup = own_cgroup(pid, self._processes) if os.geteuid() == 0 else ""
        claim = self._books.claim(root, role, name or self._processes.comm(pid), cgroup)
        if known is None or known is not claim:
            if role is Role.ONLINE:
                self._keeper.add_service(claim.service, frozenset())
            self._journal.emit(EventKind.CLAIMED, service=claim.service, reason=role.name.lower(), pid=pid, name=name)
            self.watch_root(root)
            self.changed()
        return self._books.claims.get(root)

    def watch_root(self, root: ProcessId) -> None:
        if not self._exits.watch(root, root.pid, lambda: self.root_gone(root)):
            self.root_gone(root)

    def root_gone(self, root: ProcessId) -> None:
        """A claimed process ended. Its service lives as long as one of its clients does."""
        self._exits.forget(root)
        claim = self._books.claims.get(root)
        if claim is not None and not self._books.services[claim.service].clients:
            self._drop_claim(claim)

    def _drop_claim(self, claim: Claim) -> None:
        self._exits.forget(claim.root)
        for client in list(self._books.services[claim.service].clients):
            self.leave(client, "claimed anew")
        if claim.service in self._books.services:
            self._drop_service(claim.service)

    # Joining and leaving

    def hello(self, connection: Connection, packet: Packet) -> ClientId | None:
        """Welcome or refuse a peer. None: refused, the connection is to be closed."""
        body = packet.body
        assert isinstance(body, Hello)
        peer = identify(connection.pid, connection.uid, self._processes)
        if peer is None:
            return None
        refusal = self._why_not(body, peer)
        given = refusal or place(_role(body.wanted_role), peer, self._books, self.mode)
        if isinstance(given, NoPlace):
            self._refuse(connection, packet.seq, given, peer)
            return None
        service = given.service
        if service is None:
            service = self._books.add_service(body.comm or peer.comm, given.role, None).id
        return self._welcome(connection, packet, peer, given.role, service)

    def _why_not(self, hello: Hello, peer: Peer) -> NoPlace | None:
        if not hello.abi_min <= ABI <= hello.abi_max:
            text = f"this valved speaks link ABI {ABI}, the client {hello.abi_min} to {hello.abi_max}"
            return NoPlace(code=Refusal.VERSION, text=text)
        if self.is_draining:
            return NoPlace(code=Refusal.DRAINING, text="valved is leaving")
        most = self._quota.clients_per_uid if peer.uid else self._quota.root_clients
        if self._books.per_uid[peer.uid] >= most:
            return NoPlace(code=Refusal.QUOTA, text=f"user {peer.uid} has {most} clients already")
        return None

    def _refuse(self, connection: Connection, seq: int, why: NoPlace, peer: Peer) -> None:
        connection.send(LinkType.REFUSED, Refused(code=why.code, text=why.text), seq)
        self._keeper.counters.refuse(why.code.name.lower())
        self._journal.emit(EventKind.REFUSED, reason=why.text, pid=peer.process.pid, comm=peer.comm, uid=peer.uid)

    def _welcome(
        self, connection: Connection, packet: Packet, peer: Peer, role: Role, service: ServiceId
    ) -> ClientId | None:
        hello = packet.body
        assert isinstance(hello, Hello)
        client = self._books.new_client_id()
        fds = self._create(client, role, service)
        if fds is None or not self._exits.watch(client, peer.process.pid, lambda: self.leave(client, "exit")):
            self._take_back(client, service, created=fds is not None)
            why = NoPlace(code=Refusal.QUOTA, text="valved is out of descriptors or memory")
            self._refuse(connection, packet.seq, why, peer)
            return None
        entry = ClientEntry(
            id=client,
            process=peer.process,
            uid=peer.uid,
            role=role,
            service=service,
            comm=peer.comm,
            abi=ABI,
            build=hello.build,
            features=hello.features,
            driver=hello.driver,
            joined_ns=self._clock.now_ns(),
        )
        self._books.add_client(entry)
        self._connections[client] = connection
        self._keeper.counters.clients += 1
        self._keeper.client_joined(entry)
        self._came_back(entry)
        welcome = Welcome(
            role=role,
            features=DAEMON_FEATURES,
            service=service,
            client=client,
            control_bytes=CONTROL_BYTES,
            region_bytes=REGION_BYTES,
        )
        connection.send(LinkType.WELCOME, welcome, packet.seq, (fds.control, fds.region, fds.doorbell, fds.order))
        self._journal.emit(
            EventKind.JOINED,
            service=service,
            client=client,
            reason=role.name.lower(),
            pid=peer.process.pid,
            comm=peer.comm,
            build=hello.build,
        )
        self.changed()
        return client

    def _create(self, client: ClientId, role: Role, service: ServiceId) -> ClientFds | None:
        try:
            return self._gate.create_client(client, role, service)
        except OSError:
            return None

    def _take_back(self, client: ClientId, service: ServiceId, *, created: bool) -> None:
        if created:
            self._gate.remove_client(client)
        self.drop_if_empty(service)

    def _came_back(self, entry: ClientEntry) -> None:
        """A client of a predecessor has reconnected: its service need not be braked on its account any more."""
        online = self._keeper.online.get(entry.service)
        if online is not None and entry.process.pid in online.away:
            online.away.discard(entry.process.pid)
            self._keeper.look_soon(online)

    def leave(self, client: ClientId, reason: str) -> None:
        """A client is gone, by its link or by its process. Its channels are enabled first: facts/nvidia-rm 6."""
        entry = self._books.clients.get(client)
        if entry is None:
            return
        self._exits.forget(client)
        for held in [held for held in self._held if held.client == client]:
            self._let_go(held, None)
        if entry.role is Role.HOOK:
            tokens = self._gate.view(client).useful_tokens
            self.past_tokens[entry.service] = self.past_tokens.get(entry.service, 0) + tokens
        enabled = self._gate.remove_client(client)
        self._keeper.counters.channels_enabled_on_exit += len(enabled)
        changed = False
        for key in list(entry.channels):
            changed |= self._books.drop_channel(entry, key)
        self._books.drop_client(client)
        self._keeper.client_left(entry)
        connection = self._connections.pop(client, None)
        if connection is not None:
            connection.close()
        self._journal.emit(
            EventKind.LEFT,
            service=entry.service,
            client=client,
            reason=reason,
            pid=entry.process.pid,
            channels_enabled=len(enabled),
        )
        if changed or entry.role is Role.OFFLINE:
            self._gpus_changed(entry.service)
        self.drop_if_empty(entry.service)
        self.changed()

    def tokens(self, service: ServiceId) -> int:
        """Useful tokens that the service's engines reported, each counted once."""
        hooks = [entry.id for entry in self._books.clients_of(service) if entry.role is Role.HOOK]
        return self.past_tokens.get(service, 0) + sum(self._gate.view(hook).useful_tokens for hook in hooks)

    def drop_if_empty(self, service: ServiceId) -> None:
        """A service without clients ends with its claimed process; an unclaimed one ends at once."""
        entry = self._books.services.get(service)
        if entry is None or entry.clients:
            return
        root = entry.root
        if root is None or self._processes.start_time(root.pid) != root.start_time:
            if root is not None:
                self._exits.forget(root)
            self._drop_service(service)

    def _drop_service(self, service: ServiceId) -> None:
        if service in self._keeper.online:
            self._keeper.remove_service(service)
        self._books.drop_service(service)
        self.harvest.forget(service)
        self.past_tokens.pop(service, None)
        self.refresh_lease_flags()
        self.changed()

    # Messages of a welcomed client

    def handle(self, client: ClientId, packet: Packet, fd: int) -> bool:
        """One message. Returns whether `fd` was kept. Unexpected types are the caller's to refuse (see accepts)."""
        entry = self._books.clients[client]
        body = packet.body
        match body:
            case RmClient():
                return self._rm_client(entry, packet.seq, body, fd)
            case Channel() if packet.type is LinkType.CHANNEL_ADD:
                self._channel_add(entry, packet.seq, body)
            case Channel():
                self._channel_del(entry, (body.h_client, body.h_channel))
            case Schedule() if packet.type is LinkType.SCHEDULE_WAIT:
                self._schedule_wait(entry, packet.seq, body)
            case Schedule():
                self._schedule_done(entry, body)
            case NoteMessage():
                self._note(entry, body)
            case _:
                raise AssertionError(packet.type)
        return False

    def _ack(self, client: ClientId, seq: int, status: int = 0, *, want_fd: bool = False) -> None:
        connection = self._connections.get(client)
        if connection is not None:
            connection.send(LinkType.ACK, Ack(status=status, want_fd=want_fd), seq)

    def _find_gpu(self, uuid: bytes, device_instance: int) -> GpuIndex | None:
        return self._by_instance.get(device_instance) if uuid == NO_UUID else self._by_uuid.get(uuid)

    def _rm_client(self, entry: ClientEntry, seq: int, body: RmClient, fd: int) -> bool:
        gpu = self._find_gpu(body.gpu_uuid, body.device_instance)
        kept = False
        if gpu is None:
            self._ack(entry.id, seq, errno.ENODEV)
            return False
        if entry.role is Role.OFFLINE:
            self._gate.give_rm_client(entry.id, gpu, body.h_client, body.h_device, body.h_subdevice, fd)
            kept = fd >= 0
        if len(entry.rm_gpus) < self._quota.channels_per_client:
            entry.rm_gpus[body.h_client] = gpu
        self._ack(entry.id, seq)
        return kept

    def _channel_add(self, entry: ClientEntry, seq: int, body: Channel) -> None:
        gpu = self._find_gpu(body.gpu_uuid, body.device_instance)
        key = (body.h_client, body.h_channel)
        if gpu is None:
            self._ack(entry.id, seq, errno.ENODEV)
            return
        if key not in entry.channels and len(entry.channels) >= self._quota.channels_per_client:
            self._keeper.counters.refuse("channels")
            self._ack(entry.id, seq, errno.ENOSPC)
            return
        channel = ChannelRef(
            gpu=gpu,
            h_client=body.h_client,
            h_channel=body.h_channel,
            cid=body.cid,
            h_tsg=body.h_tsg,
            engine=body.engine,
            compute=body.compute,
        )
        status, want_fd = 0, False
        if entry.role is Role.OFFLINE:
            status, want_fd = self._arm(entry, channel)
        if self._books.put_channel(entry, channel):
            self._gpus_changed(entry.service)
        elif entry.role is Role.OFFLINE:
            self._count_offline(entry.service, gpu)
        self._journal.emit(
            EventKind.CHANNEL_ADDED,
            service=entry.service,
            client=entry.id,
            gpus=(gpu,),
            h_client=body.h_client,
            h_channel=body.h_channel,
            compute=int(body.compute),
            status=status,
        )
        self._ack(entry.id, seq, status, want_fd=want_fd)
        self.changed()

    def _arm(self, entry: ClientEntry, channel: ChannelRef) -> tuple[int, bool]:
        armed = self._gate.add_channel(entry.id, channel)
        if self.leftovers.take(channel) and not armed.gated:
            self._gate.enable_foreign([channel])
        if armed.status and armed.reach is Reach.NONE and not armed.want_fd:
            self._keeper.counters.refuse("unreachable")
            return errno.EOPNOTSUPP, False
        return 0, armed.want_fd

    def _channel_del(self, entry: ClientEntry, key: tuple[int, int]) -> None:
        channel = entry.channels.get(key)
        if channel is None:
            return
        if entry.role is Role.OFFLINE:
            self._gate.remove_channel(entry.id, *key)
        entry.app_disabled.discard(key)
        if self._books.drop_channel(entry, key):
            self._gpus_changed(entry.service)
        elif entry.role is Role.OFFLINE:
            self._count_offline(entry.service, channel.gpu)
        self._journal.emit(
            EventKind.CHANNEL_GONE,
            service=entry.service,
            client=entry.id,
            gpus=(channel.gpu,),
            h_client=key[0],
            h_channel=key[1],
        )
        self.changed()

    def _gpus_changed(self, service: ServiceId) -> None:
        """The set of GPUs of a service changed: gate domain, presence of offline work, lease flags."""
        entry = self._books.services[service]
        if service in self._keeper.online:
            self._keeper.set_gpus(service, entry.gpus)
        elif entry.role is Role.OFFLINE:
            for gpu in self._keeper.gpus:
                self._count_offline(service, gpu)
        self.refresh_lease_flags()

    def _count_offline(self, service: ServiceId, gpu: GpuIndex) -> None:
        count = self._books.services[service].compute_on[gpu]
        self.harvest.present(service, gpu, count > 0, self._clock.now_ns())
        self._keeper.set_offline_channels(gpu, self._books.offline_channels(gpu))

    def refresh_lease_flags(self) -> None:
        """Tell each offline client whether online work shares a GPU with it: what it must do if valved dies."""
        services = self._books.services
        shared = frozenset().union(*(services[online].gpus for online in self._keeper.online if online in services))
        for entry in self._books.with_role(Role.OFFLINE):
            flag = not shared.isdisjoint(services[entry.service].gpus)
            if entry.lease_flag is not flag:
                entry.lease_flag = flag
                self._gate.set_online_registered(entry.id, flag)

    # SCHEDULE calls of the application

    def _schedule_wait(self, entry: ClientEntry, seq: int, body: Schedule) -> None:
        gpus = self._gated_gpus(entry, body.h_client)
        if not gpus or entry.role is not Role.OFFLINE or self.is_draining:
            self._ack(entry.id, seq)
            return
        until_ns = self._clock.now_ns() + round(self._link.schedule_hold_s * SECOND_NS)
        timer = self._clock.call_at_ns(until_ns, lambda: self._let_go(held, errno.EAGAIN))
        held = HeldSchedule(client=entry.id, seq=seq, gpus=gpus, timer=timer)
        self._held.append(held)

    def _gated_gpus(self, entry: ClientEntry, h_client: int) -> frozenset[GpuIndex]:
        """Gated GPUs that this call may concern: the one of its RM client if known, else all of the process."""
        known = entry.rm_gpus.get(h_client)
        of_channels = {channel.gpu for key, channel in entry.channels.items() if key[0] == h_client}
        gpus = of_channels or ({known} if known is not None else entry.gpus())
        return frozenset(gpu for gpu in gpus if self._keeper.is_stopped(gpu))

    def release_schedules(self) -> None:
        for held in list(self._held):
            if self.is_draining or not any(self._keeper.is_stopped(gpu) for gpu in held.gpus):
                self._let_go(held, 0)

    def _let_go(self, held: HeldSchedule, status: int | None) -> None:
        held.timer.cancel()
        self._held.remove(held)
        if status is not None:
            self._ack(held.client, held.seq, status)

    def _schedule_done(self, entry: ClientEntry, body: Schedule) -> None:
        if entry.role is not Role.OFFLINE or not self._gated_gpus(entry, body.h_client):
            return
        for (h_client, _), channel in list(entry.channels.items()):
            if h_client == body.h_client and self._keeper.is_stopped(channel.gpu):
                self._gate.add_channel(entry.id, channel)

    # Notes

    def _note(self, entry: ClientEntry, body: NoteMessage) -> None:
        if body.code in (Note.APP_DISABLED, Note.APP_ENABLED) and entry.role is Role.OFFLINE:
            self._app_switched(entry, (body.h_client, body.h_channel), body.code == Note.APP_DISABLED)
            return
        name = Note(body.code).name.lower().replace("_", "-") if body.code in set(Note) else f"note-{body.code}"
        text = f"{name}: {body.text}" if body.text else name
        if len(entry.notes) >= self._quota.notes_per_client or text in entry.notes:
            return
        entry.notes.append(text)
        self._journal.emit(EventKind.NOTED, service=entry.service, client=entry.id, reason=text, pid=entry.process.pid)

    def _app_switched(self, entry: ClientEntry, key: tuple[int, int], disabled: bool) -> None:
        """The application switched a channel itself: from now on that is its business (design.md 9)."""
        if key not in entry.channels:
            return
        self._gate.note_app_disabled(entry.id, *key, disabled)
        if disabled:
            entry.app_disabled.add(key)
        else:
            entry.app_disabled.discard(key)
        self.changed()

    def malformed(self, pid: int, uid: int, why: str) -> None:
        self._keeper.counters.malformed += 1
        self._journal.emit(EventKind.MALFORMED, reason=why, pid=pid, uid=uid)

    def close(self) -> None:
        for held in list(self._held):
            self._let_go(held, None)
        self._exits.close()


def _role(value: int) -> Role:
    return Role(value) if value in set(Role) else Role.NONE
