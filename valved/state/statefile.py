"""Writes the state file, in a thread that may wait for its disk as long as it likes.

The newest state wins: one write is under way at a time, and what is asked for meanwhile becomes one more, of the state
as it is by then. Whoever must not go on before it is written is told so, or within a time that it was not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from pathlib import Path

from valved.machine.clock import Clock, TimerHandle
from valved.machine.ports import WorkPort
from valved.model.events import EventKind
from valved.model.plain import plain
from valved.model.states import UnwrittenState
from valved.state import saved as files
from valved.state.hanging import hanging
from valved.state.journal import Journal
from valved.state.saved import SavedState
from valved.state.unsaved import Unsaved

DEBOUNCE_NS = 50_000_000  # a burst of registrations becomes one write ...
SAVE_SHARE = 20  # ... and a long one costs at most a twentieth of the time ...
LATEST_NS = 1_000_000_000  # ... but no disk that was slow keeps the next change from being written for longer
AGAIN_NS = 1_000_000_000  # after one that failed

Told = Callable[[bool], None]


@dataclass(slots=True)
class _Awaiting:
    number: int  # of the request that must be written
    then: Told
    timer: TimerHandle | None = None


@dataclass(eq=False, repr=False)
class StateFile:
    """`is_ours`: whether the folder that it is in is still this daemon's. Asked in the thread."""

    path: Path
    _take: Callable[[], SavedState]
    _unsaved: Unsaved
    _journal: Journal
    _clock: Clock
    _disk: WorkPort
    _: KW_ONLY
    is_ours: Callable[[], bool]
    problem: str = ""  # why the last write failed
    _timer: TimerHandle | None = None
    _asked: int = 0
    _written: int = 0  # requests that are settled: written, or failed
    _began_ns: int = 0  # the last write
    _took_ns: int = 0
    _is_writing: bool = False
    _encoder: files.StateEncoder = field(default_factory=files.StateEncoder)  # the thread's
    _waiters: list[_Awaiting] = field(default_factory=list)

    def save_soon(self) -> None:
        if self._timer is None:
            after_ns = max(DEBOUNCE_NS, min(SAVE_SHARE * self._took_ns, LATEST_NS))
            self._timer = self._clock.call_at_ns(self._clock.now_ns() + after_ns, self.save)

    def save(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._asked += 1
        if not self._is_writing:
            self._begin()

    def when_saved(self, then: Told, within_ns: int, *, is_last: bool = False) -> None:
        """Calls `then` once: whether all that was to be saved up to now is written. It may be so already. A disk that
        hangs is waited for by those alone who came before that was known, and for the last state: it may be slow."""
        if self._written == self._asked or (self._hanging() and not is_last):
            then(self._written == self._asked and not self.problem)
            return
        waiter = _Awaiting(self._asked, then)
        waiter.timer = self._clock.call_at_ns(self._clock.now_ns() + within_ns, partial(self._give_up, waiter))
        self._waiters.append(waiter)

    def is_writing(self) -> bool:
        """A thread may still put what it has in the place of the file."""
        return self._is_writing

    def unwritten(self) -> list[UnwrittenState]:
        error = self._hanging() or self.problem
        loss = "a valved that is started anew does not know what changed since: mode, settings, claims"
        return [UnwrittenState(path=plain(str(self.path)), error=error, loss=loss)] if error else []

    def _hanging(self) -> str:
        return hanging(self._began_ns if self._is_writing else None, self._clock.now_ns())

    def _begin(self) -> None:
        self._is_writing, self._began_ns = True, self._clock.now_ns()  # first: a stamp that is read may ask to save
        try:
            mark, number = self._unsaved.mark(), self._asked  # what comes while the state is taken may not be in it
            state = self._take()
        except BaseException:
            self._is_writing = False
            raise
        self._disk.do(partial(self._write, state, mark), partial(self._came_back, number))

    def _write(self, state: SavedState, mark: int) -> None:
        """In the thread. What a channel's line says is in the state that was taken after it."""
        if self.is_ours():
            files.save(self.path, state, self._encoder)
            self._unsaved.clear(mark)

    def _came_back(self, number: int, result: None, error: Exception | None) -> None:
        del result
        self._is_writing, self._written = False, number
        self._took_ns = self._clock.now_ns() - self._began_ns
        before, self.problem = self.problem, _words(error)
        if self.problem and self._timer is None:  # a full disk must not stop gating
            self._timer = self._clock.call_at_ns(self._began_ns + AGAIN_NS, self.save)
        if self.problem != before:
            words = self.problem or "it is written again"
            self._journal.emit(EventKind.NOTED, reason=f"state file: {words}")
        try:
            self._tell(not self.problem)
        finally:  # who asked meanwhile waits for a newer one
            if self._asked > self._written and not self._is_writing:
                self._begin()

    def _tell(self, is_saved: bool) -> None:
        due = [waiter for waiter in self._waiters if waiter.number <= self._written]
        self._waiters = [waiter for waiter in self._waiters if waiter.number > self._written]
        for waiter in due:
            if waiter.timer is not None:
                waiter.timer.cancel()
            self._clock.call_at_ns(self._clock.now_ns(), partial(waiter.then, is_saved))

    def _give_up(self, waiter: _Awaiting) -> None:
        self._waiters.remove(waiter)
        waiter.then(False)


def _words(error: Exception | None) -> str:
    return "" if error is None else getattr(error, "strerror", None) or str(error) or type(error).__name__
