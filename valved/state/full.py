"""Remembers which services heard from the driver that a card is full, whatever NVML says of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from valved.machine.clock import Clock
from valved.model.events import EventKind
from valved.model.ids import GpuIndex, ServiceId
from valved.state.journal import Journal
from valved.state.stats import MemoryCounters

FULL_NS = 1_000_000_000  # for so long it is not tried again
TELL_NS = 60 * FULL_NS  # a service that waits tries each second, and the journal is for all


@dataclass(slots=True)
class FullCards:
    """Where NVML says what is free nobody else goes by the word of a process: it may say what it likes."""

    _journal: Journal
    _clock: Clock
    _counters: MemoryCounters
    _until_ns: dict[tuple[GpuIndex, ServiceId], int] = field(default_factory=dict)
    _told_ns: dict[tuple[GpuIndex, ServiceId], int] = field(default_factory=dict)

    def hear(self, gpu: GpuIndex, service: ServiceId, *, is_short: bool) -> None:
        """No handle could be made. `is_short`: for want of memory."""
        now_ns = self._clock.now_ns()
        self._until_ns = {key: until for key, until in self._until_ns.items() if until > now_ns}
        self._until_ns[gpu, service] = now_ns + FULL_NS
        self._counters.full += is_short
        self._told_ns = {key: at for key, at in self._told_ns.items() if now_ns - at < TELL_NS}
        if is_short and (gpu, service) not in self._told_ns:
            self._told_ns[gpu, service] = now_ns
            reason = "the card is full: the driver has less memory than NVML says"
            self._journal.emit(EventKind.NOTED, service=service, gpus=(gpu,), reason=reason)

    def is_full_for(self, gpu: GpuIndex, service: ServiceId) -> bool:
        return self._until_ns.get((gpu, service), 0) > self._clock.now_ns()

    def is_full(self, gpu: GpuIndex) -> bool:
        """By anybody's word."""
        return any(there == gpu and self.is_full_for(there, service) for there, service in self._until_ns)
