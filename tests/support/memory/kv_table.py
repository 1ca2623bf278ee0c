"""Table and book of an attached hook, as the fake valved makes them (proto/abi/kv.h by hand)."""

from __future__ import annotations

import mmap
import os
import queue
import struct
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from fake_daemon import KV_ATTACH, KV_LAYOUT, KV_NEED, KV_TABLE, LONG_S, Client, Message

TABLE_MAGIC, BOOK_MAGIC = 0x31425456564B4C56, 0x314B4256564B4C56
HEAD = 128
TENSOR = struct.Struct("<9Q")
BOOK_WORDS = {"epoch_seen": ("<Q", 64), "mode": ("<I", 72), "used_blocks": ("<I", 76), "wanted_blocks": ("<I", 80)}
BOOK_WORDS |= {"steps": ("<I", 84), "lost_blocks": ("<Q", 128), "hit_requests": ("<Q", 136), "running": ("<I", 168)}


@dataclass
class Hook:
    """One attached hook: answer its messages, then change entries as a valved would."""

    client: Client
    attach: Message
    tensors: list[tuple[int, ...]]  # (base, block_stride, block_bytes, ...)
    table: mmap.mmap
    book: mmap.mmap
    needs: queue.Queue[Message] = field(default_factory=queue.Queue)

    @property
    def blocks(self) -> int:
        return self.attach.blocks

    def word(self, name: str) -> int:
        form, at = BOOK_WORDS[name]
        return struct.unpack_from(form, self.book, at)[0]

    @property
    def epoch(self) -> int:
        return struct.unpack_from("<Q", self.table, 64)[0]

    def rows(self) -> dict[int, list[int]]:
        """Request to blocks, as the choice of victims sees them."""
        rows, width = struct.unpack_from("<II", self.book, 16)
        heads, cells = struct.unpack_from("<II", self.book, 28)
        found = {}
        for row in range(rows):
            request, blocks, _ = struct.unpack_from("<QII", self.book, heads + 16 * row)
            if request and blocks:
                found[request] = list(struct.unpack_from(f"<{blocks}I", self.book, cells + 4 * width * row))
        return found

    def offered(self) -> list[int]:
        at = struct.unpack_from("<I", self.book, 24)[0]
        return [block for block in range(self.blocks) if self.book[at + block]]

    def change(self, blocks: Iterable[int], backed: bool) -> int:
        """One change: entries, then the epoch."""
        for block in blocks:
            at = HEAD + 4 * block
            before = struct.unpack_from("<I", self.table, at)[0]
            self.table[at : at + 4] = struct.pack("<I", ((before >> 1) + 1) << 1 | backed)
        self.table[64:80] = struct.pack("<QQ", self.epoch + 1, time.monotonic_ns())
        return self.epoch

    def aim(self, target_blocks: int) -> None:
        self.table[84:88] = struct.pack("<I", target_blocks)

    def set_columns(self, column_of: list[int]) -> None:
        at = HEAD + 4 * self.blocks
        self.table[at : at + 4 * self.blocks] = struct.pack(f"<{self.blocks}I", *column_of)
        self.table[24:28] = struct.pack("<I", max(column_of) + 1)

    def close(self) -> None:
        self.table.close()
        self.book.close()


@dataclass
class Hooks:
    """Answers KV_LAYOUT, KV_ATTACH and KV_NEED of every client. `columns` cuts the blocks into so many."""

    columns: int = 1
    backed: int | None = None  # blocks that have memory when the hook gets its table; None: all
    attached: queue.Queue[Hook] = field(default_factory=queue.Queue)
    made: list[Hook] = field(default_factory=list)
    _tensors: dict[int, list[tuple[int, ...]]] = field(default_factory=dict)

    def take(self, client: Client, message: Message) -> bool:
        if message.type == KV_LAYOUT:
            listed = self._tensors.setdefault(id(client), [])
            listed += [TENSOR.unpack_from(message.tensor, i * TENSOR.size) for i in range(message.count)]
            client.ack(message)
        elif message.type == KV_ATTACH:
            self._attach(client, message)
        elif message.type == KV_NEED:
            for hook in self.made:
                if hook.client is client:
                    hook.needs.put(message)
        return message.type in {KV_LAYOUT, KV_ATTACH, KV_NEED}

    def hook(self) -> Hook:
        return self.attached.get(timeout=LONG_S)

    def close(self) -> None:
        for hook in self.made:
            hook.close()

    def _attach(self, client: Client, message: Message) -> None:
        table_bytes = HEAD + 8 * message.blocks
        heads = 192 + -(-message.blocks // 64) * 64
        cells = heads + 16 * message.rows
        book_bytes = cells + 4 * message.rows * message.row_blocks
        table_fd, book_fd = os.memfd_create("table"), os.memfd_create("book")
        os.ftruncate(table_fd, table_bytes)
        os.ftruncate(book_fd, book_bytes)
        table, book = mmap.mmap(table_fd, table_bytes), mmap.mmap(book_fd, book_bytes)
        head = (TABLE_MAGIC, 1, table_bytes, message.blocks, message.block_tokens, 1, HEAD, HEAD + 4 * message.blocks)
        table[:36] = struct.pack("<QIIIIIII", *head)
        backed = message.blocks if self.backed is None else self.backed
        entries = struct.pack(f"<{message.blocks}I", *[block < backed for block in range(message.blocks)])
        table[HEAD : HEAD + len(entries)] = entries
        table[80:88] = struct.pack("<II", backed, message.blocks)
        book[:36] = struct.pack(
            "<QIIIIIII", BOOK_MAGIC, 1, book_bytes, message.rows, message.row_blocks, 192, heads, cells
        )
        hook = Hook(client, message, self._tensors.get(id(client), []), table, book)
        hook.set_columns([block * self.columns // message.blocks for block in range(message.blocks)])
        self.made.append(hook)
        client.send(KV_TABLE, message.seq, struct.pack("<HHIII", 1, 0, table_bytes, book_bytes, 0), [table_fd, book_fd])
        os.close(table_fd)
        os.close(book_fd)
        self.attached.put(hook)
