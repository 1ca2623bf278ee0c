"""The two shared files of an attached engine (kv.h): the table, which valved writes, and the book, which it reads.

Ordering. A hook that sees an epoch must see the entries written before it. valved stores entries and epoch by separate
calls into numpy, which no compiler reorders, and x86-64 keeps stores in order; the shim is for x86-64 alone as well.

Trust. Nothing in a book can hurt anybody but its own engine: numbers are cut to what is possible, block ids that
cannot be are dropped, and the header that valved wrote is never read back.

Memory. Who makes a page of a shared file pays for it until nobody keeps the file, and a client may keep it for ever. So
a hook makes the pages of its table, by reads in a mapping that it cannot write into: valved has sealed the file before
it passes it on, so that nobody can change it or free a page. Of a book valved maps the first page alone and reads the
rest by calls, which make no page.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import struct
import weakref
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import valve_abi
from numpy.typing import NDArray
from valve_abi import KV_ABI as ABI
from valve_abi import KV_BACKED as BACKED
from valve_abi import KV_BOOK_MAGIC as BOOK_MAGIC
from valve_abi import KV_MAX_BLOCKS as MAX_BLOCKS
from valve_abi import KV_MAX_BOOK as MAX_BOOK
from valve_abi import KV_MAX_ROW as MAX_ROW
from valve_abi import KV_MAX_ROWS as MAX_ROWS
from valve_abi import KV_TABLE_MAGIC as TABLE_MAGIC
from valve_abi import KvMode

from valved.abi import region
from valved.cells.taking import BlockPlaces, read_spans, table_at
from valved.fds import Fds
from valved.model.figures import LARGEST, plausible

Ints = NDArray[np.int64]
TABLE_HEAD: np.dtype[Any] = np.dtype(valve_abi.KV_TABLE.dtype())
BOOK_HEAD: np.dtype[Any] = np.dtype(valve_abi.KV_BOOK.dtype())
ROW: np.dtype[Any] = np.dtype(valve_abi.KV_ROW.dtype())
CELLS_PER_BLOCK = 4  # requests that hold one block, on average
MAX_CELLS = 1 << 18  # of a book that are read: what they cost takes a thread 0.2 s and 70 MB to find out, at the worst
PART = 1 << 18  # bytes of a table at once: more saves no time
ALL_BACKED = memoryview(np.full(PART // 4, BACKED, "<u4").tobytes())  # kept
LOOP_CELLS = 1 << 13  # the same on the loop, while a service waits: 10 ms
CELLS_PER_ROW = 4  # where so many cells are read, so many times fewer rows are: each takes a call


def _closes(owner: object, fd: int) -> weakref.finalize[[int], Any]:
    """Closes it once: when that is called, or when its owner is dropped."""
    closes = weakref.finalize(owner, os.close, fd)
    closes.atexit = False
    return closes


def _back_all(fd: int, at: int, end: int) -> None:
    """By calls, which take half of the time that a fault for each page takes."""
    while at < end:
        at += os.pwrite(fd, ALL_BACKED[: end - at], at)


_libc = ctypes.CDLL(None, use_errno=True)


class _OpenFile:
    """Open as long as somebody has this: a thread that reads it, for one."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        _closes(self, fd)


