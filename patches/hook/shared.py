"""The three shared files, each seen from the engine: the table is read, the book and the region page are written.

The order that makes it safe is stated in proto/abi/kv.h. Python has no fences; a lock taken and let go twice is one
(the release of the first and the acquire of the second may not change places), and x86 would not need it.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from valve_hook import wire

Blocks = NDArray[np.uint32]
_lock = threading.Lock()
BACKED_BLOCKS, TARGET_BLOCKS, DETACHED, STEP_TOKENS = range(4)  # of Table.slow


def fence() -> None:
    with _lock:
        pass
    with _lock:
        pass


class Foreign(Exception):
    """A shared file is not what the contract says: do not attach."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What the table says since it was last read."""

    epoch: int
    lost: Blocks  # changed: their content is gone
    backed: NDArray[np.bool_]  # of every block, now
    entries: Blocks  # good until the next look


class Table:
    """Which blocks have memory. Nothing happened costs one word."""

    def __init__(self, fd: int, size: int) -> None:
        self.map = mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ)
        head = wire.TABLE_HEAD.unpack_from(self.map)
        magic, abi, stated, self.blocks, self.block_tokens, self.columns, entries_at, columns_at = head
        end = max(entries_at, columns_at) + 4 * self.blocks
        if magic != wire.TABLE_MAGIC or abi != wire.KV_ABI or stated > size or end > stated:
            raise Foreign(f"table: magic {magic:#x}, abi {abi}, {self.blocks} blocks in {stated} of {size} bytes")
        self._words = np.frombuffer(self.map, dtype=np.uint64, count=2, offset=wire.TABLE_EPOCH)
        self._entries = np.frombuffer(self.map, dtype=np.uint32, count=self.blocks, offset=entries_at)
        self.column_of = np.frombuffer(self.map, dtype=np.uint32, count=self.blocks, offset=columns_at).copy()
        if self.blocks and int(self.column_of.max()) >= max(1, self.columns):
            raise Foreign(f"table: a block in column {int(self.column_of.max())} of {self.columns}")
        self._epoch = memoryview(self.map)[wire.TABLE_EPOCH : wire.TABLE_EPOCH + 8].cast("Q")
        self.slow = memoryview(self.map)[wire.TABLE_BACKED_BLOCKS : wire.TABLE_STEP_TOKENS + 4].cast("I")
        self.words = memoryview(self.map)[wire.TABLE_EPOCH : wire.TABLE_STEP_TOKENS + 4]
        """All that valved ever changes but the entries, as it is now: while it equals a copy nothing is new."""
        self.seen_epoch = -1
        self.seen = np.zeros(self.blocks, dtype=np.uint32)
        self._backed = np.zeros(self.blocks, dtype=bool)  # by what was seen
        self._spare = np.zeros(self.blocks, dtype=np.uint32)  # for the next look: new memory would cost more than it

    @property
    def has_news(self) -> bool:
        return self._epoch[0] != self.seen_epoch

    @property
    def slow_words(self) -> tuple[int, int, int]:
        """Backed and target blocks, and whether valved has let go."""
        return self.slow[BACKED_BLOCKS], self.slow[TARGET_BLOCKS], self.slow[DETACHED]

    @property
    def backed_blocks(self) -> int:
        return self.slow[BACKED_BLOCKS]

    @property
    def target_blocks(self) -> int:
        return self.slow[TARGET_BLOCKS]

    @property
    def is_detached(self) -> bool:
        return bool(self.slow[DETACHED])

    @property
    def step_tokens(self) -> int:
        """The most that valved asks this engine to schedule in one step; 0: no limit."""
        return self.slow[STEP_TOKENS]

    def begin(self, had: NDArray[np.bool_]) -> Change:
        """The first look. `had`: blocks that had memory as far as the engine knows.

        Nothing changes without valved, so after its restart a block that had and has memory kept its content, unless it
        lost it and got it back since: a new table begins with generation 0, or 1 where there is no memory. A block
        that had none is withheld here since then, whatever was done to it.
        """
        epoch, entries = self._copy()
        backed = (entries & wire.ENTRY_BACKED).astype(bool)
        is_another = entries >= wire.ENTRY_SECOND_CHANGE
        lost = np.flatnonzero(had & (~backed | is_another)).astype(np.uint32)
        return Change(epoch=epoch, lost=lost, backed=backed, entries=entries)

    def read(self) -> Change:
        """What changed, again and again until it is accepted. The epoch is read first: an entry newer than it is acted
        on now and is no news later.
        """
        epoch, entries = self._copy()
        lost = np.flatnonzero(entries != self.seen).astype(np.uint32)
        backed = self._backed.copy()
        backed[lost] = entries[lost] & wire.ENTRY_BACKED
        return Change(epoch=epoch, lost=lost, backed=backed, entries=entries)

    def accept(self, change: Change) -> None:
        """It has been acted on: no news any more. Never earlier, for what fails half way has to be found again."""
        if change.entries is self._spare:
            self._spare = self.seen
        self.seen, self._backed, self.seen_epoch = change.entries, change.backed, change.epoch

    def changed(self) -> NDArray[np.bool_]:
        """Of every block, whether it changed since what was accepted last."""
        fence()
        return np.not_equal(self._entries, self.seen)

    def _copy(self) -> tuple[int, Blocks]:
        epoch = self._epoch[0]
        fence()
        np.copyto(self._spare, self._entries)
        return epoch, self._spare


