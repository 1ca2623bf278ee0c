"""Turns of jobs that share one base: they train one at a time and change at step borders, by weight.

Each job owes time: seconds it had, divided by its weight. The job that owes least goes next. One that comes later, or
was paused, begins at the least debt of the others: it gets its share from then on, and no arrears.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class StepTurns:
    """`taken` and `left` hear of each change of the holder, in order."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        *,
        taken: Callable[[str], None] = lambda job: None,
        left: Callable[[str], None] = lambda job: None,
    ) -> None:
        self._clock, self._taken, self._left = clock, taken, left
        self._since = 0.0
        self._is_at_border = False
        self._changed = threading.Condition()
        self._debts: dict[str, float] = {}
        self._waiting: set[str] = set()
        self._away: set[str] = set()
        self._holder: str | None = None

    def enter(self, job: str, is_off: Callable[[], bool], look_s: float = 0.05) -> bool:
        """Wait for the turn and keep it up to a border. False: `is_off` said so first."""
        with self._changed:
            if self._holder == job and not self._is_at_border:
                return True
            if self._holder != job:
                self._come(job)
            self._waiting.add(job)
            try:
                if self._holder == job:
                    # Decided here and not at the border: only now is the holder one of the jobs that want the next
                    # turn.
                    self._is_at_border = False
                    if self._is_next(job):
                        return True
                    self._release()
                while not (self._holder is None and self._is_next(job)):
                    if is_off():
                        return False
                    self._changed.wait(look_s)
                self._taken(job)
                self._holder, self._since = job, self._clock()
                return True
            finally:
                self._waiting.discard(job)
                self._changed.notify_all()

    def _come(self, job: str) -> None:
        """One that is new, or was away, owes what the least of the others owes."""
        if job in self._debts and job not in self._away:
            return
        others = [debt for each, debt in self._debts.items() if each != job and each not in self._away]
        own = self._debts.get(job, 0.0)
        self._debts[job] = max(own, min(others, default=own))
        self._away.discard(job)

    def _is_next(self, job: str) -> bool:
        return min(self._waiting, key=lambda each: (self._debts[each], each)) == job

    def _release(self) -> None:
        if self._holder is not None:
            self._left(self._holder)
        self._holder, self._is_at_border = None, False
        self._changed.notify_all()

    def _charge(self, weight: float) -> None:
        now = self._clock()
        if self._holder is not None:
            self._debts[self._holder] += (now - self._since) / weight
        self._since = now

    def border(self, job: str, weight: float) -> None:
        """A step is done: with its next `enter` the holder stays only if it owes least."""
        with self._changed:
            if self._holder == job:
                self._charge(weight)
                self._is_at_border = True

    def leave(self, job: str, weight: float = 1.0) -> None:
        """The job wants no turn for a while. What it took is owed."""
        with self._changed:
            self._away.add(job)
            if self._holder == job:
                self._charge(weight)
                self._release()

    def forget(self, job: str) -> None:
        self.leave(job)
        with self._changed:
            self._debts.pop(job, None)
            self._away.discard(job)