class KvTable:
    """Which blocks of an engine have memory. Every block starts backed, generation 0."""

    def __init__(self, blocks: int, block_tokens: int, *, is_bare: bool = False) -> None:
        """`is_bare`: without a page, until `begin`. Nothing of it may be touched before `take_pages`."""
        entries_at, columns_at = TABLE_HEAD.itemsize, TABLE_HEAD.itemsize + 4 * blocks
        self.bytes = columns_at + 4 * blocks
        with Fds() as fds:
            self.fd = fds.own(region.create_memfd("valve-kv-table", self.bytes))
            if not is_bare:
                _back_all(self.fd, entries_at, columns_at)  # the columns are zero: a file begins so, and costs no page
            self._memory = mmap.mmap(self.fd, self.bytes)
            region.seal_control(self.fd)
            fds.keep()
        self._closes = _closes(self, self.fd)
        self._head = np.frombuffer(self._memory, TABLE_HEAD, 1)
        self._entries = np.frombuffer(self._memory, "<u4", blocks, entries_at)
        self._column_of = np.frombuffer(self._memory, "<u4", blocks, columns_at)
        self._raw: object = table_at(self._memory)
        self._backed, self.epoch, self.block_tokens = blocks, 0, block_tokens
        if not is_bare:
            self._write_head()

    def take_pages(self) -> bool:
        """Of one that is bare: every page is there, and stays. Nobody can shrink the file or punch holes into it.

        Others made them, by reading. The kernel drops such pages where anybody asks (MADV_PAGEOUT), and we would pay
        for them at our next write: so they are written here, right after the look at them. By mincore: blocks of fstat
        count pages beyond the end and those that an fallocate gives back when it fails, and a seek for holes waits for
        locks that others may hold.
        """
        pages = np.frombuffer(self._memory, np.uint8)
        for at in range(0, self.bytes, PART):
            part = pages[at : at + PART]
            found = ctypes.create_string_buffer(-(-len(part) // mmap.PAGESIZE))
            where = ctypes.c_void_p(part.ctypes.data)
            if _libc.mincore(where, ctypes.c_size_t(len(part)), found) or b"\0" in found.raw:
                return False
            part[:: mmap.PAGESIZE] = 0
        return True

    def begin(self) -> None:
        """Of one that was bare and has its pages."""
        self._entries[:] = BACKED
        self._write_head()

    def _write_head(self) -> None:
        blocks, entries_at = self.blocks, TABLE_HEAD.itemsize
        numbers = {"abi": ABI, "bytes": self.bytes, "blocks": blocks, "block_tokens": self.block_tokens, "columns": 0}
        places = {"entry_offset": entries_at, "column_offset": entries_at + 4 * blocks}
        for name, value in {**numbers, **places, "backed_blocks": blocks, "target_blocks": blocks}.items():
            self._head[name] = value
        self._head["magic"] = TABLE_MAGIC

    @property
    def blocks(self) -> int:
        return len(self._entries)

    @property
    def backed_blocks(self) -> int:
        return self._backed

    def entry(self, block: int) -> tuple[int, bool]:
        """Generation, and whether it has memory."""
        return int(self._entries[block]) >> 1, bool(self._entries[block] & BACKED)

    def is_backed(self) -> NDArray[np.bool_]:
        return (self._entries & BACKED).astype(np.bool_)

    def set_columns(self, column_of: Ints, columns: int) -> None:
        self._column_of[:] = column_of
        self._head["columns"] = columns

    def record(self, blocks: Ints, backed: bool, now_ns: int) -> None:
        """One change: entries first, the epoch last."""
        before = self._entries[blocks]
        self._entries[blocks] = ((before >> 1) + 1) << 1 | backed
        self._backed += (len(blocks) if backed else 0) - int((before & BACKED).sum())
        self._head["backed_blocks"] = self._backed
        self._head["changed_ns"] = now_ns
        self.epoch += 1
        self._head["epoch"] = self.epoch

    def lose(self, places: BlockPlaces, columns: Ints, now_ns: int) -> None:
        """`record` for every block with a byte in these columns."""
        if places.blocks != len(self._entries):
            raise IndexError(f"places of {places.blocks} blocks, a table of {len(self._entries)}")
        self._backed -= places.lose(self._raw, columns, now_ns)
        self.epoch += 1

    def set_target(self, blocks: int) -> None:
        self._head["target_blocks"] = blocks

    def set_step_tokens(self, tokens: int) -> None:
        self._head["step_tokens"] = tokens

    def detach(self) -> None:
        self._head["detached"] = 1

    def close(self) -> None:
        """The hook keeps its own mapping: what it reads there stays as it was left."""
        self._head = self._entries = self._column_of = np.empty(0, "<u4")
        self._raw = None
        self._memory.close()
        self._closes()


class BookView(NamedTuple):
    """One look at what the hook says, as it stands in its book. A tuple: a service that waits has it read."""

    epoch_seen: int
    mode: KvMode
    used_blocks: int
    wanted_blocks: int
    steps: int
    lost_blocks: int
    hit_requests: int
    lost_tokens: int
    dropped_tokens: int
    failures: int
    running: int
    waiting: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BookRows:
    """The requests that hold blocks, flat: row r owns blocks[ptr[r]:ptr[r + 1]]."""

    ptr: Ints
    blocks: Ints
    tokens: Ints


def words_of(head: np.dtype[Any], names: tuple[str, ...]) -> struct.Struct:
    """These words of a head, all at once. numpy takes twice as long where caches are cold."""
    assert head.fields is not None
    layout, at = "<", 0
    for name in names:
        kind, offset = head.fields[name][:2]
        layout += f"{offset - at}x{'Q' if kind.itemsize == 8 else 'I'}"
        at = offset + kind.itemsize
    return struct.Struct(layout)


VIEW, MODE = words_of(BOOK_HEAD, BookView._fields), words_of(BOOK_HEAD, ("mode",))
MODES = {int(mode): mode for mode in KvMode}


class KvBook:
    """What the engine uses, wants and offers. The hook may write while we read: a torn row costs a worse choice."""

    def __init__(self, rows: int, row_blocks: int, blocks: int, block_tokens: int) -> None:
        self._blocks, self._block_tokens = blocks, block_tokens
        offered_at = BOOK_HEAD.itemsize
        heads_at = offered_at + -(-blocks // 64) * 64
        cells_at = heads_at + rows * ROW.itemsize
        self.bytes = cells_at + 4 * rows * row_blocks
        with Fds() as fds:
            self.fd = fds.own(region.create_memfd("valve-kv-book", self.bytes))
            region.seal_region(self.fd)
            self._memory = mmap.mmap(self.fd, BOOK_HEAD.itemsize)
            fds.keep()
        self._file: _OpenFile | None = _OpenFile(self.fd)
        head = np.frombuffer(self._memory, BOOK_HEAD, 1)
        places = {"offered_offset": offered_at, "head_offset": heads_at, "cell_offset": cells_at}
        for name, value in {"abi": ABI, "bytes": self.bytes, "rows": rows, "row_blocks": row_blocks, **places}.items():
            head[name] = value
        head["magic"] = BOOK_MAGIC
        self._offered_at, self._heads_at, self._cells_at = offered_at, heads_at, cells_at
        self._rows, self._row_blocks = rows, row_blocks

    @staticmethod
    def bytes_of(rows: int, row_blocks: int, blocks: int) -> int:
        return BOOK_HEAD.itemsize + -(-blocks // 64) * 64 + rows * ROW.itemsize + 4 * rows * row_blocks

    def view(self) -> BookView:
        words = VIEW.unpack_from(self._memory)
        if max(words) > LARGEST:
            words = tuple(map(plausible, words))
        epoch, mode, used, wanted, *rest = words
        used = min(used, self._blocks)
        wanted = min(max(wanted, used), self._blocks)
        return BookView(epoch, MODES.get(mode, KvMode.NONE), used, wanted, *rest)

    @property
    def mode(self) -> KvMode:
        return MODES.get(MODE.unpack_from(self._memory)[0], KvMode.NONE)

    def offered(self) -> NDArray[np.bool_]:
        return self._read(np.array([self._offered_at]), np.array([self._blocks])).astype(np.bool_)

    def _read(self, at: Ints, sizes: Ints) -> NDArray[np.uint8]:
        file = self._file
        if file is None:
            raise OSError(errno.EBADF, "its engine is gone")
        try:
            return read_spans(file.fd, at, sizes)
        except OSError:  # a page was swapped out, and its control group has no room: what the book says is nothing
            return np.zeros(int(sizes.sum()), np.uint8)

    def _heads(self) -> NDArray[Any]:
        return self._read(np.array([self._heads_at]), np.array([self._rows * ROW.itemsize])).view(ROW)

    def requests(self, most: int = MAX_CELLS) -> BookRows:
        """Rows in use, without block ids that cannot be. What it costs is bounded by the engine's blocks."""
        heads = self._heads()
        live = np.flatnonzero((heads["request"] != 0) & (heads["blocks"] != 0))
        counts = np.minimum(heads["blocks"][live], self._row_blocks).astype(np.int64)
        fits = np.cumsum(counts) <= min(self.most_cells, most)
        fits[most // CELLS_PER_ROW :] = False
        live, counts = live[fits], counts[fits]
        ptr = np.concatenate([[0], np.cumsum(counts)])
        cells = self._read(self._cells_at + 4 * self._row_blocks * live, 4 * counts).view("<u4").astype(np.int64)
        is_cell = cells < self._blocks
        ptr = np.concatenate([[0], np.cumsum(is_cell)])[ptr]
        held = np.diff(ptr) * self._block_tokens
        tokens = heads["tokens"][live].astype(np.int64)
        return BookRows(
            ptr=ptr.astype(np.int64),
            blocks=cells[is_cell],
            tokens=np.where(tokens == 0, held, np.minimum(tokens, held)),
        )

    @property
    def most_cells(self) -> int:
        """Requests share blocks, but not without end: of a book that says more, the first rows count."""
        return min(CELLS_PER_BLOCK * self._blocks, MAX_CELLS)

    def is_small(self) -> bool:
        """Even the loop may read all of it."""
        heads = self._heads()
        counts = np.minimum(heads["blocks"], self._row_blocks).astype(np.int64)[heads["request"] != 0]
        return int(counts.sum()) <= LOOP_CELLS and int(np.count_nonzero(counts)) <= LOOP_CELLS // CELLS_PER_ROW

    def close(self) -> None:
        self._memory.close()
        self._file = None


def check_sizes(blocks: int, block_tokens: int, rows: int, row_blocks: int) -> str:
    """Why these cannot be; empty when they can."""
    limits = {"blocks": (blocks, MAX_BLOCKS), "rows": (rows, MAX_ROWS), "row_blocks": (row_blocks, MAX_ROW)}
    for name, (value, most) in {**limits, "block_tokens": (block_tokens, 1 << 16)}.items():
        if not 0 < value <= most:
            return f"{name} = {value}: must be 1 to {most}"
    size = KvBook.bytes_of(rows, row_blocks, blocks)
    return f"a book of {size} bytes; at most {MAX_BOOK} are allowed" if size > MAX_BOOK else ""


assert struct.calcsize("P") == 8, "stores of 64-bit words must be single stores"
