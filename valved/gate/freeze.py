"""When a gate call fails: the offline processes of that GPU are frozen while online holds it, and killed in the end.

A frozen process launches nothing new, but what it queued still runs: this rung protects later launches, not the one at
hand. It ends when the gate call comes back well after all (the native side tries again for as long as the GPU is held):
what is off needs no freezing, and a process that stands still cannot carry out what a reclaim orders. For that reason a
process that is late to carry out an order is given some time before it is frozen. How one is killed: gate/ending.py.

Before a process is frozen, its control page tells it to hold its launches (native/walk.c, watchdog.c). This order
stands when its link or valved ends, until a valved takes it back. So the process may be let go at any such end.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Any

from valved.config import LadderTable
from valved.gate.edges import DRIVER_CALLS
from valved.gate.ending import Endings
from valved.gate.wake import GateService
from valved.machine.clock import Clock, TimerHandle
from valved.machine.ports import ProcessPort
from valved.machine.signals import Delivery, SignalPort
from valved.machine.stamps import Stamp
from valved.model.events import EventKind
from valved.model.ids import ClientId, GpuIndex, ProcessId, Role
from valved.model.statuses import status_text
from valved.state.journal import Journal
from valved.state.registry import Books, ClientEntry

SECOND_NS = 1_000_000_000
LATE_NS = 200_000_000  # ten times what the native side allows for one order


@dataclass(frozen=True, slots=True)
class Frozen:
    """A process that stands, also when its link has ended since."""

    entry: ClientEntry
    gpus: frozenset[GpuIndex]
    timer: TimerHandle | None


@dataclass(eq=False, repr=False)
class Ladder:
    _books: Books
    _gating: GateService
    _journal: Journal
    _clock: Clock
    _settings: LadderTable
    _signals: SignalPort
    _processes: ProcessPort
    _endings: Endings

    def __post_init__(self) -> None:
        self._late: set[GpuIndex] = set()  # where a process has some more time to carry out an order
        self._strangers: set[ProcessId] = set()  # stopped, and said so
        self._untold: set[ProcessId] = set()  # of them, those that valved may yet be told of
        self._frozen: dict[ClientId, Frozen] = {}
        self._inherited: set[ProcessId] = set()  # a predecessor's, until they are let go
        self._is_over = False  # valved ends: no process is frozen any more

    def frozen(self) -> list[ProcessId]:
        return [frozen.entry.process for frozen in self._frozen.values()]

    def standing(self) -> set[ProcessId]:
        """Processes that are stopped or will be, to be let go or killed later, with or without a link."""
        frozen = {process for process in {*self.frozen(), *self._inherited} if not self._processes.is_gone(process)}
        return frozen | self._endings.present() | self._signals.waiting(signal.SIGCONT)

    def to_release(self) -> set[ProcessId]:
        """Processes that a successor has to let go: they are or may be frozen, or have not got their signal to go
        on."""
        untold = {process for process in self._untold if not self._processes.is_gone(process)}
        stands = {*self.frozen(), *self._inherited, *self._endings.to_release(), *self._signals.waiting(signal.SIGCONT)}
        return (stands | untold) - self._endings.to_end()

    def to_end(self) -> set[ProcessId]:
        """Processes that a successor has to end."""
        return self._endings.to_end()

    def take_up(self, process: ProcessId) -> None:
        """End a process that a predecessor was about to end. Its channels may be off: they are known by now."""
        self._endings.begin(process, "a valved that ended meanwhile was about to kill it", is_final=True)

    def release(self, process: ProcessId) -> None:
        """Let a process go that a predecessor froze, in the next turn of the loop: by then the services of that one
        hold again, and the link is open. It joins again, and is gated like any other."""
        self._inherited.add(process)
        self._clock.call_at_ns(self._clock.now_ns(), lambda: self._release(process))

    def _release(self, process: ProcessId) -> None:
        self._inherited.discard(process)
        if process not in self._endings:
            self._signals.send(process, signal.SIGCONT)

    def freeze_stranger(self, process: ProcessId, why: str) -> bool:
        """An offline process that valved cannot gate, as it never registered or told of no channel. It is not let go
        again: its pod must end. True: it stands."""
        if not self._settings.freeze:
            return False
        delivery = self._signals.send(process, signal.SIGSTOP)
        self._signals.keep_standing(process)
        if delivery is not Delivery.DONE:
            return False
        if process not in self._strangers:
            self._strangers = {one for one in self._strangers if not self._processes.is_gone(one)} | {process}
            self._journal.emit(EventKind.FROZEN, reason=why, pid=process.pid)
        return True

    def freeze_untold(self, process: ProcessId, why: str) -> None:
        """The same of a registered one whose channels may be told of yet. While it stands its shim cannot come back to
        a successor. So that one lets it go, and freezes it anew if it still cannot gate it."""
        if process in self._untold:  # somebody else may have let it go on
            self.freeze_stranger(process, why)
        elif self._settings.freeze:
            self._untold = {one for one in self._untold if not self._processes.is_gone(one)} | {process}
            self._gating.listener.about_to_freeze(lambda: self._stop_untold(process, why))

    def _stop_untold(self, process: ProcessId, why: str) -> None:
        if process in self._untold:  # not let go meanwhile
            self.freeze_stranger(process, why)

    def let_stranger_go(self, process: ProcessId, why: str) -> None:
        """It can be gated after all."""
        self._strangers.discard(process)
        self._untold.discard(process)
        if self._settings.freeze and process not in self._endings and process not in self.frozen():
            self._signals.send(process, signal.SIGCONT)
            self._journal.emit(EventKind.THAWED, reason=why, pid=process.pid)

    def gate_failed(self, stamp: Stamp) -> None:
        if self._is_over or not (self._settings.freeze and stamp.gpu in self._gating.ungated()):
            return
        if self._gating.reach(stamp.gpu) in DRIVER_CALLS:
            self._freeze(stamp)
        elif stamp.gpu not in self._late:
            self._late.add(stamp.gpu)
            self._clock.call_at_ns(self._clock.now_ns() + LATE_NS, lambda: self._still_failed(stamp))

    def _still_failed(self, stamp: Stamp) -> None:
        self._late.discard(stamp.gpu)
        if not self._is_over and stamp.gpu in self._gating.ungated():
            self._freeze(stamp)

    def _freeze(self, stamp: Stamp) -> None:
        doomed = self._endings.to_end()  # they stand for good
        on_gpu = self._on_gpu(stamp.gpu)
        fresh = [entry for entry in on_gpu if entry.id not in self._frozen and entry.process not in doomed]
        if not fresh:
            return
        for entry in fresh:
            self._frozen[entry.id] = Frozen(entry, frozenset(entry.gpus()), self._kill_timer(entry.id))
        self._gating.want_prompt("frozen", True)
        frozen = [self._frozen[entry.id] for entry in fresh]
        self._gating.listener.about_to_freeze(lambda: self._stop(frozen, stamp))

    def _stop(self, frozen: list[Frozen], stamp: Stamp) -> None:
        still = [one.entry for one in frozen if self._frozen.get(one.entry.id) is one]  # some may be thawed by now
        for entry in still:
            if self._signals.send(entry.process, signal.SIGSTOP) is Delivery.FAILED:
                self._forget(entry.id)
            else:
                self._record(EventKind.FROZEN, entry, f"the stop failed: {status_text(stamp.status)}")

    def thaw(self) -> None:
        """A GPU may have opened, or stopped after all: let those run that need not be held back by signals."""
        if not self._frozen:
            return
        ungated = self._gating.ungated()  # first: the stamps that this reads may come here themselves
        for client, frozen in list(self._frozen.items()):
            if client in self._frozen and not frozen.gpus & ungated:
                self._let_go(client, "its GPUs are free again, or its channels are stopped")

    def let_all_go(self) -> None:
        """Valved ends. No process is frozen from here on."""
        self._is_over = True
        for client in list(self._frozen):
            self._let_go(client, "valved ends")

    def _let_go(self, client: ClientId, reason: str) -> None:
        entry = self._frozen[client].entry
        self._forget(client)
        if entry.process in self._endings:
            return
        if self._signals.send(entry.process, signal.SIGCONT) is not Delivery.FAILED:
            self._record(EventKind.THAWED, entry, reason)
        self._gating.listener.frozen_changed()

    def _kill_timer(self, client: ClientId) -> TimerHandle | None:
        if not self._settings.kill_after_s:
            return None
        when_ns = self._clock.now_ns() + round(self._settings.kill_after_s * SECOND_NS)
        return self._clock.call_at_ns(when_ns, lambda: self._kill(client))

    def _kill(self, client: ClientId) -> None:
        """Also one whose link has ended since: what it left off is in the books (clients/leftovers.py)."""
        self._end(self._frozen[client].entry, "its channels could not be stopped, and it stayed frozen for too long")

    def end(self, client: ClientId, reason: str) -> None:
        """Kill a process, with its channels on."""
        if entry := self._books.clients.get(client):
            self._end(entry, reason)

    def end_of_signal(self, entry: ClientEntry, number: int, *, by_itself: bool) -> None:
        """`by_itself`: it is let go for it, as soon as its channels are on, and so runs for a moment."""
        self._end(entry, f"signal {number} ends it", by_itself=by_itself)

    def _end(self, entry: ClientEntry, reason: str, *, by_itself: bool = False) -> None:
        if entry.id in self._frozen:
            self._forget(entry.id)
        self._endings.begin(entry.process, reason, is_final=True, by_itself=by_itself, **_facts(entry))

    def _forget(self, client: ClientId) -> None:
        timer = self._frozen.pop(client).timer
        self._gating.want_prompt("frozen", bool(self._frozen))
        if timer is not None:
            timer.cancel()

    def _on_gpu(self, gpu: GpuIndex) -> list[ClientEntry]:
        return [entry for entry in self._books.with_role(Role.OFFLINE) if gpu in entry.gpus()]

    def _record(self, kind: EventKind, entry: ClientEntry, reason: str) -> None:
        self._journal.emit(kind, reason=reason, pid=entry.process.pid, **_facts(entry))


def _facts(entry: ClientEntry) -> dict[str, Any]:
    return {"service": entry.service, "client": entry.id, "gpus": tuple(sorted(entry.gpus()))}
