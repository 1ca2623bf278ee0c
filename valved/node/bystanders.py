"""Keeps offline work off GPUs that a process uses without Valve, on a machine without Kubernetes.

A service that was started without `valve run` launches unheard, so nothing would stop offline work for it. NVML lists
who computes on a card; whoever is in that list and in no book of valved closes the card. An offline job that runs
without the shim, or past it (clients/untold.py), is found the same way, and is stopped by a signal. On a Kubernetes
node valved/kube does this.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from valved.clients.identity import identify
from valved.clients.untold import LOOKS_BEFORE_FREEZE, LOOKS_TO_CLOSE, NO_ROOM, NO_SHIM, UNTOLD, Untold
from valved.gate.freeze import Ladder
from valved.gate.wake import GateService
from valved.machine.ports import GpuInfo, ProcessPort
from valved.model.events import EventKind
from valved.model.ids import GpuIndex, ProcessId, Role
from valved.state.journal import Journal
from valved.state.registry import GUARD_SERVICE, Books, ClientEntry, ProcessClaim

REST_BEATS = 5  # while there is no offline work to stop: nobody is hurt yet, and NVML takes locks of the driver
LOOKS_BEFORE_ASKING = (
    60  # one that valved refused for want of room is let go then: it stands still by its shim's own hand
)
UNHEARD = "uses the GPU without Valve (start it with valve run --online -- CMD)"
NOT_CONNECTED = "uses the GPU, was started with Valve and is not connected to valved"


@dataclass(eq=False, repr=False)
class Bystanders:
    _books: Books
    _gating: GateService
    _processes: ProcessPort
    _journal: Journal
    _gpus: Sequence[GpuInfo]
    _ladder: Ladder
    _expected: Callable[[], set[ProcessId]]  # owners of channels that a predecessor left: they come back, or are let go
    _waits_for_room: Callable[[ProcessId], bool]  # valved refused it for want of a place

    def __post_init__(self) -> None:
        self._users: dict[GpuIndex, tuple[str, ...]] = {}  # who uses a GPU unheard, in words
        self.has_looked = False
        self._looks: dict[ProcessId, int] = {}  # at claimed offline jobs without the shim
        self._untold = Untold(self._books, self._processes, self._gpus)
        self._standing: set[ProcessId] = set()  # registered ones that were frozen
        self._found_none: tuple[int, Mapping[bytes, Mapping[int, int]]] | None = None  # at which books, where

    def reason(self, gpu: GpuIndex) -> str:
        """Why the guard closes this GPU; nothing where it does not."""
        return "; ".join(self._users.get(gpu, ()))

    def needs_cards(self, beat: int) -> bool:
        has_offline = any(claim.role is Role.OFFLINE for claim in self._books.claims.values())
        return beat % REST_BEATS == 0 or has_offline or any(self._books.with_role(Role.OFFLINE))

    def look(self, cards: Mapping[bytes, Mapping[int, int]]) -> None:
        """Close GPUs that a process without Valve uses, open the others. A card that does not answer stays as it is."""
        if (asked := (self._books.revision, cards)) == self._found_none:
            return
        self._untold.look(cards)
        self._found_none, has_found = None, bool(self._untold.found_at(0))
        watched = self._untold.registered()
        back = {process.pid: process for process in self._expected()}
        ungated: dict[ProcessId, str] = {}
        for gpu in self._gpus:
            if gpu.uuid not in cards:
                continue
            users = []
            for pid in cards[gpu.uuid]:
                if (client := watched.get(pid)) is not None:
                    users += self._words_of(client, gpu.index)
                    continue
                has_found = True
                try:
                    started = self._processes.start_time(pid)
                except PermissionError:  # it is there: one of ours that hides itself by now, or a stranger
                    if pid not in back or self._processes.is_gone(back[pid]):
                        users.append(f"process {pid} {UNHEARD}")
                    continue
                if started is None or pid == os.getpid() or self._processes.is_ending(pid, started):
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
        self._stop(ungated)
        self._stop_untold(watched.values())
        self._gating.set_standing(GUARD_SERVICE, frozenset(gpu for gpu, users in self._users.items() if users))
        self.has_looked |= all(gpu.uuid in cards for gpu in self._gpus)
        if not has_found and not any(self._users.values()):  # also on a card that does not answer
            self._found_none = asked  # last: what failed before is done anew

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
            if looks < LOOKS_BEFORE_FREEZE:  # after a restart of valved its shim comes back by itself
                continue
            waits = self._waits_for_room(process)
            why = f"{ungated[process]} uses a GPU {NO_ROOM if waits else NO_SHIM}"
            if not waits:
                self._ladder.freeze_stranger(process, why)
            elif looks < LOOKS_BEFORE_ASKING:  # a successor does not know that it waits: it lets it go
                self._ladder.freeze_untold(process, why)
            else:
                self._ladder.let_stranger_go(process, "it may ask again whether there is room")
                self._looks[process] = 0

    def _words_of(self, client: ClientEntry, gpu: GpuIndex) -> list[str]:
        """Of an online process whose launches there stop nobody."""
        if client.role is Role.OFFLINE or self._untold.looks(client.process, gpu) < LOOKS_TO_CLOSE:
            return []
        return [f"process {client.process.pid} ({client.comm}) uses the GPU {UNTOLD}"]

    def _stop_untold(self, clients: Iterable[ClientEntry]) -> None:
        """Registered offline processes that no gate stops. If valved hears of the channels after all (their proof was
        late), it stops them by the gate."""
        offline = {client.process: client for client in clients if client.role is Role.OFFLINE}
        found = self._untold.found_at(LOOKS_BEFORE_FREEZE) & offline.keys()
        for process in found:
            name = f"process {process.pid} ({offline[process].comm})"
            self._ladder.freeze_untold(process, f"{name} uses a GPU {UNTOLD}")
        for process in (self._standing & offline.keys()) - found:
            self._ladder.let_stranger_go(process, "valved was told of its channels")
        self._standing = found
