"""Ends the offline processes of a node that must become empty: asked first, killed after a grace period.

They stay stopped all the while: the brake holds every GPU. The channels of a process are enabled only in the moment
before it is killed, because the driver would wait for them in its teardown, under locks that online work needs. On a
Kubernetes node nobody is signalled: the controller evicts the pods, and this class says how long that takes.

A signal that waits for a descriptor (machine/signals.py) has stopped nobody and killed nobody: its process stays held,
and the node is not empty.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Collection
from dataclasses import InitVar, dataclass

from valved.clients.register import Register
from valved.config import Config
from valved.gate.freeze import KILL
from valved.machine.clock import Clock, Ticker
from valved.machine.ports import GatePort, ProcessPort
from valved.machine.signals import Delivery, SignalPort
from valved.model.events import EventKind
from valved.model.ids import ProcessId, Role
from valved.state.journal import Journal
from valved.state.registry import Books

SECOND_NS = 1_000_000_000
LOOK_NS = SECOND_NS // 4  # who has come, who has gone, whose time is over
STOP_NS, STOP_LOOK_NS = SECOND_NS // 2, SECOND_NS // 500  # how long a stop signal may take to arrive


@dataclass(eq=False, repr=False)
class Leaving:
    config: InitVar[Config]
    _gate: GatePort
    _books: Books
    _register: Register
    _journal: Journal
    _clock: Clock
    _processes: ProcessPort
    _signals: SignalPort

    def __post_init__(self, config: Config) -> None:
        self._then: Callable[[], None] = lambda: None
        self._grace_ns = round(config.leave_grace_s * SECOND_NS)
        self._ends_jobs = not config.kube.node  # on a Kubernetes node the controller ends them
        self._until_ns: dict[ProcessId, int] = {}  # whom we have asked, and when they are killed
        self._stopping: set[ProcessId] = set()  # they are to stand before they are killed
        self._since_ns: int | None = None  # somebody has been here for so long
        self._ticker = Ticker(self._clock, self._look)

    def present(self) -> set[ProcessId]:
        """Offline processes: welcomed, claimed and not here yet, a predecessor's that have not come back, or about to
        be killed or let go, whatever has become of their links."""
        clients = {entry.process for entry in self._books.with_role(Role.OFFLINE)}
        roots = {claim.root for claim in self._books.claims.values() if claim.role is Role.OFFLINE}
        owners = self._register.channels.leftovers.owners()
        others = roots | owners | self._stopping
        return clients | self._owed() | {process for process in others if not self._processes.is_gone(process)}

    def _owed(self) -> set[ProcessId]:
        return self._signals.waiting(signal.SIGKILL, signal.SIGCONT)

    def owes_signals(self) -> bool:
        return bool(self._owed())

    def since_s(self) -> float:
        """How long processes that must leave have stayed; 0 while none does."""
        return 0.0 if self._since_ns is None else (self._clock.now_ns() - self._since_ns) / SECOND_NS

    def begin(self, then: Callable[[], None]) -> None:
        """`then`: at each look that finds no offline process. Safe to call again: no process gets more time."""
        self._then = then
        if not self._ticker.runs:
            self._since_ns = self._clock.now_ns() if self.present() else None
            self._ticker.start(LOOK_NS)
            self._look()

    def take_back(self, frozen: Collection[ProcessId] = ()) -> None:
        """Processes that have been asked and are still here may stay, and go on unless `frozen` for another reason."""
        self._ticker.stop()
        self._since_ns = None
        self._until_ns.clear()
        for process in self._stopping.difference(frozen):
            self._signals.send(process, signal.SIGCONT)
        self._stopping.clear()

    def _look(self) -> None:
        now_ns = self._clock.now_ns()
        present = self.present()
        self._until_ns = {process: at_ns for process, at_ns in self._until_ns.items() if process in present}
        self._stopping &= present
        was_empty, self._since_ns = self._since_ns is None, (self._since_ns or now_ns) if present else None
        if not present:
            if not was_empty:
                self._journal.emit(EventKind.DRAINED, reason="no offline process is left")
            self._then()
        elif self._ends_jobs:
            self._ask(present - self._until_ns.keys(), now_ns)
            self._kill([process for process, at_ns in self._until_ns.items() if now_ns >= at_ns], now_ns)

    def _ask(self, processes: set[ProcessId], now_ns: int) -> None:
        for process in sorted(processes, key=lambda one: one.pid):
            self._until_ns[process] = now_ns + self._grace_ns
            self._signals.send(process, signal.SIGTERM)
            reason = f"offline work must leave this node: killed in {self._grace_ns // SECOND_NS} s"
            self._journal.emit(EventKind.LEAVING, reason=reason, pid=process.pid)

    def _kill(self, processes: list[ProcessId], now_ns: int) -> None:
        """Stopped first, so that nothing is launched while the channels are on. One without a signal yet stays held."""
        killed = self._signals.waiting(signal.SIGKILL)
        for process in processes:
            self._until_ns[process] = now_ns + SECOND_NS
            if process not in killed and self._signals.send(process, signal.SIGSTOP) is not Delivery.FAILED:
                self._stopping.add(process)
                self._end_stopped(process, now_ns + STOP_NS)

    def _end_stopped(self, process: ProcessId, until_ns: int) -> None:
        """Once the signal has reached all of its threads, which takes longer on a busy machine. One that it has not
        reached for want of a descriptor stays held: with its channels on it would run."""
        if process not in self._stopping:
            return
        now_ns = self._clock.now_ns()
        is_sent = process not in self._signals.waiting(signal.SIGSTOP, signal.SIGKILL, signal.SIGCONT)
        is_still = is_sent and self._processes.is_stopped(process.pid)
        if not is_still and not self._processes.is_gone(process) and (now_ns < until_ns or not is_sent):
            if now_ns < until_ns:
                self._clock.call_at_ns(now_ns + STOP_LOOK_NS, lambda: self._end_stopped(process, until_ns))
            return
        self._stopping.discard(process)
        for entry in [entry for entry in self._books.clients.values() if entry.process == process]:
            self._register.leave(entry.id, KILL)  # enables its channels
        left = self._register.channels.leftovers.take_of(process)
        if left:
            self._gate.channels.enable_foreign(left)
        self._signals.send(process, signal.SIGKILL)
        self._journal.emit(EventKind.KILLED, reason="it did not end within its time", pid=process.pid)
