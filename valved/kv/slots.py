"""Address ranges of clients, what stands at their slots, and slots of several ranges as one array."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from valved.cells.taking import runs_of, spans_of
from valved.model.ids import ClientId, GpuIndex

Ints = NDArray[np.int64]
NO_HANDLE = -1
CLAIMED = -2
"""A slot that an order under way will back."""
STRANGE = -3
"""A slot that its client says is backed, by what we were never told: left alone until the client comes anew."""
NOTHING = np.empty(0, np.int64)


class RangeKey(NamedTuple):
    """A client numbers its ranges."""

    client: ClientId
    number: int


class SlotHandles:
    """What stands at slots: of one range, or of all ranges of an engine."""

    __slots__ = ("changes", "rows")

    def __init__(self, rows: Ints) -> None:
        self.rows = rows
        self.changes = 0  # code that remembers what follows from the rows looks here

    def put(self, places: Ints, rows: Ints | int) -> None:
        self.rows[places] = rows
        self.changes += 1


@dataclass(slots=True, kw_only=True)
class KvRangeBook:
    """One address range of a client: which handle stands at which slot."""

    key: RangeKey
    gpu: GpuIndex
    domain: str = ""  # of trust: handles never leave it (clients/identity.py)
    base: int
    handle_bytes: int
    is_elastic: bool
    is_heeded: bool = False  # a hook reads, or read, the table of it: what has no memory is not handed out
    uid: int = 0  # given by the pool
    is_there: bool = False  # in the pool's books
    at: Ints  # NO_HANDLE, CLAIMED, or the row of the handle that is mapped there
    whole: SlotHandles = field(init=False)  # of which `at` is a part, and by which it is written
    first: int = field(init=False, default=0)  # where in it
    pinned: NDArray[np.bool_] = field(init=False)  # slots that may never be taken

    def __post_init__(self) -> None:
        self.whole = SlotHandles(self.at)
        self.pinned = np.zeros(len(self.at), np.bool_)

    def join(self, whole: SlotHandles, first: int) -> None:
        """What stands here stands there, too, and is written there from now on."""
        self.at = whole.rows[first : first + self.slots]
        self.whole, self.first = whole, first

    @property
    def slots(self) -> int:
        return len(self.at)

    @property
    def is_whole(self) -> bool:
        return bool((self.at >= 0).all())

    def empty_slots(self) -> Ints:
        return np.flatnonzero(self.at == NO_HANDLE)


@dataclass(slots=True, kw_only=True)
class RangeSlots:
    """Slots of ranges of one client on one GPU, in the order in which they are ordered. Costs what one range would."""

    books: tuple[KvRangeBook, ...]  # some may have no slot here
    of: Ints  # for each slot, to which of these it belongs ...
    slots: Ints  # ... and its number there

    @staticmethod
    def of_range(book: KvRangeBook, slots: Ints) -> RangeSlots:
        return RangeSlots(books=(book,), of=np.zeros(len(slots), np.int64), slots=slots)

    def __len__(self) -> int:
        return len(self.slots)

    def __getitem__(self, part: slice | NDArray[np.bool_] | Ints) -> RangeSlots:
        return RangeSlots(books=self.books, of=self.of[part], slots=self.slots[part])

    @property
    def book(self) -> KvRangeBook:
        """Of the first slot."""
        return self.books[int(self.of[0])] if self.of.size else self.books[0]

    @property
    def owner(self) -> KvRangeBook:
        """Any of them, and found quickly: client, GPU and trust domain are those of all."""
        return self.books[0]

    def each(self, values: list[int]) -> Ints:
        """For each slot what belongs to its range."""
        return np.array(values, np.int64)[self.of] if len(values) > 1 else np.full(self.of.size, values[0])

    def is_in(self, book: KvRangeBook) -> NDArray[np.bool_]:
        return self.each([one is book for one in self.books]).astype(np.bool_)

    def runs(self, names: Ints = NOTHING, flags: int = 0) -> bytes:
        """Neighbours in one range, by neighbouring names where names count, as they stand in a packet."""
        return runs_of(self.of, self.slots, names, [book.key.number for book in self.books], flags)

    def spans(self) -> list[tuple[int, int]]:
        """Address and bytes of neighbours: a call costs the same for one handle and for all."""
        return spans_of(self.of, self.slots, [book.base for book in self.books], self.owner.handle_bytes)

    def standing(self) -> Ints:
        """What stands there."""
        found = np.empty(self.slots.size, np.int64)
        for whole, part, places in self._places():
            found[part] = whole.rows[places]
        return found

    def put(self, rows: Ints | int) -> None:
        for whole, part, places in self._places():
            whole.put(places, rows if isinstance(rows, int) else rows[part])

    def _places(self) -> Iterable[tuple[SlotHandles, slice | NDArray[np.bool_], Ints]]:
        """Where these stand. As a rule in one array; a range that was deleted has stayed behind."""
        places = self.each([book.first for book in self.books]) + self.slots
        wholes = [self.books[0].whole]
        for book in self.books:
            if book.whole is not wholes[-1]:
                wholes.append(book.whole)
        if len(wholes) == 1:
            return [(wholes[0], slice(None), places)]
        found: list[tuple[SlotHandles, NDArray[np.bool_], Ints]] = []
        for whole in {id(one): one for one in wholes}.values():
            part = self.each([book.whole is whole for book in self.books]).astype(np.bool_)
            found.append((whole, part, places[part]))
        return found
