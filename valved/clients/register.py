"""Who is here: claims, welcomes and goodbyes of shims and engine hooks.

A client is known by the kernel's credentials and gets the role of its claim (clients/identity.py). It ends with its
link or its process, whichever is noticed first; its channels are seen to first of all (clients/departures.py).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Protocol

from valve_abi import CONTROL_BYTES, REGION_BYTES

from valved.abi.link import (
    ABI,
    Body,
    Feature,
    Hello,
    LinkType,
    Malformed,
    Packet,
    Refusal,
    Refused,
    Welcome,
)
from valved.clients.channels import Channels
from valved.clients.departures import ANEW, EXIT, Departures
from valved.clients.exits import Exits, Reactor
from valved.clients.identity import (
    NOT_YET,
    ClaimSource,
    NoPlace,
    Peer,
    Place,
    Silence,
    identify,
    own_cgroup,
    place,
    trust_domain,
)
from valved.clients.outbox import Arrived
from valved.clients.useful import UsefulTokens
from valved.config import LinkTable, QuotaTable
from valved.gate.wake import GateService
from valved.machine.clock import Clock
from valved.machine.ports import ClientFds, ClientView, GatePort, ProcessPort, ProverPort
from valved.model.events import EventKind
from valved.model.ids import ClientId, ProcessId, Role, ServiceId
from valved.state.journal import Journal
from valved.state.lived import Lived
from valved.state.registry import Books, Claim, ClientEntry

CLIENT_SLOTS = 4096  # MAX_CLIENTS of valved/native/internal.h
REFUSALS_KEPT = 4096  # processes whose last refusal is remembered
DAEMON_FEATURES = (
    Feature.GAPS
    | Feature.HINT
    | Feature.SELF_GATE
    | Feature.HOLD
    | Feature.SCHEDULE_DONE
    | Feature.PLAIN_COUNT
    | Feature.KEEP_STOP
)


class Connection(Protocol):
    """One peer's socket, as this service sees it."""

    @property
    def pid(self) -> int: ...

    @property
    def uid(self) -> int: ...

    def send(
        self, kind: LinkType, body: Body, seq: int, fds: tuple[int, ...] = (), arrived: Arrived | None = None
    ) -> bool: ...

    def close(self) -> None: ...


class KvMemory(Protocol):
    """Who keeps the books of KV memory, if anybody does (kv/service.py)."""

    @property
    def features(self) -> Feature: ...

    def handle(self, entry: ClientEntry, packet: Packet, fds: list[int]) -> None: ...

    def client_joined(self, entry: ClientEntry) -> None: ...

    def client_left(self, entry: ClientEntry, *, is_dead: bool) -> None: ...


