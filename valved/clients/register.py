"""Registers shims and engine hooks: claims, welcomes and goodbyes.

A client is known by the kernel's credentials and gets the role of its claim (clients/identity.py). It ends with its
link or its process, whichever is noticed first; its channels are seen to first of all (clients/departures.py).
"""

from __future__ import annotations

from functools import partial

from valve_abi import CONTROL_BYTES, REGION_BYTES

from valved.abi.link import (
    ABI,
    Body,
    Feature,
    Hello,
    LinkType,
    Malformed,
    Packet,
    Welcome,
)
from valved.clients.accounts import LinkAccount
from valved.clients.admission import Admission, Connection, why_not
from valved.clients.awaited import Awaited
from valved.clients.channels import Channels
from valved.clients.claimed import ClaimedRoots
from valved.clients.departures import EXIT, Departures
from valved.clients.exits import Exits, Reactor
from valved.clients.fetching import fetched
from valved.clients.identity import ClaimSource, NotAdmitted, Peer, trust_domain
from valved.clients.outbox import Arrived
from valved.clients.turns import Buckets, Postponed
from valved.clients.useful import UsefulTokens
from valved.clients.welcomes import Welcomes
from valved.config import LinkTable, QuotaTable
from valved.gate.ending import KILL
from valved.gate.wake import GateService
from valved.machine.clock import Clock
from valved.machine.ports import ClientFds, ClientView, GatePort, ProcessPort, ProverPort
from valved.model.events import EventKind
from valved.model.ids import ChannelRef, ClientId, ProcessId, Role, ServiceId
from valved.state.journal import Journal
from valved.state.lived import Lived
from valved.state.registry import Books, ClientEntry

DAEMON_FEATURES = (
    Feature.GAPS
    | Feature.HINT
    | Feature.SELF_GATE
    | Feature.HOLD
    | Feature.SCHEDULE_DONE
    | Feature.PLAIN_COUNT
    | Feature.KEEP_STOP
    | Feature.ENDING
)


LINKS = "links"  # of all accounts: these can be made without end, so their lines in the journal are bounded together
TELL_NS = 500_000_000  # of one user's malformed messages, one is told in this time, and twenty at once


