"""What a successor must know, as a value: services, clients, their channels, figures. node/handover.py writes it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

import msgspec

from valved.clients.register import Register
from valved.gate.freeze import Ladder
from valved.gate.online import OnlineService
from valved.gate.wake import GateService
from valved.machine.clock import Clock
from valved.machine.ports import GatePort, ProcessPort
from valved.model.ids import ChannelRef, GpuIndex, Role
from valved.node.kv import Kv
from valved.state import saved as files
from valved.state.registry import Books, ClientEntry, ServiceEntry
from valved.state.saved import (
    SavedChannel,
    SavedClient,
    SavedGpu,
    SavedMemory,
    SavedPolicy,
    SavedRequests,
    SavedService,
    SavedState,
)
from valved.state.stats import NodeCounters

COUNTERS = tuple(field.name for field in fields(NodeCounters) if field.name != "refusals")


@dataclass(eq=False, repr=False)
class Snapshots:
    _gate: GatePort
    _books: Books
    _gating: GateService
    _register: Register
    _clock: Clock
    _processes: ProcessPort
    _boot: str
    _ladder: Ladder
    _kv: Kv | None

    def __post_init__(self) -> None:
        self._revision = -1  # of the books, when the clients were last made
        self._clients: list[SavedClient] = []

    def take(self, policy: SavedPolicy) -> SavedState:
        self._gating.drain()
        counters = self._gating.counters
        leftovers = [
            SavedClient(
                pid=left.owner.pid,
                start_time=left.owner.start_time,
                role=Role.OFFLINE,
                service=0,
                channels=[_saved_channel(left.channel)],
            )
            for left in self._register.channels.leftovers.all()
        ]
        return SavedState(
            version=files.VERSION,
            boot_id=self._boot,
            driver=self._gate.driver_version(),
            counters={name: getattr(counters, name) for name in COUNTERS},
            refusals=dict(counters.refusals),
            gpus=[self._saved_gpu(info.index, info.uuid) for info in self._gate.gpus()],
            services=[self._saved_service(entry) for entry in self._books.services.values()],
            clients=[*self._saved_clients(), *self._saved_away(), *leftovers],
            next_client=self._books.next_client,
            next_service=self._books.next_service,
            policy=policy,
            memory=self._saved_memory(),
            frozen=list(self._ladder.to_release()),
            ending=list(self._ladder.to_end()),
        )

    def _saved_memory(self) -> SavedMemory:
        """Of the services that there are: one that ended never comes back under its number."""
        if self._kv is None:
            return SavedMemory()
        memory = self._kv.report.saved()
        living = {service: state for service, state in memory.reservations.items() if service in self._books.services}
        return msgspec.structs.replace(memory, reservations=living)

    def _saved_gpu(self, gpu: GpuIndex, uuid: bytes) -> SavedGpu:
        account = self._gating.gpus[gpu]
        account.advance(self._clock.now_ns())
        return SavedGpu(
            uuid=uuid.hex(),
            harvest_ns=account.harvest_ns,
            gated_ns=account.gated_ns,
            gates=account.gates,
            latency=list(account.latency.counts),
            latency_sum_ns=account.latency.sum_ns,
        )

    def _saved_service(self, entry: ServiceEntry) -> SavedService:
        now_ns = self._clock.now_ns()
        claim = self._books.claims.get(entry.root) if entry.root is not None else None
        saved = SavedService(
            id=entry.id,
            name=entry.name,
            role=entry.role,
            root=entry.root,
            cgroup=claim.cgroup if claim is not None else "",
            gpus=sorted(entry.gpus),
            harvest_ns=self._register.channels.harvest.harvest_ns(entry.id, now_ns),
            tokens=[(by.pid, by.start_time, n) for by, n in self._register.tokens_by_process(entry.id).items()],
        )
        online = self._gating.online.get(entry.id)
        return saved if online is None else _with_online(saved, online, self._saved_requests(online), now_ns)

    def _saved_requests(self, online: OnlineService) -> list[SavedRequests]:
        told = dict(online.left)
        for client in self._books.clients_of(online.id):
            told[client.process, client.role] = online.tally_of(client)
        return [
            SavedRequests(process.pid, process.start_time, role, *tally.seen, tally.open_hits())
            for (process, role), tally in told.items()
            if tally.is_heard and not self._processes.is_gone(process)
        ]

    def _saved_clients(self) -> list[SavedClient]:
        """Thousands of channels, and most states differ in times and counts alone."""
        if self._revision != self._books.revision:
            self._clients, self._revision = self._make_clients(), self._books.revision
        return self._clients

    def _make_clients(self) -> list[SavedClient]:
        return [
            saved_client(
                entry,
                [
                    channel
                    for key, channel in entry.channels.items()
                    if entry.role is Role.OFFLINE and key not in entry.app_disabled
                ],
            )
            for entry in self._books.clients.values()
        ]

    def _saved_away(self) -> Iterator[SavedClient]:
        """Processes of online services that have not come back to us: a successor must wait for them, too, or it takes
        their services for such as use no GPU.
        """
        for online in self._gating.online.values():
            for process in online.away:
                if not self._processes.is_gone(process):
                    yield SavedClient(
                        pid=process.pid,
                        start_time=process.start_time,
                        role=Role.ONLINE,
                        service=online.id,
                        channels=[],
                    )


def _with_online(saved: SavedService, online: OnlineService, told: list[SavedRequests], now_ns: int) -> SavedService:
    requests, most, histogram = online.request_figures()
    mark = online.cooldown_state
    return msgspec.structs.replace(
        saved,
        cooldown=(mark.mark_ns, mark.age_ns, mark.gaps),
        breaker=(online.breaker.open_until_ns, online.breaker.trips),
        preemptions=online.book.preemptions,
        delay_ns=online.book.delay_ns,
        held_ns=online.hold_ns(now_ns),
        unseen_ns=online.hold_ns(now_ns) - online.busy_ns(now_ns),
        freed_ns=online.idle_ns(now_ns),
        requests=requests,
        most_preempted=most,
        preempted=histogram,
        told=told,
        slo=online.said.slo,
        grant=online.said.grant,
        share_weights=online.said.share_weights,
    )


def saved_client(entry: ClientEntry, channels: Sequence[ChannelRef]) -> SavedClient:
    return SavedClient(
        pid=entry.process.pid,
        start_time=entry.process.start_time,
        role=entry.role,
        service=entry.service,
        channels=[_saved_channel(channel) for channel in channels],
    )


def _saved_channel(channel: ChannelRef) -> SavedChannel:
    c = channel  # positional: a node may have thousands
    return SavedChannel(c.gpu, c.h_client, c.h_channel, c.cid, c.h_tsg, c.engine, c.compute)