class Register:
    def __init__(
        self,
        gate: GatePort,
        books: Books,
        gating: GateService,
        journal: Journal,
        clock: Clock,
        processes: ProcessPort,
        reactor: Reactor,
        quota: QuotaTable,
        link: LinkTable,
        prover: ProverPort,
        lived: Lived,
    ) -> None:
        self.lived = lived
        self.memory: KvMemory | None = None
        self.pods: ClaimSource | None = None  # on a Kubernetes node
        self.look_for_claims: Callable[[], None] = lambda: None  # that were left while no valved answered
        self.useful = UsefulTokens()
        self.channels = Channels(gate, books, gating, journal, clock, quota, link, self.send, prover)
        self._refused: dict[ProcessId, str] = {}
        self._gate = gate
        self._books = books
        self._gating = gating
        self._journal = journal
        self._clock = clock
        self._processes = processes
        self._exits = Exits(reactor, processes)
        left, counters = self.channels.leftovers, gating.counters
        self.departures = Departures(gate, left, processes, self._exits, journal, counters, clock)
        self._quota = quota
        self._connections: dict[ClientId, Connection] = {}

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
        self._book_claim(root, role, name or self._processes.comm(pid), cgroup)
        return self._books.claims.get(root)

    def _book_claim(self, root: ProcessId, role: Role, name: str, cgroup: str) -> None:
        known = self._books.claims.get(root)
        claim = self._books.claim(root, role, name, cgroup)
        if known is claim:
            return
        if role is Role.ONLINE:
            try:
                self._gating.add_service(claim.service, frozenset())
            except Exception:
                self._drop_service(claim.service)  # and its claim with it: a claim without a gate protects nobody
                raise
        self._journal.emit(EventKind.CLAIMED, service=claim.service, reason=role.name.lower(), pid=root.pid, name=name)
        self.watch_root(root)
        self.channels.changed()

    def _ask_pods(self, peer: Peer) -> bool:
        """A peer nobody has claimed may live in a pod that says what it is. False: that pod is not known yet."""
        if self.pods is None or self._books.find_claim(peer.chain, peer.cgroup) is not None:
            return True
        found = self.pods.claim_of(peer)
        if found is NOT_YET:
            return False
        if not isinstance(found, Silence):
            self._book_claim(peer.process, found.role, found.name, found.cgroup)
        return True

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
            self.leave(client, ANEW)
        if claim.service in self._books.services:
            self._drop_service(claim.service)

    # Joining and leaving

    def hello(self, connection: Connection, packet: Packet, *, is_scarce: bool = False) -> ClientId | None:
        """Welcome or refuse a peer. None: the connection is to be closed. `is_scarce`: few descriptors are left, and
        online processes get them."""
        body = packet.body
        assert isinstance(body, Hello)
        try:
            peer = identify(connection.pid, connection.uid, self._processes)
        except OSError:  # no descriptor left to look at it with
            text = "valved is out of descriptors"
            connection.send(LinkType.REFUSED, Refused(code=Refusal.QUOTA, text=text), packet.seq)
            self.count_refusal(Refusal.QUOTA)
            return None
        if peer is None:
            return None
        self.look_for_claims()
        refusal = self._why_not(body, peer)
        if refusal is None and not self._ask_pods(peer):
            return None  # without an answer: the shim passes through and knocks again
        given = refusal or place(_role(body.wanted_role), peer, self._books)
        if isinstance(given, Place):
            given = self._no_room(peer, given, is_scarce) or given
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
        return None

    def _no_room(self, peer: Peer, given: Place, is_scarce: bool) -> NoPlace | None:
        """Containers share users: what counts is the process, its control group or its claim. Whoever is claimed as
        online has room that nobody else can take."""
        if given.service in self._gating.online:
            return None
        quota, books = self._quota, self._books
        most = quota.clients_per_uid if peer.uid else quota.root_clients
        of_claim = len(books.services[given.service].clients) if given.service in books.services else 0
        if books.per_process[peer.process] >= quota.clients_per_process:
            text = f"process {peer.process.pid} has {quota.clients_per_process} clients already"
        elif max(books.per_home[peer.uid, peer.cgroup], of_claim) >= most:
            text = f"user {peer.uid} has {most} clients there already"
        elif len(books.clients) >= CLIENT_SLOTS - quota.kept_for_online:
            text = "the places that are left are for online services"
        elif is_scarce:
            text = "the descriptors that are left are for online services"
        else:
            return None
        return NoPlace(code=Refusal.QUOTA, text=text)

    def _refuse(self, connection: Connection, seq: int, why: NoPlace, peer: Peer) -> None:
        connection.send(LinkType.REFUSED, Refused(code=why.code, text=why.text), seq)
        self._gating.counters.refuse(why.code.name.lower())
        if self._refused.pop(peer.process, None) != why.text:  # who is refused asks again, for life: told once
            self._journal.emit(EventKind.REFUSED, reason=why.text, pid=peer.process.pid, comm=peer.comm, uid=peer.uid)
        self._refused[peer.process] = why.text
        if len(self._refused) > REFUSALS_KEPT:
            del self._refused[next(iter(self._refused))]

    def _welcome(
        self, connection: Connection, packet: Packet, peer: Peer, role: Role, service: ServiceId
    ) -> ClientId | None:
        hello = packet.body
        assert isinstance(hello, Hello)
        client = self._books.new_client_id()
        fds = self._create(client, role, service)
        if fds is None or not self._exits.watch(client, peer.process.pid, lambda: self.leave(client, EXIT)):
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
            domain=trust_domain(peer, self._books.services[service], self.pods),
            cgroup=peer.cgroup,
            comm=peer.comm,
            abi=ABI,
            build=hello.build,
            features=hello.features,
            driver=hello.driver,
            joined_ns=self._clock.now_ns(),
        )
        if role is Role.ONLINE:
            self.lived.put(peer.process)
        self._books.add_client(entry)
        self._connections[client] = connection
        self._gating.counters.clients += 1
        self._gating.client_joined(entry)
        self.channels.lease.client_joined(entry)
        if self.memory is not None:
            self.memory.client_joined(entry)
        welcome = Welcome(
            role=role,
            features=DAEMON_FEATURES if self.memory is None else DAEMON_FEATURES | self.memory.features,
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
        self.channels.changed()
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

    def leave(self, client: ClientId, reason: str) -> None:
        """A client is gone, by its link or by its process. Its channels are seen to first."""
        entry = self._books.clients.get(client)
        if entry is None:
            return
        self.channels.forget(client)
        self._read_tokens(entry)
        enabled = self.departures.remove(entry, reason)
        changed = False
        for key in list(entry.channels):
            changed |= self._books.drop_channel(entry, key)
        self._books.drop_client(client)
        self._gating.client_left(entry)
        if self.memory is not None:
            is_dead = reason == EXIT or self._processes.start_time(entry.process.pid) != entry.process.start_time
            self.memory.client_left(entry, is_dead=is_dead)
        connection = self._connections.pop(client, None)
        if connection is not None:
            connection.close()
        self._journal.emit(
            EventKind.LEFT,
            service=entry.service,
            client=client,
            reason=reason,
            pid=entry.process.pid,
            channels_enabled=enabled,
        )
        if changed or entry.role is Role.OFFLINE:
            self.channels.gpus_changed(entry.service)
        self.drop_if_empty(entry.service)
        self.channels.changed()

    def _read_tokens(self, entry: ClientEntry) -> None:
        if entry.role is Role.HOOK:
            self.useful.read(entry.service, entry.process, self._gate.view(entry.id).useful_tokens)

    def view(self, client: ClientId) -> ClientView:
        """What a client's region says."""
        return self._gate.view(client)

    def tokens(self, service: ServiceId) -> int:
        """Useful tokens that the service's engines reported, each counted once."""
        return sum(self.tokens_by_process(service).values())

    def tokens_by_process(self, service: ServiceId) -> dict[ProcessId, int]:
        for entry in self._books.clients_of(service):
            self._read_tokens(entry)
        return self.useful.by_process(service)

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
        if service in self._gating.online:
            self._gating.remove_service(service)
        else:
            self._gate.remove_service(service)  # whatever its hooks took of the gate
        self._books.drop_service(service)
        self.channels.harvest.forget(service)
        self.useful.forget(service)
        self.channels.lease.refresh()
        self.channels.changed()

    # Messages

    def handle(self, client: ClientId, packet: Packet, fds: list[int]) -> None:
        """A message of a welcomed client. Who keeps a descriptor takes it off the list; the caller closes the rest."""
        if packet.type < LinkType.KV_RANGE:
            self.channels.handle(client, packet, fds)
        elif self.memory is None:
            raise Malformed(f"{packet.type.name}, but KV memory is not managed here")
        else:
            self.memory.handle(self._books.clients[client], packet, fds)

    def send(self, client: ClientId, *packet: Any, **more: Any) -> bool:
        """To a client, if it is still connected. As of a connection."""
        connection = self._connections.get(client)
        return connection is not None and connection.send(*packet, **more)

    def is_online(self, client: ClientId) -> bool:
        """An online process, or the engine hook of one."""
        return self._books.clients[client].service in self._gating.online

    def count_refusal(self, code: Refusal) -> None:
        self._gating.counters.refuse(code.name.lower())

    def malformed(self, pid: int, uid: int, why: str) -> None:
        self._gating.counters.malformed += 1
        self._journal.emit(EventKind.MALFORMED, reason=why, pid=pid, uid=uid)

    def close(self) -> None:
        for client in list(self._books.clients):
            self.channels.forget(client)
        self._exits.close()


def _role(value: int) -> Role:
    return Role(value) if value in set(Role) else Role.NONE
