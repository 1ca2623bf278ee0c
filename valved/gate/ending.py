"""Kills processes with their channels on: in the teardown the driver would wait for those that are off, under locks
that online work needs.

A process is stopped first, and its channels are on only once it stands: else it would run with them. One that cannot
be signalled stays held. The state file names a process before it gets its stop signal: if valved is killed in between,
only a successor lets it go, or ends it.

Of those that are begun together all are stopped before one dies, and the youngest dies first: with the first process of
a container the kernel kills all the others, and many a child dies with its parent.

One that a signal ends asks for the same (link.h, ENDING). It is let go at the end of that, as nothing else lets it die
with the status of its signal. If it is still here soon after, it is killed at once. While the driver hangs, its
channels are not on yet: it stands until they are, or each such process would hold the driver up once more. If valved
ends meanwhile, it is let go as well. If somebody else lets it go, it has no more time.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

from valved.gate.wake import GateService
from valved.machine.clock import Clock
from valved.machine.ports import ProcessPort
from valved.machine.signals import Delivery, SignalPort
from valved.model.events import EventKind
from valved.model.ids import ProcessId
from valved.state.journal import Journal

SECOND_NS = 1_000_000_000
STOP_NS, LOOK_NS = SECOND_NS // 2, SECOND_NS // 500  # how long a stop signal may take to arrive
AGAIN_NS = SECOND_NS // 10  # where it cannot be sent
LOOK_SHARE = (
    4  # a look reads the threads of a process, and how many it has is its choice: a quarter of the loop at most
)
BY_ITSELF_NS = 3 * SECOND_NS // 1000  # it runs beside online work, and where it is honest it needs a millisecond
HANG_NS = 10 * SECOND_NS  # for so long a driver waits for channels of two or three processes; then nobody knows
KILL = "about to end"  # why a client is taken out of the books just before the signal


@dataclass(slots=True)
class _End:
    reason: str
    facts: dict[str, Any]  # which process it is, for the event
    is_final: bool  # else a drain that is taken back lets it go
    by_itself: bool  # it ends once it is let go
    until_ns: int = 0
    older: tuple[ProcessId, _End] | None = None  # the next of those that were begun together
    waits: bool = False  # for a younger one, which it may take along
    stood: set[str] = field(default_factory=set)  # threads that a look found so; the next one goes on behind them


@dataclass(eq=False, repr=False)
class Endings:
    """`let_die`: all of a process's channels are on from here, and it is in no book. False: once the driver answers."""

    _gating: GateService
    _journal: Journal
    _clock: Clock
    _processes: ProcessPort
    _signals: SignalPort
    _let_die: Callable[[ProcessId], bool]

    def __post_init__(self) -> None:
        self._under_way: dict[ProcessId, _End] = {}
        self._fresh: list[ProcessId] = []  # of them, not yet told to stand
        self._rests_ns = 0  # no look before then
        self._asks_ns = 0  # whether a channel is on yet: not before then

    def __contains__(self, process: ProcessId) -> bool:
        return process in self._under_way

    def present(self) -> set[ProcessId]:
        """Processes that are stopped or will be, and have not been killed."""
        here = {process for process in self._under_way if not self._processes.is_gone(process)}
        return here | self._signals.waiting(signal.SIGKILL)

    def to_end(self) -> set[ProcessId]:
        """Processes that a successor has to end."""
        final = {process for process, end in self._under_way.items() if end.is_final}
        return final | self._signals.waiting(signal.SIGKILL)

    def to_release(self) -> set[ProcessId]:
        """Processes that a successor has to let go."""
        return {process for process, end in self._under_way.items() if not end.is_final}

    def begin(
        self, process: ProcessId, reason: str, *, is_final: bool = False, by_itself: bool = False, **facts: Any
    ) -> None:
        """Safe to call again."""
        if process in self._signals.waiting(signal.SIGKILL):
            return
        if known := self._under_way.get(process):
            known.is_final |= is_final
            return
        self._under_way[process] = _End(reason, facts, is_final, by_itself)
        self._fresh.append(process)
        if len(self._fresh) == 1:
            self._clock.call_at_ns(self._clock.now_ns(), self._stop_fresh)

    def _stop_fresh(self) -> None:
        """All that were begun since the last turn are written down together: each write takes milliseconds."""
        fresh, self._fresh = self._fresh, []
        ends = [(process, self._under_way[process]) for process in dict.fromkeys(fresh) if process in self._under_way]
        if ends:
            self._gating.listener.about_to_freeze(partial(self._stop_all, ends))

    def _stop_all(self, ends: list[tuple[ProcessId, _End]]) -> None:
        ends = [(process, end) for process, end in ends if self._under_way.get(process) is end]
        ends.sort(key=lambda one: (one[0].start_time, one[0].pid), reverse=True)
        for (_, end), older in pairwise(ends):
            end.older, older[1].waits = older, True
        for process, end in ends:  # a call for each: one that fails must not keep another from standing
            self._clock.call_at_ns(self._clock.now_ns(), partial(self._stop, process, end))

    def _stop(self, process: ProcessId, end: _End) -> None:
        if self._under_way.get(process) is not end:
            return
        end.until_ns = self._clock.now_ns() + STOP_NS
        if self._signals.send(process, signal.SIGSTOP) is Delivery.FAILED and not self._processes.is_gone(process):
            self._leave(process)  # it is not ours to signal, and stays held
        elif end.waits:
            self._clock.call_at_ns(end.until_ns + STOP_NS, partial(self._take_turn, process, end))
        else:
            self._clock.call_at_ns(self._clock.now_ns(), partial(self._look, process, end))

    def _leave(self, process: ProcessId) -> None:
        """The next older one has its turn: it is told so, as looks of hundreds that wait would take the whole loop."""
        end = self._under_way.pop(process)
        if not end.waits:
            self._pass_on(end)

    def _pass_on(self, end: _End) -> None:
        if end.older is not None:
            self._clock.call_at_ns(self._clock.now_ns(), partial(self._take_turn, *end.older))

    def _take_turn(self, process: ProcessId, end: _End) -> None:
        """The younger one is over, or this one has stood for a second, with its channels off."""
        if not end.waits:
            return
        end.waits = False
        if self._under_way.get(process) is not end:  # it left before its turn
            self._pass_on(end)
        elif end.until_ns:  # else it is still to be stopped
            self._look(process, end)

    def take_back(self, frozen: Collection[ProcessId]) -> None:
        """A process that was to die only for a drain goes on, unless it is `frozen` for another reason."""
        for process in self.to_release():
            self._leave(process)
            if process not in frozen:
                self._signals.send(process, signal.SIGCONT)

    def _look(self, process: ProcessId, end: _End) -> None:
        """Once the signal has reached all of its threads, which takes longer on a busy machine."""
        if self._under_way.get(process) is not end:
            return
        now_ns = self._clock.now_ns()
        if now_ns < self._rests_ns:
            self._clock.call_at_ns(self._rests_ns, lambda: self._look(process, end))
            return
        is_gone = self._processes.is_gone(process)
        if process in self._signals.waiting(signal.SIGSTOP, signal.SIGCONT) and not is_gone:
            end.until_ns = now_ns + STOP_NS  # with its channels on it would run
            self._clock.call_at_ns(now_ns + AGAIN_NS, lambda: self._look(process, end))
        elif now_ns < end.until_ns and not (is_gone or self._stands(process, end, now_ns)):
            self._clock.call_at_ns(now_ns + LOOK_NS, lambda: self._look(process, end))
        else:
            self._end(process, end)

    def _stands(self, process: ProcessId, end: _End, now_ns: int) -> bool:
        is_stopped = self._processes.is_stopped(process.pid, end.stood)
        self._rests_ns = now_ns + LOOK_SHARE * (self._clock.now_ns() - now_ns)
        return is_stopped is True

    def _runs(self, process: ProcessId, end: _End) -> bool:
        """Somebody has let it go."""
        is_stopped = self._processes.is_stopped(process.pid, end.stood)
        if is_stopped is not None:
            end.stood = set()
        return is_stopped is False

    def _end(self, process: ProcessId, end: _End) -> None:
        if end.by_itself:
            end.until_ns = self._clock.now_ns() + HANG_NS
            end.stood = set()
            self._let_end(process, end)
            return
        self._leave(process)
        self._signals.keep_standing(process)  # with its channels on, and its page no longer bids it hold
        try:
            self._let_die(process)
        finally:  # it stands, and is in no book by which valved would end it later
            if self._signals.send(process, signal.SIGKILL) is not Delivery.FAILED:
                self._journal.emit(EventKind.KILLED, reason=end.reason, pid=process.pid, **end.facts)

    def _let_end(self, process: ProcessId, end: _End) -> None:
        if self._under_way.get(process) is not end:
            return
        began_ns, is_time = self._clock.now_ns(), True
        try:
            is_time = self._let_die(process) or self._runs(process, end)
        finally:
            now_ns = self._clock.now_ns()
            self._asks_ns = max(self._asks_ns, now_ns) + LOOK_SHARE * (now_ns - began_ns)
            if is_time or now_ns >= end.until_ns:
                self._signals.send(process, signal.SIGCONT)
                self._clock.call_at_ns(now_ns + BY_ITSELF_NS, partial(self._has_ended, process, end))
            else:
                again_ns = min(max(now_ns + AGAIN_NS, self._asks_ns), end.until_ns)  # a look may have been long, too
                self._clock.call_at_ns(again_ns, partial(self._let_end, process, end))

    def _has_ended(self, process: ProcessId, end: _End) -> None:
        """Else it is killed at once: its channels are on. Those of a new link run no longer than this takes."""
        if self._under_way.get(process) is not end:
            return
        end.by_itself = False
        if self._processes.is_ending(process.pid, process.start_time):
            self._leave(process)
        else:
            self._signals.send(process, signal.SIGSTOP)
            self._end(process, end)
