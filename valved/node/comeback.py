"""Holds every GPU after a start until the online processes of a predecessor are back.

A valved that was killed leaves a state file that may be a moment old, and offline work whose channels it switched off.
Its successor would switch these channels on as soon as their process is back, beside an online service of which it has
not heard. So it holds until each online process that lived (state/lived.py) has come back and told of its channels, or
has ended, and until the guard (node/bystanders.py) has looked for processes that use a GPU without Valve. It waits no
longer than `come_back_s`. Services that the state file names keep their GPUs all the same (node/handover.py), and the
guard finds the processes that use a GPU without Valve.
"""

from __future__ import annotations

from dataclasses import dataclass

from valved.clients.register import Register
from valved.clients.schedules import SECOND_NS
from valved.gate.wake import GateService
from valved.machine.clock import Clock, Ticker
from valved.machine.ports import ProcessPort
from valved.model.events import EventKind
from valved.model.ids import ProcessId, Role
from valved.node.bystanders import Bystanders
from valved.state.journal import Journal
from valved.state.registry import COME_BACK_SERVICE, Books, ClientEntry

LOOK_NS = 50_000_000
TELL_NS = 1_000_000_000  # a client that came back and shows nothing new for this long has told of all its channels


@dataclass(eq=False, repr=False)
class ComeBack:
    _books: Books
    _gating: GateService
    _register: Register
    _journal: Journal
    _clock: Clock
    _processes: ProcessPort
    _bystanders: Bystanders | None = None

    def __post_init__(self) -> None:
        self._expected: set[ProcessId] = set()
        self._until_ns = 0
        self._ticker = Ticker(self._clock, self._look)  # that it goes on whatever fails is what ends the hold

    def begin(self, come_back_s: float, *, is_first: bool) -> None:
        """Called once, before anything is taken over and before the link opens. `is_first`: nothing of a predecessor is
        there, so no process can come back."""
        self._until_ns = self._clock.now_ns() + round(come_back_s * SECOND_NS)
        try:
            self._expected = self._register.lived.read()
            is_known = True
        except OSError as error:
            self._journal.emit(
                EventKind.NOTED, reason=f"the processes of the former valved cannot be read: {error.strerror or error}"
            )
            is_known = False
        self._expected = set(filter(self._is_alive, self._expected))
        self._register.lived.former = frozenset(self._expected)
        if self._expected or not is_known or not (is_first or self._is_guarded()):
            self._gating.set_standing(COME_BACK_SERVICE, frozenset(self._gating.gpus))
            self._ticker.start(LOOK_NS, after_ns=0 if is_known else self._until_ns - self._clock.now_ns())

    def _look(self) -> None:
        now_ns = self._clock.now_ns()
        if now_ns < self._until_ns + 2 * TELL_NS and self._waits(now_ns):
            return
        self._gating.set_standing(COME_BACK_SERVICE, frozenset())
        self._ticker.stop()
        if missing := self._missing(self._back()):
            pids = ", ".join(str(process.pid) for process in sorted(missing, key=lambda process: process.pid)[:8])
            self._journal.emit(EventKind.NOTED, reason=f"online processes that did not come back: {pids}")

    def _waits(self, now_ns: int) -> bool:
        self._expected = set(filter(self._is_alive, self._expected))
        back = self._back()
        is_missed = self._missing(back) or not self._is_guarded()
        return bool(is_missed and now_ns < self._until_ns) or not all(map(self._has_told, back))

    def _missing(self, back: list[ClientEntry]) -> set[ProcessId]:
        return self._expected - {client.process for client in back}

    def _back(self) -> list[ClientEntry]:
        return [client for client in self._books.with_role(Role.ONLINE) if client.process in self._expected]

    def _has_told(self, client: ClientEntry) -> bool:
        is_new = self._clock.now_ns() - client.joined_ns < TELL_NS
        return not is_new and self._register.channels.possession.are_quiet([client.id], TELL_NS)

    def _is_guarded(self) -> bool:
        return self._bystanders is None or self._bystanders.has_looked

    def _is_alive(self, process: ProcessId) -> bool:
        return not self._processes.is_ending(process.pid, process.start_time)  # one that cannot be read counts as alive
