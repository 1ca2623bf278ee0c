"""Keeps offline work off GPUs that a process uses without Valve, on a machine without Kubernetes.

A service that was started without `valve run` launches unheard, so nothing would stop offline work for it. NVML lists
who computes on a card; whoever is in that list and in no book of valved closes the card. An offline job that runs
without the shim is found the same way, and is stopped by a signal. On a Kubernetes node valved/kube does this.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from valved.clients.identity import identify
from valved.gate.wake import GateService
from valved.machine.cards import CardReader, CardUse
from valved.machine.clock import beat_of
from valved.machine.ports import GpuInfo, ProcessPort
from valved.model.events import EventKind
from valved.model.ids import GpuIndex, ProcessId, Role
from valved.state.journal import Journal
from valved.state.registry import GUARD_SERVICE, Books, ProcessClaim

LOOK_S = 1.0  # while there is offline work to stop
REST_S = 5.0  # before that: nobody is hurt yet, and NVML takes locks of the driver
LOOKS_BEFORE_FREEZE = 5  # of a job that is claimed as offline: after a restart of valved its shim comes back by itself
UNHEARD = "uses the GPU without Valve (start it with valve run --online -- CMD)"
NOT_CONNECTED = "uses the GPU, was started with Valve and is not connected to valved"
Freeze = Callable[[ProcessId, str], bool]


@dataclass(eq=False, repr=False)
class Bystanders:
    _books: Books
    _gating: GateService
    _processes: ProcessPort
    _journal: Journal
    _gpus: Sequence[GpuInfo]
    _freeze: Freeze
    _expected: Callable[[], set[ProcessId]]  # owners of channels that a predecessor left: they come back, or are let go
    _seen: Callable[[Mapping[bytes, CardUse]], None] = lambda cards: None  # who needs the same figures

    def __post_init__(self) -> None:
        self._users: dict[GpuIndex, tuple[str, ...]] = {}  # who uses a GPU unheard, in words
        self.has_looked = False
        self._looks: dict[ProcessId, int] = {}  # at claimed offline jobs without the shim
        self._found_none: tuple[int, Mapping[bytes, Mapping[int, int]]] | None = None  # at which books, where

    def reason(self, gpu: GpuIndex) -> str:
        """Why the guard closes this GPU; nothing where it does not."""
        return "; ".join(self._users.get(gpu, ()))

    async def run(self) -> None:
        """For as long as valved lives."""
        reader = CardReader()
        try:
            while True:
                cards = await reader.read()
                self.look({uuid: card.by_pid for uuid, card in cards.items()})
                self._seen(cards)
                has_offline = any(claim.role is Role.OFFLINE for claim in self._books.claims.values())
                has_offline |= any(self._books.with_role(Role.OFFLINE))
                await beat_of(LOOK_S if has_offline else REST_S)
        finally:
            reader.leave()

    def look(self, cards: Mapping[bytes, Mapping[int, int]]) -> None:
        """Close GPUs that a process without Valve uses, open the others. A card that does not answer stays as it is."""
        if (asked := (self._books.revision, cards)) == self._found_none:
            return
        self._found_none = asked
        # A hook alone stops and hears nothing.
        shims = (client for client in self._books.clients.values() if client.role is not Role.HOOK)
        watched = {client.process.pid for client in shims}  # a number is its process's until its client has left
        back = {process.pid: process for process in self._expected()}
        ungated: dict[ProcessId, str] = {}
        for gpu in self._gpus:
            if gpu.uuid not in cards:
                continue
            users = []
            for pid in cards[gpu.uuid]:
                if pid in watched:
                    continue
                self._found_none = None
                try:
                    started = self._processes.start_time(pid)
                except PermissionError:  # it is there: one of ours that hides itself by now, or a stranger
                    if pid not in back or self._processes.is_gone(back[pid]):
                        users.append(f"process {pid} {UNHEARD}")
                    continue
                if started is None or pid == os.getpid():
                    continue
                process = ProcessId(pid=pid, start_time=started)
                if back.get(pid) == process:
                    continue
                name, claim = f"process {pid} ({self._processes.comm(pid)})", self._claim_of(process)
                if claim is not None and claim.role is Role.OFFLINE:
                    ungated[process] = name
                else:
                    users.append(f"{name} {UNHEARD if claim is None else NOT_CONNECTED}")
            self._set(gpu.index, tuple(users))
        if any(self._users.values()):  # on a card that does not answer
            self._found_none = None
        self._stop(ungated)
        self._gating.set_standing(GUARD_SERVICE, frozenset(gpu for gpu, users in self._users.items() if users))
        self.has_looked |= all(gpu.uuid in cards for gpu in self._gpus)

    def _set(self, gpu: GpuIndex, users: tuple[str, ...]) -> None:
        if users == self._users.get(gpu, ()):
            return
        self._users[gpu] = users
        self._journal.emit(EventKind.GUARD, gpus=(gpu,), reason=f"guarded: {self.reason(gpu)}" if users else "open")

    def _claim_of(self, process: ProcessId) -> ProcessClaim | None:
        """The claim on a process or on its parents. A pid alone would also match a later process of that number."""
        peer = identify(process.pid, 0, self._processes)
        return self._books.find_claim(peer.chain, peer.cgroup) if peer is not None else None

    def _stop(self, ungated: Mapping[ProcessId, str]) -> None:
        self._looks = {process: self._looks.get(process, 0) + 1 for process in ungated}
        for process, looks in self._looks.items():
            if looks >= LOOKS_BEFORE_FREEZE:
                self._freeze(process, ungated[process])
