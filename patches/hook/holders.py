"""Which request holds a block, answered from the block: a loss then costs what it hits, not what runs.

For each block the number of its holders and the sum of their numbers: with one holder the sum is its number. Where a
block has several, none is named, and the caller looks at all requests. What comes and goes is only noted (`note`);
the sums are brought up to date when somebody asks, or by the link's thread.
"""

from __future__ import annotations

from array import array
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from valve_hook.shared import Blocks


@dataclass(slots=True, kw_only=True)
class Held:
    """The blocks of one request from one admission to its end or preemption."""

    request: str
    blocks: array[int]
    row: int  # in the book; -1: there was no room, or it is closed
    source: Any = None  # the engine's own list of its blocks, of which `blocks` is a beginning
    number: int = 0  # rises with each admission; 0: it holds nothing any more
    counted: int = 0  # of its blocks, from the first, those that are in the sums
    counted_as: int = 0  # with this number


Places = NDArray[np.int64]
MOST_NOTED = 256  # admissions and ends that wait to be counted by the link's thread; beyond, an end counts
MORE_NOTED = 4  # of them: a request that comes and goes is noted twice, and again when it has grown


@dataclass(slots=True)
class HolderIndex:
    _by_number: dict[int, Held] = field(default_factory=dict)
    _noted: deque[Held] = field(default_factory=deque)
    _numbers: int = 0
    _count: Places = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    _sum: Places = field(default_factory=lambda: np.zeros(0, dtype=np.int64))

    def begin(self, held: Held) -> None:
        self._numbers += 1
        held.number = self._numbers
        self.note(held)

    def end(self, held: Held) -> None:
        """Under the ledger's lock."""
        held.number = 0
        self.note(held)
        if len(self._noted) > MOST_NOTED:
            self.settle(MORE_NOTED)

    def note(self, held: Held) -> None:
        """It has begun, ended or grown."""
        self._noted.append(held)

    def of(self, blocks: Blocks) -> list[Held] | None:
        """The requests that hold one of these blocks, in the order of their admission; None: that is not known here."""
        self.settle()
        known = blocks[blocks < len(self._count)]
        counts = self._count[known]
        if counts.max(initial=0) > 1 or counts.min(initial=0) < 0:
            return None
        numbers = np.unique(self._sum[known[counts == 1]]).tolist()
        found = [self._by_number.get(number) for number in numbers]
        return None if None in found else [held for held in found if held is not None]

    def settle(self, most: int | None = None) -> bool:
        """Count what was noted, under the ledger's lock; whether there is more."""
        noted, blocks, holders, numbers, lengths = self._noted, array("I"), [], [], []
        for _ in range(len(noted) if most is None else min(most, len(noted))):
            held = noted.popleft()
            if held.number:
                self._by_number[held.number] = held
                new = held.blocks[held.counted :]
                held.counted, held.counted_as = len(held.blocks), held.number
                sign, number = 1, held.number
            elif held.counted_as:
                del self._by_number[held.counted_as]
                new, sign, number = held.blocks[: held.counted], -1, -held.counted_as
                held.counted = held.counted_as = 0
            else:
                continue
            blocks += new
            holders.append(sign)
            numbers.append(number)
            lengths.append(len(new))
        if blocks:
            self._change(np.array(blocks, dtype=np.intp), np.repeat(holders, lengths), np.repeat(numbers, lengths))
        return bool(noted)

    def _change(self, places: Places, holders: Places, numbers: Places) -> None:
        if (most := int(places.max())) >= len(self._count):
            more = np.zeros(max(most + 1, 2 * len(self._count)) - len(self._count), dtype=np.int64)
            self._count, self._sum = np.append(self._count, more), np.append(self._sum, more)
        np.add.at(self._count, places, holders)
        np.add.at(self._sum, places, numbers)
