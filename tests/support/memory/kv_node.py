"""valved's side of KV memory, for tests: a link socket, one table, one book, and verbs to take and give blocks.

Standard library and numpy only, because it also runs inside the environment of a real engine.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

HEADER = struct.Struct("<IHHIIQ")
HELLO, WELCOME, REFUSED, ACK, LAYOUT, ATTACH, TABLE, NEED = 1, 2, 3, 4, 22, 23, 24, 25
PAGE = 4096
REGION_BYTES = PAGE + 256 * 64 + PAGE


def memfd(name: str, size: int) -> int:
    fd = os.memfd_create(name)
    os.ftruncate(fd, size)
    return fd


def wait_for(condition: Callable[[], object], what: str) -> None:
    """The deadline only ends a hung test."""
    deadline = time.monotonic() + 200
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.005)


class KvNode:
    """One engine at a time. `take` and `give` are what a reclaim and its end look like from the engine."""

    def __init__(self, folder: Path, *, columns: int = 0, backed: int | None = None, features: int = 0xFFFF) -> None:
        self.path = folder / "link.sock"
        self.wanted_columns, self.first_backed, self.features = columns, backed, features
        self.refuse: bytes | None = None  # body of a REFUSED
        self.attach_status = self.layout_status = 0
        self.kv_abi = 1
        self.break_table = False
        self.is_blank = False  # no rank has told where its blocks lie: a table without columns
        self.blocks_told = 0  # in the table, whatever the engine has
        self.needs: list[int] = []
        self.sent_ns = 0  # when the last packet was, as its sender says
        self.hellos: list[tuple[object, ...]] = []
        self.layouts: list[bytes] = []
        self.attached: tuple[int, ...] = ()
        self.entries = np.zeros(0, dtype=np.uint32)
        self.column_of = np.zeros(0, dtype=np.uint32)
        self._table: mmap.mmap | None = None
        self._book: mmap.mmap | None = None
        self._region: mmap.mmap | None = None
        self._connections: list[socket.socket] = []
        self._bells: list[int] = []
        self._serving: list[threading.Thread] = []
        self.changed = threading.Condition()
        self.start()

    # ---- life ----

    def start(self) -> None:
        self._stop = False
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with contextlib.suppress(FileNotFoundError):
            self.path.unlink()
        self._listener.bind(str(self.path))
        self._listener.listen(8)
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """valved dies: its files stay with whoever mapped them."""
        if self._stop:
            return
        self._stop = True
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(timeout=200)  # whom it accepted last is among the connections now
        for link in self._connections:
            with contextlib.suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)
        for thread in self._serving:  # none answers, or writes what it heard, in its successor's time
            thread.join(timeout=200)
        self._connections.clear()
        for bell in self._bells:
            os.close(bell)
        self._bells.clear()
        self._serving.clear()
        self.attached = ()

    @property
    def is_up(self) -> bool:
        return not self._stop

    # ---- verbs ----

    def take(self, blocks: list[int]) -> None:
        """These blocks lose their memory."""
        self._change(blocks, backed=0)

    def give(self, blocks: list[int]) -> None:
        """They have memory again, zero."""
        self._change(blocks, backed=1)

    def take_and_give(self, blocks: list[int]) -> None:
        """Between two looks of the engine: the bit is as it was, the generation is not."""
        self._change(blocks, backed=0)
        self._change(blocks, backed=1)

    def take_columns(self, columns: list[int]) -> list[int]:
        blocks = [int(block) for block in np.flatnonzero(np.isin(self.column_of, columns)) if block]
        self.take(blocks)
        return blocks

    def aim(self, target_blocks: int) -> None:
        """Ask for offers."""
        self._table[84:88] = struct.pack("<I", target_blocks)

    def detach(self) -> None:
        self._table[88:92] = struct.pack("<I", 1)

    def backed(self) -> list[int]:
        return np.flatnonzero(self.entries & 1).tolist()

    @property
    def epoch(self) -> int:
        return int(struct.unpack_from("<Q", self._table, 64)[0])

    def _change(self, blocks: list[int], backed: int) -> None:
        for block in blocks:
            self.entries[block] = ((self.entries[block] >> 1) + 1) << 1 | backed
        self._table[80:84] = struct.pack("<I", int(np.count_nonzero(self.entries & 1)))
        self._table[64:72] = struct.pack("<Q", self.epoch + 1)

    # ---- what the hook wrote ----

    def book(self) -> dict[str, int]:
        names = ("lost_blocks", "hit_requests", "lost_tokens", "dropped_tokens", "failures", "running", "waiting")
        values = dict(zip(names, struct.unpack_from("<QQQQQII", self._book, 128), strict=True))
        gauges = struct.unpack_from("<IIII", self._book, 72)
        values |= dict(zip(("mode", "used", "wanted", "steps"), gauges, strict=True))
        values["epoch_seen"] = struct.unpack_from("<Q", self._book, 64)[0]
        return values

    def rows(self) -> dict[int, list[int]]:
        """Request hash -> blocks, as the book says."""
        _, _, _, rows, width, _, heads, cells = struct.unpack_from("<QIIIIIII", self._book)
        found = {}
        for row in range(rows):
            request, blocks, _ = struct.unpack_from("<QII", self._book, heads + 16 * row)
            if request:
                found[request] = list(struct.unpack_from(f"<{blocks}I", self._book, cells + 4 * row * width))
        return found

    def offered(self) -> list[int]:
        at = struct.unpack_from("<QIIIIIII", self._book)[5]
        return [block for block in range(len(self.entries)) if self._book[at + block]]

    def region(self) -> dict[str, int]:
        open_requests, _, hint_ns, started, ended, useful = struct.unpack_from("<IIQQQQ", self._region, 320)
        return {"open": open_requests, "hint_ns": hint_ns, "started": started, "ended": ended, "useful": useful}

    def launch_ns(self) -> int:
        return int(struct.unpack_from("<Q", self._region, 72)[0])

    def rings(self) -> int:
        """Of the newest connection, since the last call."""
        try:
            return os.eventfd_read(self._bells[-1])
        except BlockingIOError:
            return 0

    # ---- the socket ----

    def _accept(self) -> None:
        while not self._stop:
            try:
                link, _ = self._listener.accept()
            except OSError:
                return
            self._connections.append(link)
            self._serving.append(threading.Thread(target=self._serve, args=(link,), daemon=True))
            self._serving[-1].start()

    def _serve(self, link: socket.socket) -> None:
        with link, contextlib.suppress(OSError):
            while raw := link.recv(2048):
                _, _, kind, _, seq, self.sent_ns = HEADER.unpack_from(raw)
                self._answer(link, kind, seq, raw[HEADER.size :])
                with self.changed:
                    self.changed.notify_all()

    def _answer(self, link: socket.socket, kind: int, seq: int, body: bytes) -> None:
        if kind == HELLO:
            hello = struct.unpack("<HHIII32s16s", body)
            if self.refuse is not None:
                send(link, REFUSED, self.refuse, seq)
                return
            control, region = memfd("control", PAGE), memfd("region", REGION_BYTES)
            os.pwrite(control, struct.pack("<Q", 1_000_000_000), 136)
            self._region = mmap.mmap(region, REGION_BYTES)
            body = struct.pack("<HHIQQII", 1, 3, self.features, 7, 8, PAGE, REGION_BYTES)
            bell = os.eventfd(0, os.EFD_NONBLOCK)
            self._bells.append(os.dup(bell))
            send(link, WELCOME, body, seq, control, region, bell, os.eventfd(0))
            self.hellos.append(hello)
        elif kind == LAYOUT:
            self.layouts.append(body)
            send(link, ACK, struct.pack("<II", self.layout_status, 0), seq)
        elif kind == ATTACH and self.attach_status:
            send(link, ACK, struct.pack("<II", self.attach_status, 0), seq)
        elif kind == ATTACH:
            self._attach(link, seq, body)
        elif kind == NEED:
            self.needs.append(struct.unpack_from("<I", body)[0])

    def _attach(self, link: socket.socket, seq: int, body: bytes) -> None:
        attached = struct.unpack("<HHIIIIIII48s", body)[2:8]
        _, blocks, block_tokens, rows, row_blocks, _ = attached
        blocks = self.blocks_told or blocks
        if len(self.entries) != blocks:  # a restart keeps what is backed, as the shims tell it
            known = self.first_backed if self.first_backed is not None else blocks
            self.entries = np.array([1 if block < known else 0 for block in range(blocks)], dtype=np.uint32)
        self.entries = np.where(self.entries & 1, 1, 2).astype(np.uint32)  # a new table counts changes from nothing
        per_column = max(1, -(-blocks // (self.wanted_columns or max(1, blocks // 8))))
        self.column_of = np.arange(blocks, dtype=np.uint32) // per_column
        size = 128 + 8 * blocks
        table_fd = memfd("table", size)
        self._table = mmap.mmap(table_fd, size)
        columns = 0 if self.is_blank else int(self.column_of.max()) + 1
        magic = 0 if self.break_table else 0x31425456564B4C56
        head = (magic, 1, size, blocks, block_tokens, columns, 128, 128 + 4 * blocks)
        self._table[:36] = struct.pack("<QIIIIIII", *head)
        self._table[84:88] = struct.pack("<I", blocks)
        self._table[128 : 128 + 4 * blocks] = self.entries.tobytes()
        self._table[128 + 4 * blocks :] = (self.column_of * (not self.is_blank)).astype(np.uint32).tobytes()
        self.entries = np.frombuffer(self._table, dtype=np.uint32, count=blocks, offset=128)
        heads = 192 + -(-blocks // 8) * 8
        cells = heads + 16 * rows
        book_bytes = cells + 4 * rows * row_blocks
        book_fd = memfd("book", book_bytes)
        self._book = mmap.mmap(book_fd, book_bytes)
        head = (0x314B4256564B4C56, 1, book_bytes, rows, row_blocks, 192, heads, cells)
        self._book[:36] = struct.pack("<QIIIIIII", *head)
        self.attached = attached
        send(link, TABLE, struct.pack("<HHIII", self.kv_abi, 0, size, book_bytes, 0), seq, table_fd, book_fd)


def send(link: socket.socket, kind: int, body: bytes, seq: int, *fds: int) -> None:
    packet = HEADER.pack(0x4B4E4C56, 1, kind, HEADER.size + len(body), seq, time.monotonic_ns()) + body
    socket.send_fds(link, [packet], list(fds))
    for fd in fds:
        os.close(fd)


def restart(node: KvNode, scheduler: Any) -> None:
    before = scheduler._valve.link.session
    node.stop()
    node.start()
    wait_for(lambda: scheduler._valve.link.session is not before and node.attached, "attached again")
