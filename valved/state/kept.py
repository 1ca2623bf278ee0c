"""Says how much memory of each GPU offline work must leave for online services, by what these have and had.

A look at a card that says the same, beside the same services with the same KV memory, computes nothing: as a rule a
hundred services do not move. Time alone changes one thing, a peak that was not reached for long (peaks.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from valved.model.ids import ClientId, GpuIndex, ProcessId, Role, ServiceId
from valved.policy.keeping import MemoryUse, OnlineNeed, keep
from valved.state.peaks import Peaks
from valved.state.registry import Books


class KvUse(NamedTuple):
    """Of the KV ranges of one name on one GPU, in bytes."""

    mapped: int = 0
    coming: int = 0  # handles on their way to them
    bare: int = 0  # have no memory


NO_KV = KvUse()


@dataclass(frozen=True, slots=True, kw_only=True)
class OnlineNames:
    """Of online services. Several may have one name."""

    of_client: Mapping[ClientId, str]
    of_pid: Mapping[int, str]
    untold: frozenset[str]  # they come back to a new valved: it does not know yet what of theirs is KV memory


def online_names(books: Books, away: Mapping[ServiceId, frozenset[ProcessId]]) -> OnlineNames:
    """`away`: services that have not told a new valved all of theirs, and their processes that it still waits for."""
    of_client, of_pid, untold = dict[ClientId, str](), dict[int, str](), set[str]()
    for service in books.services.values():
        if service.role is not Role.ONLINE:
            continue
        for one in books.clients_of(service.id):
            if one.role is Role.ONLINE:
                of_client[one.id] = of_pid[one.process.pid] = service.name
        if service.id in away:
            untold.add(service.name)
            of_pid.update((process.pid, service.name) for process in away[service.id])
    return OnlineNames(of_client=of_client, of_pid=of_pid, untold=frozenset(untold))


@dataclass(slots=True)
class _OfGpu:
    kept: MemoryUse = field(default_factory=MemoryUse)
    kv: Mapping[str, KvUse] = field(default_factory=dict)  # when its card was read last
    went_by: object = None  # of the last look at its card; None: it must be computed anew


class KeptMemory:
    def __init__(self, gpus: Iterable[GpuIndex], stated_bytes: int, remember_ns: int) -> None:
        """`stated_bytes`: what the operator wants for all services of a GPU together."""
        self.peaks = Peaks(remember_ns)
        self._stated_bytes = stated_bytes
        self._gpus = {gpu: _OfGpu() for gpu in gpus}

    @property
    def is_wanted(self) -> bool:
        return bool(self._stated_bytes) or self.peaks.remembers

    def of(self, gpu: GpuIndex) -> MemoryUse:
        return self._gpus[gpu].kept

    def look(
        self,
        gpu: GpuIndex,
        names: OnlineNames,
        by_pid: Mapping[int, int] | None,
        kv: Mapping[str, KvUse],
        now_ns: int,
        *,
        is_read: bool,
    ) -> None:
        """`by_pid`: bytes, as the card said last; None: it never did. `is_read`: just now. Else the pool may have moved
        since, and KV memory would seem to be other.
        """
        here = self._gpus[gpu]
        goes_by = names, by_pid, kv, here.kv
        if is_read and here.went_by == goes_by and self.peaks.see_again(gpu, now_ns):
            return
        here.went_by = None
        has = _uses(by_pid or {}, names.of_pid, kv)
        if last := self.peaks.last(gpu):
            as_before = names.untold if by_pid is not None else frozenset(names.of_pid.values())
            has |= {name: use for name, use in last.items() if name in as_before}
        if is_read:
            before, here.kv = here.kv, kv
            self.peaks.see(gpu, has, now_ns, _surely_plain(has, before, kv))
        had, none = self.peaks.of(gpu, now_ns), MemoryUse()
        needs = (
            OnlineNeed(had=had.get(name, none), has=has.get(name, none), bare_bytes=kv.get(name, NO_KV).bare)
            for name in {*had, *has, *kv}
        )
        here.kept = keep(needs, self._stated_bytes)
        here.went_by = goes_by if is_read else None


def _surely_plain(
    has: Mapping[str, MemoryUse], before: Mapping[str, KvUse], now: Mapping[str, KvUse]
) -> dict[str, int]:
    """Bytes of each name that are no KV memory, even if the card was read before what moves had come or gone."""
    sure: dict[str, int] = {}
    for name, use in has.items():
        is_kv = now.get(name, NO_KV)
        kv_bytes = max(before.get(name, NO_KV).mapped, is_kv.mapped + is_kv.coming)
        sure[name] = min(use.plain_bytes, max(0, use.plain_bytes + use.kv_bytes - kv_bytes))
    return sure


def _uses(by_pid: Mapping[int, int], name_of: Mapping[int, str], kv: Mapping[str, KvUse]) -> dict[str, MemoryUse]:
    """What each name has there, by what the card said last and what the pool says now."""
    used = Counter[str]()
    for pid, held in by_pid.items():
        if pid in name_of:
            used[name_of[pid]] += held
    of_kv = {name: min(held, kv.get(name, NO_KV).mapped) for name, held in used.items()}
    return {name: MemoryUse(plain_bytes=held - of_kv[name], kv_bytes=of_kv[name]) for name, held in used.items()}
