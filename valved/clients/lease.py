"""Tells each offline client whether it must stop itself if valved dies: a word in its control page, which counts once
the lease is over."""

from __future__ import annotations

from valved.gate.wake import GateService
from valved.machine.ports import GatePort
from valved.model.ids import GpuIndex, Role
from valved.state.registry import COME_BACK_SERVICE, DEAF_SERVICE, GUARD_SERVICE, Books, ClientEntry

UNSEEN = {GUARD_SERVICE, COME_BACK_SERVICE, DEAF_SERVICE}  # holds for online work that is in no book yet


class LeaseFlags:
    def __init__(self, gate: GatePort, books: Books, gating: GateService) -> None:
        self._gate = gate
        self._books = books
        self._gating = gating
        self._is_closed = False  # the brake holds every GPU

    def set_closed(self, is_closed: bool) -> None:
        """Whether the brake holds every GPU."""
        self._is_closed = is_closed
        self.refresh()

    def refresh(self) -> None:
        shared = self._shared()
        for entry in self._books.with_role(Role.OFFLINE):
            self._set(entry, shared)

    def client_joined(self, entry: ClientEntry) -> None:
        """Before its welcome: valved may die before it hears of a channel."""
        if entry.role is Role.OFFLINE:
            self._set(entry, self._shared())

    def _shared(self) -> set[GpuIndex]:
        """GPUs that online work uses, or may use unseen."""
        services = self._books.services
        used = (services[online].gpus for online in self._gating.online if online in services)
        unseen = {gpu for gpu, account in self._gating.gpus.items() if not UNSEEN.isdisjoint(account.holders)}
        return unseen.union(*used)

    def _set(self, entry: ClientEntry, shared: set[GpuIndex]) -> None:
        """One that has told of no GPU yet may come to use any."""
        gpus = self._books.services[entry.service].gpus
        flag = self._is_closed or (not shared.isdisjoint(gpus) if gpus else bool(shared))
        if entry.lease_flag is not flag:
            entry.lease_flag = flag
            self._gate.set_online_registered(entry.id, flag)
