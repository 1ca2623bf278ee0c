"""Judges a process that asks to be welcomed: which one it is, which place it may have, and whether there is room."""

from __future__ import annotations

from typing import Protocol

from valved.abi.link import ABI, Body, Hello, LinkType, Refusal, RefusedMessage
from valved.clients.accounts import LinkAccount
from valved.clients.complaints import AT_ONCE, TELL_NS
from valved.clients.deaf import DeafHold
from valved.clients.identity import Admitted, NotAdmitted, Peer, identify, place
from valved.clients.outbox import Arrived
from valved.clients.turns import Buckets
from valved.clients.welcomes import Welcomes
from valved.config import QuotaTable
from valved.fds import is_scarce
from valved.gate.wake import GateService
from valved.machine.clock import Clock
from valved.machine.ports import ProcessPort
from valved.model.events import EventKind
from valved.model.ids import ProcessId, Role, ServiceId
from valved.state.journal import Journal
from valved.state.registry import Books

CLIENT_SLOTS = 4096  # MAX_CLIENTS of valved/native/internal.h
REFUSALS_KEPT = 4096  # processes whose last refusal is remembered


class Connection(Protocol):
    """One peer's socket, as this service sees it."""

    @property
    def pid(self) -> int: ...

    @property
    def uid(self) -> int: ...

    @property
    def account(self) -> LinkAccount: ...

    def send(
        self, kind: LinkType, body: Body, seq: int, fds: tuple[int, ...] = (), arrived: Arrived | None = None
    ) -> bool: ...

    def close(self) -> None: ...

    def belong(self, account: LinkAccount) -> None:
        """It is found to be of that one."""
        ...

    def is_dead(self) -> bool:
        """The process that made it has ended, and its number may be another's."""
        ...

    def has_left(self) -> bool:
        """The other end is closed: nobody waits for an answer any more."""
        ...


class Roomless:
    """Processes that would be taken if there was room, or an answer in time. Of the account that has most of them the
    oldest is forgotten first."""

    def __init__(self) -> None:
        self._account: dict[ProcessId, LinkAccount] = {}
        self._of: dict[LinkAccount, dict[ProcessId, None]] = {}

    def __contains__(self, process: ProcessId) -> bool:
        return process in self._account

    def put(self, process: ProcessId, account: LinkAccount) -> None:
        self.drop(process)
        self._account[process] = account
        self._of.setdefault(account, {})[process] = None
        if len(self._account) > REFUSALS_KEPT:
            most = max(self._of.values(), key=len)
            self.drop(next(iter(most)))

    def drop(self, process: ProcessId) -> None:
        account = self._account.pop(process, None)
        if account is None:
            return
        del self._of[account][process]
        if not self._of[account]:
            del self._of[account]


