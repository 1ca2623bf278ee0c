"""Who holds which blocks, and what the steps in flight write: kept from what the scheduler tells its workers.

An engine's own tables say how things are now. After a loss one has to know how they were when a step was launched,
which may be two steps and a preemption ago; so each step in flight is kept until its output has been believed, and the
blocks of a request that leaves meanwhile are kept with it.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from valve_hook.losses import NOTHING_WRITTEN, Holder
from valve_hook.shared import Book


@dataclass(slots=True, kw_only=True)
class Held:
    """The blocks of one request from one admission to its end or preemption."""

    request: str
    blocks: array[int]
    row: int  # in the book; -1: there was no room


@dataclass(slots=True, kw_only=True)
class Step:
    """One scheduled step. `first_token`: where each request starts to write, as a mapping made only when asked for."""

    key: object
    requests: Mapping[str, int]  # request -> tokens scheduled
    first_tokens: Sequence[tuple[Sequence[str], Sequence[int]]]
    copies: Sequence[tuple[int, int]]
    left: dict[str, Held] = field(default_factory=dict)  # scheduled here, gone since


@dataclass(slots=True, kw_only=True)
class Ledger:
    block_tokens: int
    slack_tokens: int = 0  # drafts that may have been rejected: a later step starts that much earlier than announced
    held: dict[str, Held] = field(default_factory=dict)
    steps: deque[Step] = field(default_factory=deque)
    book: Book | None = None
    _free_rows: list[int] = field(default_factory=list)

    def open_book(self, book: Book | None) -> None:
        """A book of a new session is empty: write all of it."""
        self.book = book
        self._free_rows = list(range(book.rows - 1, -1, -1)) if book is not None else []
        for held in self.held.values():
            self._open_row(held)

    def admit(self, request: str, blocks: Iterable[int]) -> None:
        """The request starts with these blocks, or starts again."""
        if request in self.held:
            self.dismiss(request)
        held = Held(request=request, blocks=array("I", blocks), row=-1)
        self.held[request] = held
        self._open_row(held)

    def grow(self, request: str, blocks: Sequence[int]) -> None:
        held = self.held.get(request)
        if held is None:
            self.admit(request, blocks)
            return
        start = len(held.blocks)
        held.blocks.extend(blocks)
        if self.book is not None and held.row >= 0:
            self.book.extend_row(held.row, start, blocks)

    def dismiss(self, request: str) -> None:
        """It holds nothing any more; steps in flight may still write what it held."""
        held = self.held.pop(request, None)
        if held is None:
            return
        for step in self.steps:
            if request in step.requests:
                step.left.setdefault(request, held)
        if self.book is not None and held.row >= 0:
            self.book.close_row(held.row)
            self._free_rows.append(held.row)

    def launch(self, step: Step) -> None:
        self.steps.append(step)

    def believe(self, key: object) -> None:
        """The output of this step is in: it and what was launched before are in flight no more."""
        if any(step.key is key for step in self.steps):
            while self.steps and self.steps.popleft().key is not key:
                pass

    def holders(self) -> list[Holder]:
        """Everybody a loss can hit, those who left while a step was in flight included."""
        first = self._first_written()
        now = [self._holder(held, first.get(id(held), NOTHING_WRITTEN), False) for held in self.held.values()]
        left = {id(held): held for step in self.steps for held in step.left.values()}
        return now + [self._holder(held, first.get(key, NOTHING_WRITTEN), True) for key, held in left.items()]

    def copies(self) -> Iterator[tuple[int, int]]:
        for step in self.steps:
            yield from step.copies

    def _holder(self, held: Held, first_written: int, has_left: bool) -> Holder:
        blocks = np.frombuffer(held.blocks, dtype=np.uint32) if held.blocks else np.zeros(0, dtype=np.uint32)
        return Holder(request=held.request, blocks=blocks, first_written=first_written, has_left=has_left)

    def _first_written(self) -> dict[int, int]:
        """Held (by identity) -> index of the first block that a step in flight writes."""
        first: dict[int, int] = {}
        for step in self.steps:
            for requests, tokens in step.first_tokens:
                for request, token in zip(requests, tokens, strict=True):
                    held = step.left.get(request) or self.held.get(request)
                    if held is not None and request in step.requests:
                        block = max(0, token - self.slack_tokens) // self.block_tokens
                        first[id(held)] = min(block, first.get(id(held), block))
        return first

    def _open_row(self, held: Held) -> None:
        held.row = self._free_rows.pop() if self._free_rows else -1
        if self.book is not None and held.row >= 0:
            self.book.open_row(held.row, hash(held.request) & 0xFFFFFFFFFFFFFFFF or 1, held.blocks)
