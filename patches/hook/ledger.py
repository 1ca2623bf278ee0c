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
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from valve_hook.losses import NOTHING_WRITTEN, spread
from valve_hook.shared import Blocks, Book

MOST_STEPS = 256  # in flight: an engine has two, or one for each stage of a pipeline


@dataclass(slots=True, kw_only=True)
class Held:
    """The blocks of one request from one admission to its end or preemption."""

    request: str
    blocks: array[int]
    row: int  # in the book; -1: there was no room


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """Whom a loss hits."""

    running: dict[str, int]  # who holds blocks now: how many of them, from the first, are sound
    left: frozenset[str]  # who held them when a step in flight was launched
    bad: Blocks  # every block whose content must not be used


@dataclass(kw_only=True)
class Step:
    """One scheduled step. `first_tokens`: where each request starts to write, as the engine lists it."""

    key: object
    requests: Mapping[str, int]  # request -> tokens scheduled
    first_tokens: Sequence[tuple[Sequence[str], Sequence[int]]]
    copies: Sequence[tuple[int, int]]
    left: dict[str, Held] = field(default_factory=dict)  # scheduled here, gone since

    @cached_property
    def starts(self) -> dict[str, int]:
        """Made only when a loss asks for it."""
        return {name: token for names, tokens in self.first_tokens for name, token in zip(names, tokens, strict=True)}


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

    def grow_all(self, grown: Iterable[tuple[str, tuple[Sequence[int], ...]]]) -> None:
        """`grow` for many, of which most take one block: the one loop here that runs in every step of a large batch."""
        book, held_of = self.book, self.held
        if book is None:
            for request, groups in grown:
                self.grow(request, groups[0])
            return
        cells, heads, width = book.cells, book.heads, book.row_blocks
        for request, groups in grown:
            held, blocks = held_of.get(request), groups[0]
            if held is None or held.row < 0 or len(blocks) != 1 or len(held.blocks) >= width:
                self.grow(request, blocks)
                continue
            place, row = len(held.blocks), held.row
            held.blocks.append(blocks[0])
            cells[row * width + place] = blocks[0]
            heads[4 * row + 2] = place + 1

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
        if len(self.steps) >= MOST_STEPS:
            raise RuntimeError(f"{len(self.steps)} steps are in flight: their output is not told to us")
        self.steps.append(step)

    def believe(self, key: object) -> None:
        """The output of this step is in: it and what was launched before are in flight no more."""
        if any(step.key is key for step in self.steps):
            while self.steps and self.steps.popleft().key is not key:
                pass

    def judge(self, lost: Blocks, blocks: int) -> Judgement:
        holders, present = self.holders()
        tables = [held.blocks for held in holders]
        verdict = spread(lost, tables, lambda index: self.first_written(holders[index]), self.copies(), blocks)
        bad = np.zeros(blocks + 1, dtype=bool)
        bad[verdict.bad] = True
        return Judgement(
            running={holders[at].request: _sound(tables[at], bad) for at in verdict.hit if at < present},
            left=frozenset(holders[at].request for at in verdict.hit if at >= present),
            bad=verdict.bad,
        )

    def holders(self) -> tuple[list[Held], int]:
        """Everybody a loss can hit: those who hold blocks now, and from the returned index on those who have left."""
        now = list(self.held.values())
        left = {id(held): held for step in self.steps for held in step.left.values()}
        return now + list(left.values()), len(now)

    def first_written(self, held: Held) -> int:
        """Index of the first of its blocks that a step in flight may write."""
        first = NOTHING_WRITTEN
        for step in self.steps:
            is_its = step.left.get(held.request, self.held.get(held.request)) is held
            if is_its and held.request in step.requests:
                block = max(0, step.starts[held.request] - self.slack_tokens) // self.block_tokens
                first = block if first == NOTHING_WRITTEN else min(first, block)
        return first

    def copies(self) -> Iterator[tuple[int, int]]:
        for step in self.steps:
            yield from step.copies

    def _open_row(self, held: Held) -> None:
        held.row = self._free_rows.pop() if self._free_rows else -1
        if self.book is not None and held.row >= 0:
            self.book.open_row(held.row, hash(held.request) & 0xFFFFFFFFFFFFFFFF or 1, held.blocks)


def _sound(table: array[int], bad: NDArray[np.bool_]) -> int:
    return int(np.argmax(bad[np.minimum(np.array(table, dtype=np.uint32), len(bad) - 1)]))
