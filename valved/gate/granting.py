"""Tells the native gate which services may grant, and where; it grants by itself (valved/native/grant.c).

A GPU is grantable while all offline work there would end a grant by itself, should valved be gone: each process says so
as it joins, and uses one GPU alone, for its own stop takes all of its channels. A process of an older shim may come by
channels anywhere, so beside it nothing is granted on the whole node. A process that does not qualify is looked at
before it is answered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from valved.abi.link import Feature
from valved.gate.slices import Slices
from valved.gate.wake import GateService
from valved.gate.worth import Worths
from valved.machine.ports import GrantPort, Grants
from valved.model.consent import Consent
from valved.model.ids import ChannelRef, ClientId, GpuIndex, Role, ServiceId
from valved.model.rungs import SliceSettings
from valved.model.states import GrantedState
from valved.policy.granted import GrantWorth
from valved.state.registry import Books, ClientEntry

MS = 1_000_000
PERIOD_NS = 50 * MS  # at most 20 grants a second
LOCK_SHARE = 10  # a stop and a wake take the driver's locks for at most this part of the time, as 1 : 10


class Granting:
    def __init__(
        self,
        port: GrantPort,
        gating: GateService,
        books: Books,
        consent: Callable[[ServiceId], Consent],
        leftovers: Callable[[], frozenset[GpuIndex]],
        slices: Slices | None = None,
        worths: Worths | None = None,
    ) -> None:
        self._port = port
        self._gating = gating
        self._books = books
        self._consent = consent
        self._leftovers = leftovers  # where channels are in no plan: no issuer would stop them at the end
        self.slices = slices or Slices(port, books, SliceSettings(), "")
        self.worths = worths
        self._grantable: frozenset[GpuIndex] = frozenset()
        self._barred: frozenset[GpuIndex] = frozenset()  # by leftovers, when it was last looked at
        self._told: dict[ServiceId, tuple[int, int]] = {}
        self._offered: dict[ClientId, tuple[int, int]] = {}

    def refresh(self) -> None:
        """From what is to what the native side is told. Grants that may not go on have ended on return."""
        grantable = self.grantable()
        if grantable != self._grantable:
            self._grantable = grantable
            self._port.set_grantable(grantable)
        self.slices.refresh(frozenset(self._gating.gpus))
        for service in self._gating.online:
            self._tell(service, self._consent(service))
        self._told = {service: told for service, told in self._told.items() if service in self._gating.online}
        self._offered = {client: told for client, told in self._offered.items() if client in self._books.clients}

    def channel_came(self, client: ClientEntry, channel: ChannelRef) -> None:
        self.slices.came(client, channel, frozenset(self._gating.gpus))

    @property
    def is_behind(self) -> bool:
        """What is told changes although no client does: a leftover ended, stops take longer, a driver file came."""
        grants = any(most_ns for most_ns, _ in self._told.values())
        return grants or self.slices.is_on or self._leftovers() != self._barred

    def grantable(self) -> frozenset[GpuIndex]:
        self._barred = self._leftovers()
        offline = list(self._books.with_role(Role.OFFLINE))
        if not all(client.features & Feature.GRANT for client in offline):
            return frozenset()
        barred = [client.gpus() for client in offline if client.uses_mps or len(client.gpus()) > 1]
        return frozenset(self._gating.gpus).difference(self._barred, *barred)

    def _tell(self, service: ServiceId, consent: Consent) -> None:
        slo = consent.slo if consent.grant else None
        most_ns = round(slo.gap_ms * MS) if slo is not None else 0
        told = (most_ns, self._period_ns(service) if most_ns else 0)
        if self._told.get(service, (0, 0)) != told:
            self._told[service] = told
            self._port.consent(service, *told)
        offer = (round(slo.tpot_ms * MS), most_ns) if slo is not None else (0, 0)
        for client in self._books.clients_of(service):
            if client.role is Role.HOOK and self._offered.get(client.id, (0, 0)) != offer:
                self._offered[client.id] = offer
                self._port.offer(client.id, *offer)

    def _period_ns(self, service: ServiceId) -> int:
        """From one beginning to the next. With k GPUs on a stock driver each edge is k calls one after another."""
        accounts = [self._gating.gpus[gpu].latency for gpu in self._gating.online[service].gpus]
        stops_ns = sum(one.sum_ns // max(1, sum(one.counts)) for one in accounts)
        step_ns = 10 * MS
        return max(PERIOD_NS, -(-2 * LOCK_SHARE * stops_ns // step_ns) * step_ns)

    def state(self, service: ServiceId) -> GrantedState:
        """What it offers, and what came of it."""
        if service not in self._gating.online:
            return GrantedState()
        consent, given = self._consent(service), self._port.grants(service)
        worth = GrantWorth()
        if self.worths is not None:
            worth = self.worths.of(service, consent, by_slices=self.slices.is_on)
        return GrantedState(
            slo=str(consent.slo or ""),
            grant=consent.grant,
            share_weights=consent.share_weights,
            words="; ".join(self._words(service, consent, given)),
            grants=given.grants,
            broken=given.broken,
            granted_ns=given.granted_ns,
            refused=dict(given.refused),
            worth=worth.words,
            worth_points=worth.points,
            rung=self.slices.rung.value,
        )

    def _words(self, service: ServiceId, consent: Consent, given: Grants) -> Iterator[str]:
        if words := consent.words():
            yield words
        if given.grants:
            kind = "times shared for" if self.slices.is_on else "pauses of"
            yield f"{given.grants} {kind} {given.granted_ns / 1e9:.3g} s in all, {given.broken} broken by a launch"
        elif consent.grant:
            yield "nothing grants yet"
        if consent.grant and (obstacle := self.slices.words(self._gating.online[service].gpus)):
            yield obstacle
