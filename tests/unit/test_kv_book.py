"""What is read of an engine's book: as much as its blocks can mean, never as much as it says."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import tracemalloc
from contextlib import closing

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scarce import opened

from valved.abi import kv_files
from valved.abi.kv_files import BOOK_HEAD, LOOP_CELLS, MAX_CELLS, ROW, KvBook, KvTable, check_sizes
from valved.model.figures import LARGEST
from valved.model.memory import KvLayout, KvRange, KvTensor
from valved.policy.columns import columns_of
from valved.policy.eviction import BlockTables, EvictionSettings, index_requests


class Writer:
    """The hook's side of a book."""

    def __init__(self, book, rows, row_blocks, blocks):
        self.memory = mmap.mmap(book.fd, book.bytes)
        heads_at = BOOK_HEAD.itemsize + -(-blocks // 64) * 64
        self.head = np.frombuffer(self.memory, BOOK_HEAD, 1)
        self.heads = np.frombuffer(self.memory, ROW, rows, heads_at)
        cells = np.frombuffer(self.memory, "<u4", rows * row_blocks, heads_at + rows * ROW.itemsize)
        self.cells = cells.reshape(rows, row_blocks)

    def hold(self, row, blocks, tokens=0, says=None):
        self.heads["request"][row] = row + 1
        self.cells[row, : len(blocks)] = blocks
        self.heads["blocks"][row], self.heads["tokens"][row] = says or len(blocks), tokens


def make(rows, row_blocks, blocks):
    book = KvBook(rows, row_blocks, blocks, 16)
    return closing(book), Writer(book, rows, row_blocks, blocks)


@given(st.lists(st.lists(st.integers(0, 40), max_size=6), max_size=8), st.integers(0, 99))
def test_rows_are_read_as_they_were_written(rows, tokens):
    opened, writer = make(8, 6, 32)
    with opened as book:
        for row, blocks in enumerate(rows):
            writer.hold(row, blocks, tokens)

        read = book.requests()

        wanted = [[block for block in blocks if block < 32] for blocks in rows if blocks]
        assert [part.tolist() for part in np.split(read.blocks, read.ptr[1:-1])][: len(wanted)] == wanted
        assert len(read.ptr) == len(wanted) + 1
        held = [16 * len(blocks) for blocks in wanted]
        assert read.tokens.tolist() == [min(tokens, one) if tokens else one for one in held]


def test_one_long_request_never_makes_all_the_others_as_long():
    opened, writer = make(1024, 8192, 4096)
    with opened as book:
        for row in range(1023):
            writer.hold(row, [row, row + 1])
        writer.hold(1023, range(4096), says=8192)
        tracemalloc.start()

        read = book.requests()

        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert len(read.ptr) == 1025
        assert peak < 4 << 20  # dense it was 67 million cells of eight bytes


def test_a_hostile_book_never_costs_more_than_its_engines_blocks():
    rows, row_blocks, blocks = 4096, 15_000, 4096
    assert not check_sizes(blocks, 16, rows, row_blocks)
    opened, writer = make(rows, row_blocks, blocks)
    with opened as book:
        writer.heads["request"] = 1
        writer.heads["blocks"] = 2**32 - 1
        tracemalloc.start()

        read = book.requests()

        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert len(read.blocks) <= book.most_cells
        assert peak < 2 << 20
        assert os.fstat(book.fd).st_blocks * 512 < 1 << 20  # reading it made none of its pages


def test_the_book_of_the_largest_engine_never_costs_the_memory_of_a_daemon():
    """Half a million blocks, and requests that hold any four of them each: 2 million cells took 1.4 s and 390 MB."""
    blocks, rows, row_blocks, handles = 1 << 19, 4096, 512, 512
    handle_bytes = 2 << 20
    block_bytes = handles * handle_bytes // blocks
    layout = KvLayout(
        ranges=(KvRange(base_addr=1 << 40, handle_bytes=handle_bytes, handles=handles),),
        tensors=(KvTensor(base_addr=1 << 40, block_stride_bytes=block_bytes, block_bytes=block_bytes),),
        blocks=blocks,
        block_tokens=16,
    )
    columns = columns_of(layout)
    opened, writer = make(rows, row_blocks, blocks)
    with opened as book:
        writer.heads["request"] = 1
        writer.heads["blocks"] = row_blocks
        writer.cells[:] = np.random.default_rng(1).integers(0, blocks, (rows, row_blocks))
        assert not book.is_small()
        tracemalloc.start()

        read = book.requests()
        index_requests(columns, BlockTables(ptr=read.ptr, blocks=read.blocks, tokens=read.tokens), EvictionSettings())

        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert len(read.blocks) == MAX_CELLS
        assert peak < 100 << 20  # two of them at once, beside a daemon of 80 MB in a container of 256 MiB


def test_no_number_of_a_book_is_ever_too_large_to_be_added_up():
    opened, writer = make(4, 4, 32)
    with opened as book:
        writer.head.view(np.uint8)[64:] = 255

        view = book.view()

        numbers = [value for value in view if isinstance(value, int)]
        assert len(numbers) >= 10
        assert max(numbers) <= LARGEST
        assert view.used_blocks == view.wanted_blocks == 32


@pytest.mark.parametrize("make_file", [lambda: KvTable(8, 16), lambda: KvBook(1, 8, 8, 16)], ids=["table", "book"])
def test_a_file_that_is_dropped_never_stays_open(make_file):
    before = opened()
    file = make_file()
    assert opened() - before
    del file
    gc.collect()
    assert not opened() - before


@pytest.mark.parametrize("make_file", [lambda: KvTable(8, 16), lambda: KvBook(1, 8, 8, 16)], ids=["table", "book"])
def test_a_file_that_was_closed_and_is_dropped_never_closes_another_that_has_its_number(make_file):
    file = make_file()
    fd = file.fd
    file.close()
    with open(os.devnull) as another:
        if another.fileno() != fd:
            os.dup2(another.fileno(), fd)
        del file
        gc.collect()
        os.fstat(fd)
        if another.fileno() != fd:
            os.close(fd)


def test_a_table_never_costs_pages_for_columns_that_nobody_has_told():
    """Any process may attach an engine of four million blocks, again and again: 34 ms of the loop and 32 MB each."""
    blocks = 1 << 20
    with closing(KvTable(blocks, 16)) as table:
        assert os.fstat(table.fd).st_blocks * 512 <= 4 * blocks + (2 << 20)  # a huge page more
        assert table.is_backed().all()


PUNCH_A_HOLE = 3  # FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE
PAGEOUT = 21  # MADV_PAGEOUT
libc = ctypes.CDLL(None, use_errno=True)


def fallocate(fd, mode, at, size):
    return libc.fallocate(fd, mode, ctypes.c_long(at), ctypes.c_long(size))


def touch(fd, at=0):
    with mmap.mmap(fd, os.fstat(fd).st_size, prot=mmap.PROT_READ) as pages:
        pages[at :: mmap.PAGESIZE]


def nothing(fd):
    pass


def all_but_the_first(fd):
    touch(fd, mmap.PAGESIZE)


def pages_that_nobody_has_written(fd):
    """They are counted as blocks, and an fallocate that fails frees them."""
    assert fallocate(fd, 0, 0, os.fstat(fd).st_size) == 0


@pytest.mark.parametrize("bring", [nothing, all_but_the_first, pages_that_nobody_has_written])
def test_a_table_with_a_page_that_valved_would_make_never_counts_as_brought(bring):
    with closing(KvTable(1 << 14, 16, is_bare=True)) as table:
        assert not os.fstat(table.fd).st_blocks
        bring(table.fd)

        assert not table.take_pages()

        touch(table.fd)
        assert table.take_pages()
        before = os.fstat(table.fd).st_blocks
        table.begin()
        table.set_columns(np.arange(1 << 14), 1 << 14)
        assert os.fstat(table.fd).st_blocks == before
        assert table.is_backed().all()


def test_pages_that_a_client_brought_never_go_away_again():
    """A client may ask the kernel to drop what nobody has written, and valved would pay for it at its next write."""
    with closing(KvTable(1 << 14, 16, is_bare=True)) as table:
        with mmap.mmap(table.fd, table.bytes, prot=mmap.PROT_READ) as pages:
            assert not any(pages[:: mmap.PAGESIZE])
            brought = os.fstat(table.fd).st_blocks
            assert table.take_pages()
            table.begin()

            pages.madvise(PAGEOUT)

        assert os.fstat(table.fd).st_blocks == brought


def test_no_client_ever_writes_into_a_bare_table_or_frees_or_adds_a_page():
    with closing(KvTable(1 << 14, 16, is_bare=True)) as table:
        size = os.fstat(table.fd).st_size
        touch(table.fd)
        for tried in (
            lambda: os.pwrite(table.fd, b"x", 0),
            lambda: os.ftruncate(table.fd, 0),
            lambda: os.ftruncate(table.fd, 2 * size),
            lambda: mmap.mmap(table.fd, size),
        ):
            with pytest.raises(PermissionError):
                tried()
        assert fallocate(table.fd, PUNCH_A_HOLE, 0, size) == -1
        assert fallocate(table.fd, 1, size, size) == -1  # FALLOC_FL_KEEP_SIZE: beyond the end

        assert table.take_pages()


def test_reading_a_book_never_makes_a_page_of_it():
    """64,000 requests of one block each, every one in a page of its own that nobody wrote: valved made 251 MiB, and
    paid for them as long as the hook kept the book."""
    rows, row_blocks, blocks = 64_000, 1024, 1 << 16
    opened, writer = make(rows, row_blocks, blocks)
    with opened as book:
        writer.heads["request"] = writer.heads["blocks"] = 1
        before = os.fstat(book.fd).st_blocks

        assert len(book.requests().blocks) == rows
        assert not book.offered().any()
        assert not book.is_small()
        book.view()

        assert os.fstat(book.fd).st_blocks == before
        assert fallocate(book.fd, PUNCH_A_HOLE, 0, book.bytes) == 0
        assert not len(book.requests().blocks)
        book.view()
        assert os.fstat(book.fd).st_blocks * 512 <= 2 << 20  # its first page, or a huge one


def test_a_book_that_is_closed_while_a_thread_reads_it_never_lends_that_thread_another_file():
    book = KvBook(1, 8, 8, 16)
    kept = book._file
    book.close()

    with open(os.devnull) as another:
        assert another.fileno() != kept.fd
    with pytest.raises(OSError, match="gone"):
        book.offered()
    del kept


def test_a_service_never_waits_for_a_call_for_each_of_many_short_rows(monkeypatch):
    """8,192 rows of one block each are few cells: their calls took the loop 5 to 13 ms, where it had 10 for all."""
    made, read = [], kv_files.read_spans
    monkeypatch.setattr(kv_files, "read_spans", lambda fd, at, sizes: (made.append(len(at)), read(fd, at, sizes))[1])
    opened, writer = make(LOOP_CELLS, 1024, 1 << 16)
    with opened as book:
        writer.heads["request"][:2048] = writer.heads["blocks"][:2048] = 1
        assert book.is_small(), "of an engine with very many requests"
        assert len(book.requests(LOOP_CELLS).blocks) == 2048

        writer.heads["request"] = writer.heads["blocks"] = 1

        assert not book.is_small()
        assert len(book.requests(LOOP_CELLS).blocks) == 2048
        assert max(made) == 2048
        assert len(book.requests().blocks) == LOOP_CELLS, "a thread has time for all"
