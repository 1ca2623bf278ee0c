"""Blocks that an engine gives back: which, and when valved is told.

valved unmaps what is offered at once, beside the steps of the engine. So no request gets such a block any more, and
valved is told when the steps are over that may still touch it: one that was launched for a request that has ended since
reads and writes there, and would fault.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from valve_hook.ledger import Ledger
from valve_hook.shared import Blocks, Book


@dataclass(slots=True)
class Offers:
    mask: NDArray[np.bool_]  # blocks that are offered, or will be
    unsaid: list[tuple[int, Blocks]] = field(default_factory=list)  # those, and the steps that must be over
    _columns: Sequence[Blocks] = ()

    def arrange(self, column_of: Blocks, columns: int) -> None:
        order = np.argsort(column_of, kind="stable").astype(np.uint32)
        self._columns = np.split(order, np.cumsum(np.bincount(column_of, minlength=columns))[:-1])

    def begin(self) -> None:
        """In a new book nothing is offered."""
        self.mask[:] = False
        self.unsaid.clear()

    def choose(
        self, columns: Iterable[int], withheld: NDArray[np.bool_], backed: int, target: int, wanted: int
    ) -> Blocks:
        """Whole free columns until what is left fits the target, or the requests that wait."""
        given: list[int] = []
        for column in columns:
            own = [int(block) for block in self._columns[column] if not withheld[block]]
            if backed - len(given) <= max(target, wanted + len(own)):
                break  # one block is handed out to nobody
            given += own
        return np.array(given, dtype=np.uint32)

    def add(self, blocks: Blocks, launched: int) -> None:
        self.mask[blocks] = True
        self.unsaid.append((launched, blocks))

    def say(self, book: Book, ledger: Ledger, call_off: Callable[[Blocks], None]) -> bool:
        """What valved may be told of by now; whether there was any."""
        has_said = False
        while self.unsaid and ledger.is_over(self.unsaid[0][0]):
            _, blocks = self.unsaid.pop(0)
            try:
                book.offer(blocks.tolist(), True)
            except Exception:
                call_off(blocks)
                raise
            has_said = True
        return has_said

    def keep_unsaid(self, call_off: Callable[[Blocks], None]) -> None:
        """valved takes none of these any more, and was not told of them."""
        while self.unsaid:
            call_off(self.unsaid.pop()[1])

    def end(self, blocks: Blocks) -> None:
        """These are not offered any more."""
        self.mask[blocks] = False
        self.unsaid = [(launched, rest[self.mask[rest]]) for launched, rest in self.unsaid]
