"""What one attachment to valved gives, and the queue in which attachments wait until the engine takes them up."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from valve_hook.shared import Book, Table


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """One attachment; a restarted valved gives the next one."""

    number: int
    table: Table
    book: Book


class Sessions:
    """Those that were begun and not taken up yet, oldest first. None is left out: each may have told a loss that the
    next one does not tell again.
    """

    def __init__(self) -> None:
        self._begun: deque[Session] = deque()

    def begin(self, session: Session) -> None:
        self._begun.append(session)

    def after(self, last: Session | None) -> Session | None:
        while self._begun and last is not None and self._begun[0].number <= last.number:
            self._begun.popleft()
        return self._begun[0] if self._begun else None
