"""The pool: every handle of the node, its descriptor, the process that maps it. Plain books; `check_integrity` adds up.

A handle is free, mapped at one slot of one range, moving (an order that maps it is under way), or orphaned: its client
has hung up, but the process lives and may still have it mapped, so no other process gets it before that process ends or
comes back and says what it holds.

A handle is made by a shim, which may keep a mapping of it whatever it says. So it never leaves the trust domain in
which it was made: across domains it goes back to the driver, and the receiver makes one anew.

Handles are rows of a few arrays, not objects: a reclaim of a GiB may move 512 of them. A handle's name outlives valved:
shims repeat it to a successor, so names start at the clock and never come again. A row does: code that keeps the row of
a handle which may go back to the driver meanwhile compares names.
"""

from __future__ import annotations

import enum
import os
from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from valved.kv.slots import NO_HANDLE, NOTHING, Ints, KvRangeBook, RangeKey, RangeSlots
from valved.machine.ports import CloserPort
from valved.model.ids import ClientId, GpuIndex, ProcessId


class FreeRows(defaultdict[tuple[GpuIndex, int], list[int]]):
    """By GPU and the number of a trust domain: what became free last is taken first."""

    def add(self, rows: Ints, gpus: Ints, domains: Ints) -> None:
        for gpu, domain in set(zip(gpus.tolist(), domains.tolist(), strict=True)):  # as a rule one: of one order
            self[GpuIndex(gpu), domain] += rows[(gpus == gpu) & (domains == domain)].tolist()

    def pick(self, place: tuple[GpuIndex, int], most: int) -> Ints:
        free = self[place]
        first = len(free) - min(most, len(free))
        rows = np.array(free[first:], dtype=np.int64)
        del free[first:]
        return rows

    def take_out(self, place: tuple[GpuIndex, int], rows: list[int]) -> None:
        free = self[place]
        if free[-len(rows) :] == rows:
            del free[-len(rows) :]
        else:
            taken = set(rows)
            free[:] = [row for row in free if row not in taken]

    def count(self, gpu: GpuIndex) -> int:
        return sum([len(rows) for (place, _), rows in self.items() if place == gpu])


class Place(enum.IntEnum):
    GONE = 0  # the row is not in use
    FREE = 1
    MOVING = 2
    MAPPED = 3
    ORPHAN = 4


