"""Ends the offline processes of a node that must become empty: asked first, killed after a grace period.

They stay stopped all the while: the brake holds every GPU. How one is killed: gate/ending.py. On a Kubernetes node
nobody is signalled: the controller evicts the pods, and this class says how long that takes.

A signal that waits for a descriptor (machine/signals.py) has stopped nobody and killed nobody: its process stays held,
and the node is not empty.
"""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Callable
from dataclasses import InitVar, dataclass

from valved.clients.register import Register
from valved.config import Config
from valved.gate.ending import Endings
from valved.gate.freeze import Ladder
from valved.machine.clock import Clock, Ticker
from valved.machine.ports import ProcessPort
from valved.machine.signals import SignalPort
from valved.model.events import EventKind
from valved.model.ids import ProcessId, Role
from valved.model.states import LeaverState
from valved.state.journal import Journal
from valved.state.registry import Books

SECOND_NS = 1_000_000_000
LOOK_NS = SECOND_NS // 4  # who has come, who has gone, whose time is over


@dataclass(eq=False, repr=False)
class Leaving:
    config: InitVar[Config]
    _books: Books
    _register: Register
    _journal: Journal
    _clock: Clock
    _processes: ProcessPort
    _signals: SignalPort
    _endings: Endings
    _ladder: Ladder

    def __post_init__(self, config: Config) -> None:
        self._then: Callable[[], None] = lambda: None
        self._grace_ns = round(config.leave_grace_s * SECOND_NS)
        self._ends_jobs = not config.kube.node  # on a Kubernetes node the controller ends them
        self._until_ns: dict[ProcessId, int] = {}  # whom we have asked, and when they are killed
        self._ended: Counter[ProcessId] = Counter()  # whose time is over, and how often they were killed for it
        self._since_ns: int | None = None  # somebody has been here for so long
        self._ticker = Ticker(self._clock, self._look)

    def present(self) -> set[ProcessId]:
        """Offline processes: welcomed, claimed and not here yet, a predecessor's that have not come back, frozen, or
        about to be killed or let go, whatever has become of their links."""
        clients = {entry.process for entry in self._books.with_role(Role.OFFLINE)}
        roots = {claim.root for claim in self._books.claims.values() if claim.role is Role.OFFLINE}
        owners = self._register.channels.leftovers.owners()
        others = {process for process in roots | owners if not self._processes.is_gone(process)}
        return clients | others | self._ladder.standing()

    def has_asked(self, process: ProcessId) -> bool:
        """valved itself has told it to end."""
        return process in self._until_ns

    def owes_signals(self) -> bool:
        return bool(self._signals.waiting(signal.SIGCONT) or self._endings.to_end())

    def since_s(self) -> float:
        """How long processes that must leave have stayed; 0 while none does."""
        return 0.0 if self._since_ns is None else (self._clock.now_ns() - self._since_ns) / SECOND_NS

    def leavers(self) -> tuple[LeaverState, ...]:
        """While they must leave: who has not yet, and what that takes."""
        present = self.present() if self._ticker.runs else ()
        return tuple(self._leaver(process) for process in sorted(present, key=lambda one: one.pid))

    def _leaver(self, process: ProcessId) -> LeaverState:
        until_ns = 0
        if process in self._signals.waiting(signal.SIGTERM, signal.SIGSTOP, signal.SIGKILL):
            waits_for = "its signal needs a free descriptor of valved"
        elif process in self._endings and self._ended[process] < 2:
            waits_for = "it is being stopped, and is killed then"
        elif process in self._ended:
            waits_for = "it was killed, and the kernel has not ended it yet"
        elif not self._ends_jobs:
            waits_for = "the controller evicts its pod, as disruption budgets allow"
        else:
            waits_for, until_ns = "it was asked to end", self._until_ns.get(process, 0)
        return LeaverState(pid=process.pid, waits_for=waits_for, until_ns=until_ns)

    def begin(self, then: Callable[[], None]) -> None:
        """`then`: at each look that finds no offline process. Safe to call again: no process gets more time."""
        self._then = then
        if not self._ticker.runs:
            self._since_ns = self._clock.now_ns() if self.present() else None
            self._ticker.start(LOOK_NS)
            self._look()

    def take_back(self) -> None:
        """Who has been asked and is still here may stay, and goes on unless it is frozen for another reason."""
        self._ticker.stop()
        self._since_ns = None
        self._until_ns.clear()
        self._ended.clear()
        self._endings.take_back(self._ladder.frozen())

    def _look(self) -> None:
        now_ns = self._clock.now_ns()
        present = self.present()
        self._until_ns = {process: at_ns for process, at_ns in self._until_ns.items() if process in present}
        self._ended = Counter({process: times for process, times in self._ended.items() if process in present})
        was_empty, self._since_ns = self._since_ns is None, (self._since_ns or now_ns) if present else None
        if not present:
            if not was_empty:
                self._journal.emit(EventKind.DRAINED, reason="no offline process is left")
            self._then()
        elif self._ends_jobs:
            self._ask(present - self._until_ns.keys(), now_ns)
            for process in [process for process, at_ns in self._until_ns.items() if now_ns >= at_ns]:
                self._until_ns[process] = now_ns + SECOND_NS  # again, if it is here
                self._ended[process] += 1
                self._endings.begin(process, "did not leave within its time")

    def _ask(self, processes: set[ProcessId], now_ns: int) -> None:
        for process in sorted(processes, key=lambda one: one.pid):
            self._until_ns[process] = now_ns + self._grace_ns
            self._signals.send(process, signal.SIGTERM)
            reason = f"offline work must leave this node: killed in {self._grace_ns // SECOND_NS} s"
            self._journal.emit(EventKind.LEAVING, reason=reason, pid=process.pid)
