"""Tensor parallelism: every rank of SGLang schedules for itself, so all must heed one and the same table.

valved keeps one table per engine, in which a page has memory when it has memory on every rank. Rank 0 alone is attached
to it. What every rank decides by, rank 0 too, is a copy of its own that moves only in `look`: a collective on the
scheduler's CPU group, which all ranks make at the same places of a step. Their page tables are equal, because they
decide alike, so what follows from the copy is equal, too.

Rank 0 may look for all after its own step: an entry is written before memory goes on any rank, what a rank reads and
writes in a step comes before its last all-reduce of it, and that before the step's end on rank 0.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from valve_hook.link import Link
from valve_hook.sessions import Session, Sessions
from valve_hook.shared import Blocks, Book, Change, Table
from valve_hook.wire import TABLE_BACKED_BLOCKS, TABLE_EPOCH, TABLE_HEAD

Bytes = NDArray[np.uint8]
WORDS = 8  # of a look: ill or well, epoch, the table's slow words, length of what changed, number and size of a new one


class Alone:
    """One rank: the link itself."""

    is_first, size = True, 1

    def __init__(self, link: Link) -> None:
        self.link = link

    def next_session(self, last: Session | None) -> Session | None:
        return self.link.next_session(last)

    def need(self, wanted_blocks: int) -> None:
        self.link.need(wanted_blocks)

    def look(self, is_well: bool) -> bool:
        """The link's table is looked at as it is."""
        return True

    def agree(self, is_well: bool) -> bool:
        """Whether all is well on every rank."""
        return is_well


class Group:
    """The collectives that are needed, on the scheduler's CPU group."""

    def __init__(self, group: Any, ranks: list[int], rank: int) -> None:
        self._group, self._source = group, ranks[0]
        self.is_first, self.size = rank == ranks[0], len(ranks)

    def greatest(self, words: NDArray[np.int64]) -> None:
        """Each word becomes the greatest that a rank has there."""
        import torch

        torch.distributed.all_reduce(torch.from_numpy(words), torch.distributed.ReduceOp.MAX, group=self._group)

    def from_first(self, array: NDArray[Any]) -> None:
        """What rank 0 has in this array, every rank has afterwards."""
        import torch

        torch.distributed.broadcast(torch.from_numpy(array.view(np.uint8)), src=self._source, group=self._group)


class Ranks:
    """In place of the link, for the reconciler of each rank."""

    def __init__(self, link: Link, group: Group) -> None:
        self.link, self._group = link, group
        self.is_first, self.size = group.is_first, group.size
        self.sessions = Sessions()
        self._copy: TableCopy | None = None
        self._live: Session | None = None  # of rank 0: what the copy is a copy of

    def next_session(self, last: Session | None) -> Session | None:
        return self.sessions.after(last)

    def need(self, wanted_blocks: int) -> None:
        if self.is_first:
            self.link.need(wanted_blocks)

    def agree(self, is_well: bool) -> bool:
        word = np.array([not is_well], dtype=np.int64)
        self._group.greatest(word)
        return not word[0]

    def look(self, is_well: bool) -> bool:
        """Move the copy to where rank 0 sees the table now; whether all is well on every rank. One reduction of eight
        words where valved changed nothing. A table that it left behind is brought to its end before the next one is
        begun: its last word was told.
        """
        fresh = self.link.next_session(self._live) if self.is_first else None
        words, pairs = np.zeros(WORDS, dtype=np.int64), np.zeros(0, dtype=np.uint32)
        news = None
        if self._live is not None:
            table = self._live.table
            news = table.read() if table.has_news else None
            pairs = pairs_of(news) if news is not None else pairs
            words[1:6] = news.epoch if news is not None else table.seen_epoch, *table.slow_words, len(pairs)
        image = image_of(fresh.table) if fresh is not None else b""
        if fresh is not None:
            words[6:] = fresh.number, len(image)
        words[0] = not is_well
        self._group.greatest(words)
        is_ill, epoch, backed, target, detached, changed, number, size = words.tolist()
        if changed:
            pairs = pairs if self.is_first else np.empty(changed, dtype=np.uint32)
            self._group.from_first(pairs)
        if self._copy is not None:
            self._copy.write(epoch, (backed, target, detached), pairs)
        if self._live is not None and news is not None:
            self._live.table.accept(news)  # every rank has it now
        if number:
            self._begin(fresh, number, np.frombuffer(bytearray(image or size), dtype=np.uint8))
        return not is_ill

    def _begin(self, fresh: Session | None, number: int, image: Bytes) -> None:
        self._group.from_first(image)
        self._live, self._copy = fresh, TableCopy(image.tobytes())
        book = fresh.book if fresh is not None else NoBook()
        self.sessions.begin(Session(number=number, table=self._copy.table, book=book))


def pairs_of(news: Change) -> Blocks:
    """Each place that changed, and behind them what stands there now."""
    return np.concatenate((news.lost, news.entries[news.lost]))


def image_of(table: Table) -> bytes:
    """The whole file. The epoch is as it was before the entries were read, so that none is missed later."""
    table.accept(table.read())
    image = bytearray(table.map)
    image[TABLE_EPOCH : TABLE_EPOCH + 8] = struct.pack("<Q", table.seen_epoch)
    return bytes(image)


class TableCopy:
    """A table of this rank's own, in the layout of valved's."""

    def __init__(self, image: bytes) -> None:
        fd = os.memfd_create("valve_table_copy")
        try:
            os.write(fd, image)
            self.map = mmap.mmap(fd, len(image))
            self.table = Table(fd, len(image))
        finally:
            os.close(fd)
        entries_at = TABLE_HEAD.unpack_from(self.map)[6]
        self._entries = np.frombuffer(self.map, dtype=np.uint32, count=self.table.blocks, offset=entries_at)

    def write(self, epoch: int, slow_words: tuple[int, int, int], pairs: Blocks) -> None:
        places, entries = np.split(pairs, 2)
        self._entries[places] = entries
        self.map[TABLE_BACKED_BLOCKS : TABLE_BACKED_BLOCKS + 12] = struct.pack("<III", *slow_words)
        self.map[TABLE_EPOCH : TABLE_EPOCH + 8] = struct.pack("<Q", epoch)


def ranks_of(scheduler: Any, link: Link) -> Alone | Ranks:
    group = scheduler.tp_group
    return Ranks(link, Group(group.cpu_group, group.ranks, group.rank)) if group.world_size > 1 else Alone(link)


class NoBook(Book):
    """Of every rank but the first: valved hears of an engine once."""

    rows = 0

    def __init__(self) -> None:
        """There is no file."""

    def offer(self, blocks: Iterable[int], offered: bool) -> None: ...

    def write_gauges(self, mode: int, used: int, wanted: int, steps: int) -> None: ...

    def write_mode(self, mode: int) -> None: ...

    def write_receipts(self, *counters: int) -> None: ...

    def acknowledge(self, epoch: int) -> None: ...