class Pool:
    def __init__(self, handle_bytes: int, most: int, first_name: int, closer: CloserPort) -> None:
        """`most`: handles that may exist, bounded by the descriptors that valved may have."""
        self._closer = closer
        self.handle_bytes = handle_bytes
        self.most = most
        self.ranges: dict[RangeKey, KvRangeBook] = {}
        self._place = np.zeros(64, np.uint8)
        self._gpu = np.zeros(64, np.int64)
        self._fd = np.full(64, -1, np.int64)
        self._name = np.zeros(64, np.int64)
        self._home = np.zeros(64, np.int64)  # uid of the range where it is mapped, 0 for none
        self._slot = np.zeros(64, np.int64)
        self._next_name, self._next_uid = first_name, 1
        self._unused = list(range(63, -1, -1))
        self._domain = np.zeros(64, np.int64)  # in which it was made, as a number
        self._domains: dict[str, int] = {}
        self._free = FreeRows(list)
        self._orphans: dict[ProcessId, Ints] = {}

    # Ranges

    def add_range(self, book: KvRangeBook) -> None:
        book.uid = self._next_uid
        self._next_uid += 1
        self.ranges[book.key], book.is_there = book, True

    def drop_range(self, key: RangeKey) -> None:
        """The client says that nothing is mapped there any more: its handles are free."""
        book = self.ranges.pop(key)  # an order that is under way finds nothing more
        book.is_there = False
        self.lift(RangeSlots.of_range(book, np.flatnonzero(book.at >= 0)))

    def of_client(self, client: ClientId) -> list[KvRangeBook]:
        return [book for key, book in self.ranges.items() if key.client == client]

    # Handles on their way

    def take(self, gpu: GpuIndex, domain: str, most: int) -> Ints:
        """Up to `most` free handles of a trust domain; they are moving until `land`, `free` or `drop`."""
        return self._take_from((gpu, self._number(domain)), most)

    def take_planned(self, rows: Ints, names: Ints) -> bool:
        """Just these, in whatever order they became free. False: one is not free, or not the handle that it was."""
        if not ((self._place[rows] == Place.FREE).all() and np.array_equal(self._name[rows], names)):
            return False
        if len(rows):  # of one GPU and domain, as a handle stays there
            self._free.take_out((GpuIndex(int(self._gpu[rows[0]])), int(self._domain[rows[0]])), rows.tolist())
        self._place[rows] = Place.MOVING
        return True

    def _take_from(self, place: tuple[GpuIndex, int], most: int) -> Ints:
        rows = self._free.pick(place, most)
        self._place[rows] = Place.MOVING
        return rows

    def _number(self, domain: str) -> int:
        return self._domains.setdefault(domain, len(self._domains))

    def land(self, rows: Ints, slots: RangeSlots) -> None:
        """They are mapped there now."""
        self._place[rows] = Place.MAPPED
        self._home[rows] = slots.each([book.uid for book in slots.books])
        self._slot[rows] = slots.slots
        slots.put(rows)

    def name(self, count: int) -> Ints:
        """Names for handles that are about to be made."""
        self._next_name += count
        return np.arange(self._next_name - count, self._next_name)

    def create(self, names: Ints, fds: Sequence[int], slots: RangeSlots) -> None:
        """Handles that a client made and mapped; we own the descriptors from here on."""
        while len(self._unused) < len(fds):
            self._grow()
        rows = np.array([self._unused.pop() for _ in fds], dtype=np.int64)
        self._fd[rows] = fds
        self._gpu[rows] = slots.owner.gpu
        self._domain[rows] = self._number(slots.owner.domain)
        self._name[rows] = names
        self.land(rows, slots)

    def lift(self, slots: RangeSlots) -> None:
        """The client has unmapped what stood there: free from now on."""
        rows = slots.standing()
        slots.put(NO_HANDLE)
        self.free(rows[rows >= 0])

    def is_there(self, slots: RangeSlots) -> NDArray[np.bool_]:
        """Whether their ranges are."""
        return slots.each([book.is_there for book in slots.books]).astype(np.bool_)

    def free(self, rows: Ints) -> None:
        self._place[rows] = Place.FREE
        self._home[rows] = 0
        self._free.add(rows, self._gpu[rows], self._domain[rows])

    def drop(self, rows: Ints, *, is_awaited: bool = False) -> None:
        """Forget handles that are moving, or just taken, for good; with their descriptors the memory goes back.

        `is_awaited`: a process waits for the memory, so it must be back when this returns. Else a thread closes them:
        the driver may be busy with its locks.
        """
        fds = self._fd[rows].tolist()
        if is_awaited:
            for fd in fds:
                os.close(fd)
        elif fds:
            self._closer.close_in_turn(fds)
        self._unused += rows.tolist()
        self._fd[rows] = -1
        self._home[rows] = 0
        self._place[rows] = Place.GONE

    def trim(self, gpu: GpuIndex, most: int, *, but: str | None = None, is_awaited: bool = False) -> int:
        """Give up to `most` free handles back to the driver, none of the domain `but`. How many went."""
        spared, left = self._number(but) if but is not None else -1, most
        for place in [place for place in self._free if place[0] == gpu and place[1] != spared]:
            rows = self._take_from(place, left)
            self.drop(rows, is_awaited=is_awaited)
            left -= len(rows)
        return most - left

    def fds(self, rows: Ints) -> tuple[int, ...]:
        return tuple(self._fd[rows].tolist())

    def names(self, rows: Ints) -> Ints:
        return self._name[rows]

    # Clients that leave

    def leave(self, client: ClientId, process: ProcessId, *, is_alive: bool) -> None:
        """A client is gone. A dead process maps nothing; while a live one exists, no other process gets its handles."""
        for book in self.of_client(client):
            rows = book.at[book.at >= 0]
            self.ranges.pop(book.key).is_there = False
            self.strand(rows, process, is_alive=is_alive)

    def strand(self, rows: Ints, process: ProcessId, *, is_alive: bool) -> None:
        """Handles that were moving to a client that is gone: it may have mapped them."""
        if is_alive:
            self._orphan(rows, process)
        else:
            self.free(rows)

    def _orphan(self, rows: Ints, process: ProcessId) -> None:
        self._place[rows] = Place.ORPHAN
        self._home[rows] = 0
        self._orphans[process] = np.concatenate([self._orphans.get(process, NOTHING), rows])

    def process_gone(self, process: ProcessId) -> int:
        """How many handles came back."""
        rows = self._orphans.pop(process, NOTHING)
        self.free(rows)
        return len(rows)

    def readopt(self, process: ProcessId, names: Ints, book: KvRangeBook, slots: Ints) -> NDArray[np.bool_]:
        """A process that came back names what it holds: which of these are its own orphans. Those are mapped again."""
        mine = self._own_orphans(process, book)
        if not len(mine):
            return np.zeros(len(names), np.bool_)
        order = np.argsort(self._name[mine])
        at = np.minimum(np.searchsorted(self._name[mine], names, sorter=order), len(mine) - 1)
        rows = mine[order][at]
        known: NDArray[np.bool_] = self._name[rows] == names
        self._orphans[process] = np.setdiff1d(self._orphans[process], rows[known])
        self.land(rows[known], RangeSlots.of_range(book, slots[known]))
        return known

    def _own_orphans(self, process: ProcessId, book: KvRangeBook) -> Ints:
        """What this process left behind that may stand in this range: of its GPU, and of its trust domain."""
        mine = self._orphans.get(process, NOTHING)
        fits: NDArray[np.bool_] = (self._gpu[mine] == book.gpu) & (self._domain[mine] == self._number(book.domain))
        ours: Ints = mine[fits]
        return ours

    def has_orphans(self, process: ProcessId) -> bool:
        return bool(len(self._orphans.get(process, NOTHING)))

    def is_taken(self, names: Ints, process: ProcessId, book: KvRangeBook) -> NDArray[np.bool_]:
        """Which of these mean a handle of this trust domain, or one it left behind, that `readopt` would not find."""
        others = (self._place != Place.GONE) & (self._domain == self._number(book.domain))
        others[self._orphans.get(process, NOTHING)] = True
        others[self._own_orphans(process, book)] = False
        return np.isin(names, self._name[others])

    # Questions

    def free_in(self, gpu: GpuIndex, domain: str) -> int:
        return len(self._free.get((gpu, self._domains.get(domain, -1)), ()))

    def free_handles(self, gpu: GpuIndex) -> int:
        return self._free.count(gpu)

    def count(self, gpu: GpuIndex) -> int:
        """All handles of this GPU."""
        return int(((self._place != Place.GONE) & (self._gpu == gpu)).sum())

    @property
    def total(self) -> int:
        return len(self._place) - len(self._unused)

    def mapped(self, gpu: GpuIndex, clients: Iterable[ClientId]) -> int:
        wanted = set(clients)
        books = (book for key, book in self.ranges.items() if key.client in wanted and book.gpu == gpu)
        return sum(int((book.at >= 0).sum()) for book in books)

    def count_in(self, place: Place, gpu: GpuIndex) -> int:
        return int(((self._place == place) & (self._gpu == gpu)).sum())

    def check_integrity(self) -> None:
        """Every handle is in one place, and both halves of each cross reference agree."""
        places = self._place
        free = sorted(row for rows in self._free.values() for row in rows)
        assert free == np.flatnonzero(places == Place.FREE).tolist(), "free list and places disagree"
        assert all(int(self._gpu[row]) == gpu for (gpu, _), rows in self._free.items() for row in rows)
        kept = ((domain, row) for (_, domain), rows in self._free.items() for row in rows)
        assert all(int(self._domain[row]) == domain for domain, row in kept), "a free handle has left its trust domain"
        orphans = sorted(row for rows in self._orphans.values() for row in rows.tolist())
        assert orphans == np.flatnonzero(places == Place.ORPHAN).tolist(), "orphans and places disagree"
        assert sorted(self._unused) == np.flatnonzero(places == Place.GONE).tolist(), "a row is lost"
        mapped = []
        for key, book in self.ranges.items():
            assert (book.key, book.is_there) == (key, True)
            for slot in np.flatnonzero(book.at >= 0).tolist():
                row = int(book.at[slot])
                assert (int(self._home[row]), int(self._slot[row])) == (book.uid, slot), f"handle {row} has two owners"
                assert int(self._gpu[row]) == book.gpu, f"handle {row} is mapped on another GPU"
                assert int(self._domain[row]) == self._number(book.domain), f"handle {row} has left its trust domain"
                mapped.append(row)
        assert sorted(mapped) == np.flatnonzero(places == Place.MAPPED).tolist(), "a mapped handle stands nowhere"
        fds = self._fd[places != Place.GONE].tolist()
        assert len(set(fds)) == len(fds), "two handles share a descriptor"
        assert all(fd >= 0 for fd in fds), "a handle has no descriptor"

    def close(self) -> None:
        self.drop(np.flatnonzero(self._place != Place.GONE), is_awaited=True)
        self._free.clear()  # their descriptors may be another's files by now
        self._orphans.clear()

    def _grow(self) -> None:
        old = len(self._place)
        for name in ("_place", "_gpu", "_name", "_home", "_slot", "_domain"):
            array = getattr(self, name)
            setattr(self, name, np.concatenate([array, np.zeros_like(array)]))
        self._fd = np.concatenate([self._fd, np.full(old, -1, np.int64)])
        self._unused += range(2 * old - 1, old - 1, -1)


class PlannedRows:
    """The free handles of a pool, and those that will be. It stands in no book."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._free = FreeRows(list, {place: list(rows) for place, rows in pool._free.items()})
        self.count = self._free.count

    def come(self, rows: Ints) -> None:
        """`rows`: as they stand at slots. What stood in a range that was deleted is free already."""
        rows = rows[rows >= 0]
        self._free.add(rows, self._pool._gpu[rows], self._pool._domain[rows])

    def pick(self, gpu: GpuIndex, domain: str, most: int) -> Ints:
        return self._free.pick((gpu, self._pool._domains.get(domain, -1)), most)
