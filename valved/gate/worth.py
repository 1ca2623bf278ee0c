"""What granting would be worth, by service: from the steps that hooks tell of and the node's own books of time.

The two times of the last step stand in a hook's region. They are looked at now and then: what is known is a sample.
"""

from __future__ import annotations

from collections import defaultdict, deque
from statistics import fmean

from valved.gate.wake import GateService
from valved.machine.clock import Clock, beat_of
from valved.machine.ports import GrantPort
from valved.model.consent import GAP_MS, Consent
from valved.model.ids import Role, ServiceId
from valved.policy.granted import GrantWorth, Known, expected_worth
from valved.state.registry import Books

KEPT = 256
LOOK_S = 0.5
REST_S = 2.0  # while no service has a hook
LONGEST_NS = 60_000_000_000  # a client's claim beyond it is none
MS = 1e6


class Worths:
    def __init__(self, port: GrantPort, gating: GateService, books: Books, clock: Clock) -> None:
        self._port, self._gating, self._books, self._clock = port, gating, books, clock
        self._steps: defaultdict[ServiceId, deque[float]] = defaultdict(lambda: deque(maxlen=KEPT))
        self._last: dict[int, int] = {}

    async def run(self) -> None:
        while True:
            await beat_of(LOOK_S if self._last else REST_S)
            self.look()

    def look(self) -> None:
        """Take the last step of each hook, if it is a new one."""
        for service in [service for service in self._steps if service not in self._gating.online]:
            del self._steps[service]
        self._last = {client: end_ns for client, end_ns in self._last.items() if client in self._books.clients}
        for client in self._books.with_role(Role.HOOK):
            if client.service in self._gating.online:
                begin_ns, end_ns = self._port.step(client.id)
                if end_ns != self._last.get(client.id, 0) and 0 < begin_ns < end_ns < begin_ns + LONGEST_NS:
                    self._steps[client.service].append((end_ns - begin_ns) / MS)
                self._last[client.id] = end_ns

    def of(self, service: ServiceId, consent: Consent, *, by_slices: bool) -> GrantWorth:
        online, now_ns = self._gating.online.get(service), self._clock.now_ns()
        if online is None:
            return GrantWorth()
        held_ns, idle_ns = online.busy_ns(now_ns), online.idle_ns(now_ns)
        stops = [self._gating.gpus[gpu].latency for gpu in online.gpus]
        means_ns = [one.sum_ns / one.total for one in stops if one.total]
        cost_ms = 2 * len(online.gpus) * fmean(means_ns) / MS if means_ns else None  # a wake costs about a stop
        slo = consent.slo
        return expected_worth(
            Known(
                steps_ms=tuple(self._steps.get(service, ())),
                busy=held_ns / (held_ns + idle_ns) if held_ns + idle_ns else None,
                cost_ms=0.0 if by_slices else cost_ms,
                tpot_ms=slo.tpot_ms if slo is not None else 0.0,
                gap_ms=slo.gap_ms if slo is not None else GAP_MS,
            )
        )
