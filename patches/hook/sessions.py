"""What one attachment to valved gives, the queue in which attachments wait until the engine takes them up, and how the
link knows an engine without keeping it.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

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


def weakly(method: Callable[[], Any]) -> Callable[[], Any]:
    """What the link keeps of an engine's hook: it must not keep the engine itself."""
    kept = weakref.WeakMethod(method)

    def call() -> Any:
        found = kept()
        return None if found is None else found()

    return call