class Book:
    """What the engine holds and wants: gauges, receipts, offers, and one row of block numbers per request."""

    def __init__(self, fd: int, size: int) -> None:
        self._map = mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        head = wire.BOOK_HEAD.unpack_from(self._map)
        magic, abi, stated, self.rows, self.row_blocks, offered_at, heads_at, cells_at = head
        end = max(heads_at + wire.ROW.size * self.rows, cells_at + 4 * self.rows * self.row_blocks, offered_at)
        if magic != wire.BOOK_MAGIC or abi != wire.KV_ABI or stated > size or end > stated or offered_at > heads_at:
            raise Foreign(f"book: magic {magic:#x}, abi {abi}, {self.rows} x {self.row_blocks} in {stated} of {size}")
        view = memoryview(self._map)
        self._offered = np.frombuffer(self._map, dtype=np.uint8, count=heads_at - offered_at, offset=offered_at)
        self.heads = view[heads_at : heads_at + wire.ROW.size * self.rows].cast("I")
        self._names = view[heads_at : heads_at + wire.ROW.size * self.rows].cast("Q")
        self.cells = view[cells_at : cells_at + 4 * self.rows * self.row_blocks].cast("I")
        self._seen = view[wire.BOOK_EPOCH_SEEN : wire.BOOK_EPOCH_SEEN + 8].cast("Q")
        self.gauges = view[wire.BOOK_GAUGES_AT : wire.BOOK_GAUGES_AT + 16].cast("I")
        self._receipts = view[wire.BOOK_RECEIPTS_AT : wire.BOOK_RECEIPTS_AT + wire.BOOK_RECEIPTS.size]

    def open_row(self, row: int, request: int, blocks: Sequence[int]) -> None:
        self.heads[4 * row + 2] = 0  # a reader between the two stores sees an empty row, not a wrong one
        self._names[2 * row] = request
        self.extend_row(row, 0, blocks)

    def extend_row(self, row: int, start: int, blocks: Sequence[int]) -> None:
        """Blocks past row_blocks are not told: the choice of victims is a little worse, nothing else."""
        at, room = row * self.row_blocks + start, self.row_blocks - start
        if len(blocks) == 1 and room > 0:
            self.cells[at] = blocks[0]
        else:
            for offset, block in enumerate(blocks[: max(0, room)]):
                self.cells[at + offset] = block
        self.heads[4 * row + 2] = min(start + len(blocks), self.row_blocks)

    def close_row(self, row: int) -> None:
        self.heads[4 * row + 2] = 0
        self._names[2 * row] = 0

    def offer(self, blocks: Iterable[int], offered: bool) -> None:
        self._offered[np.fromiter(blocks, dtype=np.int64)] = offered

    def write_gauges(self, mode: int, used: int, wanted: int, steps: int) -> None:
        words = self.gauges  # in a step's way: stores cost a third of packing
        words[3], words[2], words[1], words[0] = steps, wanted, used, mode

    def write_mode(self, mode: int) -> None:
        """Not in a book that no step has told of: with a mode and no step, valved believes that no kernel knows any
        block of the engine, and the engine may be in the middle of a step.
        """
        if self.gauges[3]:
            self.gauges[0] = mode

    def write_receipts(self, *counters: int) -> None:
        self._receipts[:] = wire.BOOK_RECEIPTS.pack(*counters)

    def acknowledge(self, epoch: int) -> None:
        """Last of all: everything up to `epoch` is dealt with."""
        fence()
        self._seen[0] = epoch


class Bell:
    """The doorbell of a connection. valved's listener hears it within microseconds."""

    def __init__(self, fd: int) -> None:
        self._fd = os.dup(fd)
        weakref.finalize(self, os.close, self._fd)

    def ring(self) -> None:
        os.eventfd_write(self._fd, 1)


