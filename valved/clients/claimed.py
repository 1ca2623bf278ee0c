"""Books which processes are claimed for a role, and ends a service with its last client and its claimed process."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from valved.clients.accounts import LinkAccount
from valved.clients.departures import ANEW
from valved.clients.exits import Exits
from valved.clients.identity import NOT_YET, ClaimSource, Peer, Silence, own_cgroup
from valved.gate.wake import GateService
from valved.machine.ports import GatePort, ProcessPort
from valved.model.events import EventKind
from valved.model.ids import ClientId, ProcessId, Role, ServiceId
from valved.state.journal import Journal
from valved.state.registry import Books, ProcessClaim


@dataclass(eq=False, repr=False)
class ClaimedRoots:
    """`leave` ends a client; `ended`: a service is in no book any more; `changed`: the books differ; `pods`: on a
    Kubernetes node."""

    _gate: GatePort
    _books: Books
    _gating: GateService
    _journal: Journal
    _processes: ProcessPort
    _exits: Exits
    _leave: Callable[[ClientId, str], None]
    _ended: Callable[[ServiceId], None]
    _changed: Callable[[], None]
    pods: ClaimSource | None = None

    def claim(self, pid: int, start_time: int, role: Role, name: str) -> ProcessClaim | None:
        """Claim a process for a role. None: it is gone, or its number means another process by now."""
        root = ProcessId(pid=pid, start_time=start_time)
        if self._processes.start_time(pid) != start_time:
            return None
        known = self._books.claims.get(root)
        if known is not None and known.role is not role:
            self._drop_claim(known)
        cgroup = own_cgroup(pid, self._processes) if os.geteuid() == 0 else ""
        self._book_claim(root, role, name or self._processes.comm(pid), cgroup)
        return self._books.claims.get(root)

    def is_above_valved(self, pid: int) -> bool:
        """It is valved itself, or an ancestor: init, say, or a shell from which valved was started."""
        return any(process.pid == pid for process in self._processes.ancestors(os.getpid()))

    def _book_claim(self, root: ProcessId, role: Role, name: str, cgroup: str) -> None:
        known = self._books.claims.get(root)
        claim = self._books.claim(root, role, name, cgroup)
        if known is claim:
            return
        if role is Role.ONLINE:
            try:
                self._gating.add_service(claim.service, frozenset())
            except Exception:
                self._drop_service(claim.service, tell=False)  # with its claim: one without a gate protects nobody
                raise
        self._journal.emit(EventKind.CLAIMED, service=claim.service, reason=role.name.lower(), pid=root.pid, name=name)
        self.watch_root(root)
        self._changed()

    def pod_of(self, account: LinkAccount) -> str:
        """Its name; empty where it is no pod, or none that is known."""
        return self.pods.name_of(str(account.name)) if self.pods is not None else ""

    def ask_pods(self, peer: Peer) -> bool:
        """A peer without a claim may be in a pod that says what it is. False: that pod is not known yet."""
        if self.pods is None or self._books.find_claim(peer.chain, peer.cgroup) is not None:
            return True
        found = self.pods.claim_of(peer)
        if found is NOT_YET:
            return False
        if not isinstance(found, Silence):
            self._book_claim(peer.process, found.role, found.name, found.cgroup)
        return True

    def look_up(self, peer: Peer, wanted: int, former: frozenset[ProcessId]) -> bool:
        """Its claim, wherever it stands. `former`: a predecessor welcomed these as online. Their claims may be lost: a
        full disk took no state that names them. Each is claimed by itself then, without its control group: others may
        be in there. A name with a slash would be a pod's. False: its pod is not known yet."""
        is_known = self.ask_pods(peer)
        is_former = wanted == Role.ONLINE and peer.process in former
        if is_known and is_former and self._books.find_claim(peer.chain, peer.cgroup) is None:
            self._book_claim(peer.process, Role.ONLINE, peer.comm.replace("/", "-"), "")
        return is_known

    def watch_root(self, root: ProcessId) -> None:
        self._exits.await_end(root, lambda: self.root_gone(root))

    def root_gone(self, root: ProcessId) -> None:
        """A claimed process ended. Its service lives as long as one of its clients does, also one of a predecessor's
        that is not back yet: such a one is claimed in its place, or nobody would know whose it is."""
        self._exits.forget(root)
        claim = self._books.claims.get(root)
        if claim is None or self._books.services[claim.service].clients:
            return
        online = self._gating.online.get(claim.service)
        away = sorted(online.away if online else (), key=lambda process: process.pid)
        heirs = (one for one in away if one not in self._books.claims and not self._processes.is_gone(one))
        if heir := next(heirs, None):
            self._books.move_claim(claim, heir)
            self.watch_root(heir)
        else:
            self._drop_claim(claim)

    def _drop_claim(self, claim: ProcessClaim) -> None:
        self._exits.forget(claim.root)
        for client in list(self._books.services[claim.service].clients):
            self._leave(client, ANEW)
        if claim.service in self._books.services:
            self._drop_service(claim.service)

    def drop_if_empty(self, service: ServiceId, *, was_welcome: bool = True) -> None:
        """A service without clients ends with its claimed process; an unclaimed one ends at once."""
        entry = self._books.services.get(service)
        if entry is None or entry.clients:
            return
        if entry.root is None:
            self._drop_service(service, tell=was_welcome)
        else:
            self.watch_root(entry.root)  # it may have ended before its clients

    def _drop_service(self, service: ServiceId, *, tell: bool = True) -> None:
        if service in self._gating.online:
            self._gating.remove_service(service)
        else:
            self._gate.remove_service(service)  # whatever its hooks took of the gate
        entry = self._books.services[service]
        self._books.drop_service(service)
        if tell:
            self._journal.emit(EventKind.ENDED, service=service, reason=entry.role.name.lower(), name=entry.name)
        self._ended(service)
        self._changed()