class Admission:
    def __init__(
        self,
        books: Books,
        gating: GateService,
        journal: Journal,
        clock: Clock,
        processes: ProcessPort,
        quota: QuotaTable,
        welcomes: Welcomes,
    ) -> None:
        self._books = books
        self._gating = gating
        self._journal = journal
        self._clock = clock
        self._processes = processes
        self._quota = quota
        self.welcomes = welcomes
        self.deaf = DeafHold(gating, journal, clock)
        self._refused: dict[ProcessId, str] = {}
        self._roomless = Roomless()
        self._untold: dict[ProcessId, str] = {}  # refusals that the journal has not: its account was told of too often
        self._told = Buckets(share=1.0, burst_ns=AT_ONCE * TELL_NS)

    def peer(self, connection: Connection, seq: int) -> Peer | None:
        """The process at the other end. None: it is gone, it waits no more, or it could not be looked at."""
        try:
            peer = identify(connection.pid, connection.uid, self._processes)
            if peer is None or connection.is_dead():  # last: what was read is of the process that connected
                return None
            connection.belong(peer.account)
            if connection.has_left():
                self._roomless.put(peer.process, peer.account)  # valved came to it too late
                return None
            return peer
        except OSError as error:
            text = "valved is out of descriptors" if is_scarce(error) else "valved may not see this process (hidepid)"
            self._tell(connection, seq, NotAdmitted(code=Refusal.QUOTA, text=text))
            self.count_refusal(Refusal.QUOTA)
            if is_scarce(error):
                self.deaf.not_taken()
            return None

    def judge(self, hello: Hello, peer: Peer, *, is_scarce: bool) -> Admitted | NotAdmitted:
        given = place(_role(hello.wanted_role), peer, self._books)
        return given if isinstance(given, NotAdmitted) else self._no_room(peer, given, is_scarce) or given

    def _no_room(self, peer: Peer, given: Admitted, is_scarce: bool) -> NotAdmitted | None:
        """Containers share users: what counts is the process, its control group or its claim. A process that is
        claimed as online has room that no other process can take."""
        if given.service in self._gating.online:
            return None
        quota, books = self._quota, self._books
        most = quota.clients_per_uid if peer.uid else quota.root_clients
        of_claim = len(books.services[given.service].clients) if given.service in books.services else 0
        if books.per_process[peer.process] >= quota.clients_per_process:
            text = f"process {peer.process.pid} has {quota.clients_per_process} clients already"
        elif max(books.per_home[peer.uid, peer.cgroup], of_claim) >= most:
            text = f"user {peer.uid} has {most} clients there already"
        elif len(books.clients) >= CLIENT_SLOTS - quota.kept_for_online:
            text = "the last places are kept for online services"
        elif is_scarce:
            text = "the last descriptors are kept for online services"
        else:
            text = self.welcomes.why_not(peer)
        if not text:
            return None
        return NotAdmitted(code=Refusal.QUOTA, text=text)

    def took(self, peer: Peer, service: ServiceId) -> None:
        """It is welcomed now."""
        self._untold.pop(peer.process, None)
        self._roomless.drop(peer.process)
        if service not in self._gating.online:
            self.welcomes.took(peer)

    def refuse(self, connection: Connection, seq: int, why: NotAdmitted, peer: Peer) -> None:
        """Each is counted. What processes of an account cause in a loop never pushes a pause out of the audit file."""
        if why.code is Refusal.QUOTA:
            self._roomless.put(peer.process, peer.account)
        self._tell(connection, seq, why)
        self._gating.counters.refuse(why.code.name.lower())
        now_ns = self._clock.now_ns()
        if self._refused.pop(peer.process, None) != why.text:  # a refused process asks again, for life: told once
            if self._told.wait_ns(peer.account, now_ns):
                _keep(self._untold, peer.process, why.text)
                return
            self._told.took(peer.account, TELL_NS, now_ns)
            self._journal.emit(EventKind.REFUSED, reason=why.text, pid=peer.process.pid, comm=peer.comm, uid=peer.uid)
        self._untold.pop(peer.process, None)
        _keep(self._refused, peer.process, why.text)

    def refuse_for_want(self, connection: Connection, seq: int, peer: Peer, role: Role, *, has_ended: bool) -> None:
        """Valved lacks what it would take, or the process ended meanwhile."""
        if role is not Role.OFFLINE and not has_ended:
            self.deaf.not_taken()
        why = NotAdmitted(code=Refusal.QUOTA, text="valved is out of descriptors or memory")
        self.refuse(connection, seq, why, peer)

    def waits_for_room(self, process: ProcessId) -> bool:
        """It asks again, and is taken when there is room. Who was turned away unheard may be any."""
        return process in self._roomless or self.deaf.may_wait()

    def why_untold(self, pid: int) -> str:
        """Why a process was refused of which the journal was not told; empty: it was not."""
        return next((why for process, why in self._untold.items() if process.pid == pid), "")

    def _tell(self, connection: Connection, seq: int, why: NotAdmitted) -> None:
        if self.welcomes.may_tell(connection.account):
            connection.send(LinkType.REFUSED, RefusedMessage(code=why.code, text=why.text), seq)

    def count_refusal(self, code: Refusal) -> None:
        self._gating.counters.refuse(code.name.lower())


def why_not(hello: Hello) -> NotAdmitted | None:
    """This valved refuses it, whatever the client is."""
    if not hello.abi_min <= ABI <= hello.abi_max:
        text = f"this valved speaks link ABI {ABI}, the client {hello.abi_min} to {hello.abi_max}"
        return NotAdmitted(code=Refusal.VERSION, text=text)
    return None


def _keep(refusals: dict[ProcessId, str], process: ProcessId, why: str) -> None:
    refusals[process] = why
    if len(refusals) > REFUSALS_KEPT:
        del refusals[next(iter(refusals))]


def _role(value: int) -> Role:
    return Role(value) if value in set(Role) else Role.NONE
