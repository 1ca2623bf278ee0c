"""Keeps the registry: claims, services, clients and their channels. Books without effects; `check_integrity` adds up.

A claim says what a process, and everything it starts, may be. It is made over the API (`valve run`), never by the
process's environment. A service is what one claim stands for: the gate domain if online, the owner if offline.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from valved.model.ids import ChannelRef, ClientId, GpuIndex, ProcessId, Role, ServiceId

BRAKE_SERVICE = ServiceId(1)  # holds every GPU while the node is paused; it has no clients
GUARD_SERVICE = ServiceId(0x7FFFFFFF)  # holds GPUs on which somebody may work unseen (policy/guard.py); no clients
MEMORY_SERVICE = ServiceId(0x7FFFFFFE)  # holds the GPUs on which memory moves; no client, no book
COME_BACK_SERVICE = ServiceId(0x7FFFFFFD)  # holds every GPU after a start, until online processes are back; no client
DEAF_SERVICE = ServiceId(
    0x7FFFFFFC
)  # holds every GPU while some that knock cannot be taken (clients/deaf.py); no client
# They hold GPUs and are no online service.
STANDING = frozenset({BRAKE_SERVICE, GUARD_SERVICE, MEMORY_SERVICE, COME_BACK_SERVICE, DEAF_SERVICE})
FIRST_SERVICE = 2
LAST_NUMBER = 0x7EFFFFFF


def is_number(number: int) -> bool:
    """Whether a service or the next client may have it. A state file can name any."""
    return FIRST_SERVICE <= number <= LAST_NUMBER


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessClaim:
    root: ProcessId
    role: Role
    service: ServiceId
    cgroup: str = ""  # a control group of the claimed process's own: every process in it belongs to the claim


@dataclass(slots=True, kw_only=True)
class ClientEntry:
    """One connection: the shim or the engine hook of one process."""

    id: ClientId
    process: ProcessId
    uid: int
    role: Role
    service: ServiceId
    domain: str = ""  # of trust (identity.py)
    cgroup: str = ""
    comm: str = ""
    abi: int = 0
    build: str = ""
    features: int = 0
    driver: int = 0
    joined_ns: int = 0
    channels: dict[tuple[int, int], ChannelRef] = field(default_factory=dict)
    channels_on: Counter[GpuIndex] = field(default_factory=Counter)
    rm_gpus: dict[int, GpuIndex] = field(default_factory=dict)  # h_client -> GPU
    notes: list[str] = field(default_factory=list)
    app_disabled: set[tuple[int, int]] = field(default_factory=set)  # by the application itself: never enable those
    uses_mps: bool = False  # it said so: none of its channels is ever stopped
    asked_fd: bool = False  # it was told to send its nvidiactl files: one that proves an RM client is kept
    ending_seq: int = 0  # of its word that a signal ends it, until that is answered
    lease_flag: bool | None = None  # what set_online_registered was last told

    def gpus(self) -> set[GpuIndex]:
        return set(self.channels_on)


@dataclass(slots=True, kw_only=True)
class ServiceEntry:
    id: ServiceId
    name: str
    role: Role
    root: ProcessId | None  # None: an unclaimed offline process's own service
    clients: set[ClientId] = field(default_factory=set)
    gpus: frozenset[GpuIndex] = frozenset()  # where it has channels, or had under a predecessor (kept_gpus)
    kept_gpus: frozenset[GpuIndex] = frozenset()  # of a predecessor's book, until its clients are back
    channels_on: Counter[GpuIndex] = field(default_factory=Counter)
    compute_on: Counter[GpuIndex] = field(default_factory=Counter)

    def refresh_gpus(self) -> bool:
        """True if the set changed."""
        before, self.gpus = self.gpus, self.kept_gpus.union(self.channels_on)
        return self.gpus != before


class Books:
    def __init__(self) -> None:
        self.clients: dict[ClientId, ClientEntry] = {}
        self.services: dict[ServiceId, ServiceEntry] = {}
        self.claims: dict[ProcessId, ProcessClaim] = {}
        self.holders: dict[tuple[int, int], set[ClientId]] = {}  # of each channel that is in a book
        self.offline_on: Counter[GpuIndex] = Counter()  # compute channels of all offline services
        self.per_process: Counter[ProcessId] = Counter()
        self.per_home: Counter[tuple[int, str]] = Counter()  # by user and control group
        self.next_client = 1
        self.next_service = FIRST_SERVICE
        self.revision = 0  # rises with each change: whoever has read the books since need not read them again

    # Services and claims

    def touch(self) -> None:
        self.revision += 1

    def add_service(self, name: str, role: Role, root: ProcessId | None) -> ServiceEntry:
        service = ServiceEntry(id=ServiceId(self.next_service), name=name, role=role, root=root)
        self.next_service += 1
        self.services[service.id] = service
        self.touch()
        return service

    def claim(self, root: ProcessId, role: Role, name: str, cgroup: str = "") -> ProcessClaim:
        """Claim a process anew, or change nothing if it already has this role."""
        known = self.claims.get(root)
        if known is not None and known.role is role:
            return known
        service = self.add_service(name, role, root)
        claim = ProcessClaim(root=root, role=role, service=service.id, cgroup=cgroup)
        self.claims[root] = claim
        return claim

    def move_claim(self, claim: ProcessClaim, root: ProcessId) -> None:
        del self.claims[claim.root]
        self.claims[root] = ProcessClaim(root=root, role=claim.role, service=claim.service, cgroup=claim.cgroup)
        self.services[claim.service].root = root
        self.touch()

    def find_claim(self, chain: Sequence[ProcessId], cgroup: str) -> ProcessClaim | None:
        """The claim of a process: its own, its nearest ancestor's, or that of the control group it lives in."""
        for process in chain:
            if process in self.claims:
                return self.claims[process]
        inside = [claim for claim in self.claims.values() if claim.cgroup and is_inside(cgroup, claim.cgroup)]
        return max(inside, key=lambda claim: len(claim.cgroup), default=None)

    def drop_service(self, service: ServiceId) -> None:
        entry = self.services.pop(service)
        if entry.root is not None:
            self.claims.pop(entry.root, None)
        self.touch()

    # Clients

    def add_client(self, entry: ClientEntry) -> None:
        self.clients[entry.id] = entry
        self.services[entry.service].clients.add(entry.id)
        self.per_process[entry.process] += 1
        self.per_home[entry.uid, entry.cgroup] += 1
        self.touch()

    def new_client_id(self) -> ClientId:
        self.next_client += 1
        return ClientId(self.next_client - 1)

    def drop_client(self, client: ClientId) -> ClientEntry:
        """Its channels must have been removed before."""
        entry = self.clients.pop(client)
        self.services[entry.service].clients.discard(client)
        _count_down(self.per_process, entry.process)
        _count_down(self.per_home, (entry.uid, entry.cgroup))
        self.touch()
        return entry

    def note_mps(self, client: ClientEntry) -> None:
        client.uses_mps = True
        self.touch()

    # Channels

    def put_channel(self, client: ClientEntry, channel: ChannelRef) -> bool:
        """Add or replace. True if the GPUs of its service changed."""
        key = (channel.h_client, channel.h_channel)
        service = self.services[client.service]
        known = client.channels.get(key)
        if known is not None:
            self._uncount(client, service, known)
        client.channels[key] = channel
        self.holders.setdefault(key, set()).add(client.id)
        for book in self._counts(client, service, channel):
            book[channel.gpu] += 1
        self.touch()
        return service.refresh_gpus()

    def drop_channel(self, client: ClientEntry, key: tuple[int, int]) -> bool:
        service = self.services[client.service]
        self._uncount(client, service, client.channels.pop(key))
        self.holders[key].discard(client.id)
        if not self.holders[key]:
            del self.holders[key]
        self.touch()
        return service.refresh_gpus()

    def _uncount(self, client: ClientEntry, service: ServiceEntry, channel: ChannelRef) -> None:
        for book in self._counts(client, service, channel):
            _count_down(book, channel.gpu)

    def _counts(self, client: ClientEntry, service: ServiceEntry, channel: ChannelRef) -> Iterator[Counter[GpuIndex]]:
        """The counters in which this channel stands."""
        yield client.channels_on
        yield service.channels_on
        if channel.compute:
            yield service.compute_on
            if service.role is Role.OFFLINE:
                yield self.offline_on

    # Questions

    def clients_of(self, service: ServiceId) -> Iterator[ClientEntry]:
        return (self.clients[client] for client in self.services[service].clients)

    def with_role(self, role: Role) -> Iterator[ClientEntry]:
        return (client for client in self.clients.values() if client.role is role)

    def client_of_process(self, chain: Sequence[ProcessId]) -> ClientEntry | None:
        """A client that runs in this process or the nearest ancestor that has one."""
        for process in chain:
            for client in self.clients.values() if self.per_process[process] else ():
                if client.process == process and client.role is not Role.HOOK:
                    return client
        return None

    def check_integrity(self) -> None:
        """Every cross reference has its other half. Called when idle and after every test."""
        listed = {client for service in self.services.values() for client in service.clients}
        assert listed == set(self.clients), "clients and services disagree"
        for service_id, service in self.services.items():
            assert service.id == service_id
            assert all(self.clients[client].service == service_id for client in service.clients)
            held = Counter(c.gpu for client in self.clients_of(service_id) for c in client.channels.values())
            assert service.channels_on == held, "channel book is off"
            assert service.gpus == service.kept_gpus.union(held)
        assert all(c.channels_on == Counter(one.gpu for one in c.channels.values()) for c in self.clients.values())
        offline = [service.compute_on for service in self.services.values() if service.role is Role.OFFLINE]
        assert self.offline_on == sum(offline, Counter()), "offline channels are off"
        told = {(key, client.id) for client in self.clients.values() for key in client.channels}
        assert told == {(key, client) for key, holders in self.holders.items() for client in holders}
        for root, claim in self.claims.items():
            assert claim.root == root
            assert self.services[claim.service].root == root, "a claim without its service"
        clients = self.clients.values()
        assert self.per_process == Counter(client.process for client in clients), "quota book is off"
        assert self.per_home == Counter((client.uid, client.cgroup) for client in clients), "quota book is off"
        assert all(client.id < self.next_client for client in self.clients.values())
        assert all(service < self.next_service for service in self.services)


def _count_down(book: Counter[Any], key: object) -> None:
    book[key] -= 1
    if not book[key]:
        del book[key]


def is_inside(cgroup: str, outer: str) -> bool:
    return cgroup == outer or cgroup.startswith(outer.rstrip("/") + "/")
