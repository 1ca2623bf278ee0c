"""Hands events to the files that take them (state/trace.py), in a thread: their disk may take as long as it likes.

Events reach the thread within a second, all that are there in one go, and the next ones once that has come back. What a
disk that hangs does not take is kept up to a bound; beyond it the newest are lost, and the status says how many.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterable
from functools import partial

from valved.machine.clock import Clock, TimerHandle
from valved.machine.ports import WorkPort
from valved.model.events import AUDITED, Event
from valved.model.plain import plain
from valved.model.states import UnwrittenState
from valved.state.hanging import hanging
from valved.state.trace import LineFile

log = logging.getLogger("valved")

FLUSH_NS = 1_000_000_000  # from the first event that is not written; as often a file that failed is looked at again
MOST_KEPT = 50_000  # events; some 30 MB
PARTING_S = 1.0


class EventFiles:
    """`files`: each with whether it takes every event, or the audited kinds only."""

    def __init__(self, clock: Clock, files: Iterable[tuple[LineFile, bool]], disk: WorkPort | None) -> None:
        self._clock = clock
        self._disk = disk
        self._files = tuple(files) if disk is not None else ()
        self.take_all = any(takes_all for _, takes_all in self._files)
        self._kept: list[Event] = []
        self._lost = 0
        self._timer: TimerHandle | None = None
        self._began_ns: int | None = None  # what is under way
        self._is_back = threading.Event()
        self._is_back.set()
        if self._files:  # to open them: a disk that hangs must not keep valved from starting
            self._set_timer()

    def put(self, event: Event) -> None:
        if not self.take_all and not (self._files and event.kind in AUDITED):
            return
        if len(self._kept) >= MOST_KEPT:
            self._lost += 1
            return
        self._kept.append(event)
        self._set_timer()

    def unwritten(self) -> list[UnwrittenState]:
        loss = "events are missing there"
        if self._lost:
            loss += f", {self._lost} for good"
        error = hanging(self._began_ns, self._clock.now_ns())
        return [
            UnwrittenState(path=plain(str(file.path)), error=file.failure or error, loss=loss)
            for file, _ in self._files
            if file.failure or error
        ]

    def close(self) -> None:
        """Writes what is left, if its disk takes it soon."""
        if self._timer is not None:
            self._timer.cancel()
        if self._files and self._is_back.wait(PARTING_S):
            self._hand_over(is_last=True)
            self._is_back.wait(PARTING_S)

    def _set_timer(self) -> None:
        if self._timer is None and self._began_ns is None:
            self._timer = self._clock.call_at_ns(self._clock.now_ns() + FLUSH_NS, self._hand_over)

    def _hand_over(self, *, is_last: bool = False) -> None:
        assert self._disk is not None
        self._timer = None
        events, self._kept = self._kept, []
        self._began_ns = self._clock.now_ns()
        self._is_back.clear()
        self._disk.do(partial(self._write, events, is_last), self._came_back)

    def _write(self, events: list[Event], is_last: bool) -> None:
        """In the thread."""
        try:
            for file, takes_all in self._files:
                with contextlib.suppress(OSError):
                    file.look()
                    for event in events:
                        if takes_all or event.kind in AUDITED:
                            file.write(event)
                    (file.close if is_last else file.flush)()
        finally:
            self._is_back.set()

    def _came_back(self, result: None, error: Exception | None) -> None:
        del result
        self._began_ns = None
        if error is not None:
            log.error("events are not written", exc_info=error)
        self._look_again()

    def _look_again(self) -> None:
        if self._kept or any(file.failure for file, _ in self._files):
            self._set_timer()