class ClientsListener:
    """What this room reports to the rooms above. Does nothing; the daemon's (node/news.py) overrides it."""

    def features(self) -> Feature:
        """What those above can do for a client, beside what this room does."""
        return Feature(0)

    def client_joined(self, entry: ClientEntry) -> None:
        """It is in the books, and was not welcomed yet."""

    def client_left(self, entry: ClientEntry, *, is_dead: bool) -> None:
        """It is in no book any more."""

    def kv_packet(self, entry: ClientEntry, packet: Packet, fds: list[int]) -> None:
        """A message about KV memory. A handler that keeps a descriptor takes it off the list."""
        raise Malformed(f"{packet.type.name}, but KV memory is not managed here")

    def books_changed(self) -> None:
        """Claims, clients or channels: a successor must know."""

    def channel_comes(self, entry: ClientEntry, channel: ChannelRef) -> None:
        """Of an offline process, and it can be switched off next: a successor must know."""

    def someone_knocks(self) -> None:
        """Before a peer is judged. Claims may lie in the run folder that were left while no valved answered."""


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
        pods: ClaimSource | None,
        welcomes: Welcomes,
        *,
        keeps_files: bool,
    ) -> None:
        self.lived = lived
        self.listener = ClientsListener()
        self.useful = UsefulTokens()
        rooms = (gate, books, gating, journal, clock)
        self.channels = Channels(*rooms, quota, link, self.send, prover, self._changed, self._comes, keeps_files)
        self._gate, self._books = gate, books
        self._gating, self._journal = gating, journal
        self._clock = clock
        self._exits = Exits(reactor, processes, clock)
        left, counters = self.channels.leftovers, gating.counters
        self.departures = Departures(gate, left, processes, self._exits, journal, counters, clock)
        self.admission = Admission(books, gating, journal, clock, processes, quota, welcomes)
        ends = (self._exits, self.leave, self._service_ended, self._changed, pods)
        self.claimed = ClaimedRoots(gate, books, gating, journal, processes, *ends)
        self.awaited = Awaited(books, lived, processes)
        self.postponed, self.postponed_online = Postponed(clock), Postponed(clock)  # what clients cause
        self._connections: dict[ClientId, Connection] = {}
        self._told_malformed = Buckets(share=1.0, burst_ns=20 * TELL_NS)  # by user

    def _changed(self) -> None:
        self.listener.books_changed()

    def _comes(self, entry: ClientEntry, channel: ChannelRef) -> None:
        self.listener.channel_comes(entry, channel)

    def _service_ended(self, service: ServiceId) -> None:
        self.channels.harvest.forget(service)
        self.useful.forget(service)
        self.channels.lease.refresh()

    # Joining and leaving

    def hello(self, connection: Connection, packet: Packet, *, is_scarce: bool = False) -> ClientId | None:
        """Welcome or refuse a peer. None: the connection is to be closed. `is_scarce`: few descriptors are left, and
        online processes get them."""
        peer = self.admission.peer(connection, packet.seq)
        if peer is None:
            return None
        self.listener.someone_knocks()
        hello = packet.body
        assert isinstance(hello, Hello)
        refusal = why_not(hello)
        if refusal is None and not self.claimed.look_up(peer, hello.wanted_role, self.lived.former):
            return None  # without an answer: the shim knocks again
        given = refusal or self.admission.judge(hello, peer, is_scarce=is_scarce)
        if isinstance(given, NotAdmitted):
            self.admission.refuse(connection, packet.seq, given, peer)
            return None
        service = given.service
        if service is None:
            service = self._books.add_service(hello.comm or peer.comm, given.role, None).id
        return self._welcome(connection, packet, peer, given.role, service)

    def _welcome(
        self, connection: Connection, packet: Packet, peer: Peer, role: Role, service: ServiceId
    ) -> ClientId | None:
        hello = packet.body
        assert isinstance(hello, Hello)
        client = self._books.new_client_id()
        fds = self._create(client, role, service, at_once=peer.could_end_us)
        watched = fds is not None and self._watch(client, peer)
        if fds is None or not watched:
            self._take_back(client, service, created=fds is not None)
            self.admission.refuse_for_want(connection, packet.seq, peer, role, has_ended=watched is None)
            return None
        entry = ClientEntry(
            id=client,
            process=peer.process,
            uid=peer.uid,
            role=role,
            service=service,
            domain=trust_domain(peer, self._books.services[service], self.claimed.pods),
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
        try:
            self._gating.client_joined(entry)
            self.channels.lease.client_joined(entry)
            self.listener.client_joined(entry)
        except Exception:  # it hears of no welcome, so nobody may count on it
            self.leave(client, "it could not be welcomed")
            raise
        welcome = Welcome(
            role=role,
            features=DAEMON_FEATURES | fetched() | self.listener.features(),
            service=service,
            client=client,
            control_bytes=CONTROL_BYTES,
            region_bytes=REGION_BYTES,
        )
        self.admission.took(peer, service)
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
        self.listener.books_changed()
        return client

    def _create(self, client: ClientId, role: Role, service: ServiceId, *, at_once: bool) -> ClientFds | None:
        try:
            return self._gate.create_client(client, role, service, at_once=at_once)
        except OSError:
            return None

    def _watch(self, client: ClientId, peer: Peer) -> bool | None:
        ended = partial(self.postponed.do_once, client, peer.turn, lambda: self.leave(client, EXIT))
        try:
            return self._exits.watch(client, peer.process.pid, ended) or None  # told in each pass until it has left
        except OSError:
            return False

    def _take_back(self, client: ClientId, service: ServiceId, *, created: bool) -> None:
        if created:
            self._gate.remove_client(client)
        self.claimed.drop_if_empty(service, was_welcome=False)

    def leave(self, client: ClientId, reason: str) -> None:
        """A client is gone, by its link or by its process. Its channels are seen to first."""
        entry = self._books.clients.get(client)
        if entry is None:
            return
        is_dead = reason == EXIT or self._exits.has_ended(client)  # the whole of it: any thread of it may still write
        self.channels.forget(client)
        self._read_tokens(entry)
        enabled = self.departures.remove(entry, reason)
        changed = sum(self._books.drop_channel(entry, key) for key in list(entry.channels)) > 0
        self._books.drop_client(client)
        self._gating.client_left(entry, self._exits.processes.is_gone)
        self.listener.client_left(entry, is_dead=is_dead)
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
        self.claimed.drop_if_empty(entry.service)
        self.listener.books_changed()

    def let_die(self, process: ProcessId) -> bool:
        """It stands, and is killed next: its channels are enabled. False: once the driver answers, so ask again."""
        for entry in [entry for entry in self._books.clients.values() if entry.process == process]:
            self.channels.schedules.let_end(entry)
            self.leave(entry.id, KILL)
        return self.departures.has_all_on(process)

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

    # Messages

    def handle(self, client: ClientId, packet: Packet, fds: list[int]) -> None:
        """A message of a welcomed client. The caller closes the descriptors that the handler leaves on the list."""
        if packet.type < LinkType.KV_RANGE:
            self.channels.handle(client, packet, fds)
        else:
            self.listener.kv_packet(self._books.clients[client], packet, fds)

    def send(
        self,
        client: ClientId,
        kind: LinkType,
        body: Body,
        seq: int,
        fds: tuple[int, ...] = (),
        arrived: Arrived | None = None,
    ) -> bool:
        """To a client, if it is still connected. As of an outbox."""
        connection = self._connections.get(client)
        return connection is not None and connection.send(kind, body, seq, fds, arrived)

    def is_online(self, client: ClientId) -> bool:
        """An online process, or the engine hook of one."""
        return self._books.clients[client].service in self._gating.online

    def malformed(self, pid: int, uid: int, why: str, count: int = 1) -> None:
        """Each is counted; what one user causes never fills the journal."""
        self._gating.counters.malformed += count
        now_ns = self._clock.now_ns()
        if self._told_malformed.wait_ns(uid, now_ns):
            return
        self._told_malformed.took(uid, TELL_NS, now_ns)
        self._journal.emit(EventKind.MALFORMED, reason=why, pid=pid, uid=uid)

    def links_are_dear(self, account: LinkAccount, text: str) -> None:
        now_ns = self._clock.now_ns()
        if not self._told_malformed.wait_ns(LINKS, now_ns):
            self._told_malformed.took(LINKS, TELL_NS, now_ns)
            self._journal.emit(EventKind.NOTED, reason=f"{account.called(self.claimed.pod_of(account))}: {text}")

    def close(self) -> None:
        for client in list(self._books.clients):
            self.channels.forget(client)
        self._exits.close()