class Region:
    """The lifecycle page of this process: how many requests are open, and what was achieved.

    The first open request rings: offline work stops while the engine still plans its first step, so that the launch
    finds the GPU free.
    """

    def __init__(self, fd: int, size: int, features: int, bell: Bell, clock_ns: int = 0) -> None:
        self.bell = bell
        self._clock_ns = clock_ns  # what ours lacks to valved's
        self.map = mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        gaps_at = wire.REGION_SLOT_OFFSET + wire.REGION_SLOTS * 64
        numbers = (wire.LINK_ABI, size, features, wire.REGION_SLOTS, wire.REGION_SLOT_OFFSET, gaps_at, wire.REGION_GAPS)
        head = wire.REGION_HEAD.pack(wire.REGION_MAGIC, *numbers, os.getpid())
        self.map[8 : len(head)] = head[8:]
        self.map[:8] = head[:8]  # the magic last: valved takes it for the word that the others are there
        self._open = memoryview(self.map)[wire.REGION_OPEN : wire.REGION_OPEN + 4].cast("I")
        at = wire.REGION_STARTED_AT  # begun, ended, tokens
        self._totals = memoryview(self.map)[at : at + wire.REGION_STARTED.size].cast("Q")
        self._hint = memoryview(self.map)[wire.REGION_HINT_NS : wire.REGION_HINT_NS + 8].cast("Q")
        self._launch = memoryview(self.map)[wire.REGION_LAUNCH_NS : wire.REGION_LAUNCH_NS + 8].cast("Q")

    def write(self, open_requests: int, ended: int, useful_tokens: int) -> None:
        totals, begins = self._totals, open_requests > 0 and not self._open[0]
        totals[0], totals[1], totals[2] = ended + open_requests, ended, useful_tokens
        self._open[0] = open_requests
        self.renew()
        if begins:
            self._launch[0] = self._hint[0]  # the stop is measured from here: the launch comes later
            self.bell.ring()

    def write_tokens(self, useful_tokens: int) -> None:
        self._totals[2] = useful_tokens

    def renew(self) -> None:
        """valved believes a hint for its lease: this says that the process lives."""
        self._hint[0] = time.monotonic_ns() + self._clock_ns


Told = tuple[int, int, int]
"""Open requests, ended ones, useful tokens."""


class Lifecycle:
    """What was told of the requests, and the page of the connection, if there was any: a new one begins with it, for an
    empty one that is renewed would say that nothing is open. The engine's thread tells, the link's thread connects.

    A process may have several engines, one after another or beside one another: the page has their sums. What one has
    open when it is gone has ended.
    """

    def __init__(self) -> None:
        self.page: Region | None = None
        self._told: dict[int, Told] = {}  # of each engine
        self._engines: dict[int, weakref.ref[object]] = {}
        self._gone: Told = 0, 0, 0
        self._lock = threading.Lock()

    def tell(self, open_requests: int, ended: int, useful_tokens: int, engine: object = None) -> None:
        with self._lock:
            self._told[self._key(engine)] = open_requests, ended, useful_tokens
            if self.page is not None:
                self.page.write(*self._sums())

    def tell_beside(self, open_requests: int, ended: int, useful_tokens: int, engine: object = None) -> None:
        """By the link's thread. How many are open is the engine's own word, once it has told any; `ended`: while there
        were as many.
        """
        with self._lock:
            key = self._key(engine)
            told = self._told.get(key)
            if told is not None:
                is_later = ended > told[1]
                self._told[key] = told[0], max(ended, told[1]), useful_tokens
                if self.page is not None and is_later:
                    self.page.write(*self._sums())
                elif self.page is not None:
                    self.page.write_tokens(self._sums()[2])
            elif self.page is not None:
                self.page.write(*_added(self._sums(), (open_requests, ended, useful_tokens)))

    def begin(self, page: Region) -> None:
        with self._lock:
            if self._told:
                page.write(*self._sums())
            self.page = page

    def renew(self) -> None:
        with self._lock:
            if self._bury() and self.page is not None:
                self.page.write(*self._sums())
        if self.page is not None:
            self.page.renew()

    def _key(self, engine: object) -> int:
        if engine is None:
            return 0
        key = id(engine)
        if key not in self._engines or self._engines[key]() is not engine:
            self._bury()  # it lies where another one lay
            self._engines[key] = weakref.ref(engine)
        return key

    def _bury(self) -> bool:
        gone = [key for key, engine in self._engines.items() if engine() is None]
        for key in gone:
            del self._engines[key]
            open_requests, ended, tokens = self._told.pop(key, (0, 0, 0))
            self._told.setdefault(0, (0, 0, 0))  # something was told
            self._gone = _added(self._gone, (0, ended + open_requests, tokens))
        return bool(gone)

    def _sums(self) -> Told:
        sums = self._gone
        for told in self._told.values():
            sums = _added(sums, told)
        return sums


def _added(one: Told, other: Told) -> Told:
    return one[0] + other[0], one[1] + other[1], one[2] + other[2]
