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

    def is_asked(self, backed_blocks: int) -> bool:
        """Whether valved has changed something that was not acted on, or waits for blocks to be offered."""
        table = self.table
        return not table.is_detached and (table.has_news or backed_blocks > table.target_blocks)


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
