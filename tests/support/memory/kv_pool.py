"""A pool of handles behind a FakeDaemon: as much of valved's memory service as the shim's tests need.

It backs ranges, sends orders, and keeps every handle's descriptor, so that a test can ask who maps what and whether
anything was leaked. Nothing here decides anything: the tests do.
"""

from __future__ import annotations

import os
import queue
import struct
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from fake_daemon import (
    FEATURE_MEMORY,
    FEATURE_SPARSE,
    KV_DONE,
    KV_HELD,
    KV_ORDER,
    KV_RANGE,
    KV_RUNS,
    KV_SCRATCH,
    LONG_S,
    Client,
    FakeDaemon,
    Message,
)
from kv_table import Hooks

MIB = 1 << 20
BACK, QUARANTINE, UNBACK, TRY = 1, 2, 3, 4
AT_ONCE, AT_STEP, OUTSIDE = 0, 1, 2
CREATE, ZERO = 1, 2
ELASTIC = 1
ENTRIES = 64
ENTRY = struct.Struct("<QII")
ORDER = struct.Struct("<QIHHII")
RUNS, RUN, RUN_ORDER = 80, struct.Struct("<QIIII"), struct.Struct("<QHHI")
TAG = 7  # what a test writes where it looks for its own bytes again
ENOMEM, EBUSY, EEXIST, EINVAL, EMFILE, ESTALE, EIO = 12, 16, 17, 22, 24, 116, 5


def tagged(engine: Any, address: int, slots: Iterable[int] = range(8)) -> list[int]:
    """The slots that hold what the test wrote there."""
    size = 2 * MIB
    return [slot for slot in slots if engine.wrong_pages(address + slot * size, size, TAG) == 0]


@dataclass(frozen=True)
class Entry:
    slot: int
    handle: int = 0
    flags: int = 0
    fd: int = -1

    def pack(self) -> bytes:
        return ENTRY.pack(self.handle, self.slot, self.flags)


def order_body(number: int, op: int, range_id: int, entries: Iterable[Entry], how: int = AT_ONCE) -> bytes:
    listed = list(entries)
    body = ORDER.pack(number, range_id, op, how, len(listed), 0) + b"".join(each.pack() for each in listed)
    return body.ljust(ORDER.size + ENTRIES * ENTRY.size, b"\0")


@dataclass(frozen=True)
class Run:
    range: int
    slot: int
    count: int = 1
    handle: int = 0
    flags: int = 0

    def pack(self) -> bytes:
        return RUN.pack(self.handle, self.range, self.slot, self.count, self.flags)


def runs_body(number: int, op: int, runs: Iterable[Run], how: int = AT_ONCE) -> bytes:
    listed = list(runs)
    body = RUN_ORDER.pack(number, op, how, len(listed)) + b"".join(each.pack() for each in listed)
    return body.ljust(RUN_ORDER.size + RUNS * RUN.size, b"\0")


def unpack_entries(message: Message) -> list[tuple[int, int, int]]:
    """(handle, slot, flags) of a KV_HELD."""
    return [ENTRY.unpack_from(message.entry, i * ENTRY.size) for i in range(message.count)]


@dataclass
class Pool:
    """Attach to a daemon before its clients come. `limit` handles may exist; further ranges get ENOMEM."""

    daemon: FakeDaemon
    handle_bytes: int = 2 * MIB
    limit: int = 64
    initial: int | None = None  # slots of an elastic range that are backed at once; None: all
    fds: dict[int, int] = field(default_factory=dict)  # handle to descriptor
    ranges: list[Message] = field(default_factory=list)
    done: queue.Queue[Message] = field(default_factory=queue.Queue)
    held: queue.Queue[Message] = field(default_factory=queue.Queue)
    born: queue.Queue[Message] = field(default_factory=queue.Queue)
    hooks: Hooks = field(default_factory=Hooks)
    silent: bool = False  # KV_RANGE is never answered
    sparse: bool = False  # asks for a descriptor, to make memory sparse itself
    scratch: queue.Queue[Message] = field(default_factory=queue.Queue)
    last: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.daemon.features |= FEATURE_MEMORY | (FEATURE_SPARSE if self.sparse else 0)
        self.daemon.words["kv_handle_bytes"] = self.handle_bytes
        self.daemon.on_message = self.take

    def take(self, client: Client, message: Message) -> bool:
        """On the daemon's thread of this client."""
        if message.type == KV_RANGE:
            self.ranges.append(message)
            self.born.put(message)
            if not self.silent and not message.held:
                threading.Thread(target=self.back_range, args=(client, message), daemon=True).start()
        elif message.type == KV_DONE:
            self.done.put(message)
        elif message.type == KV_SCRATCH:
            self.scratch.put(message)
        elif message.type == KV_HELD:
            self.held.put(message)
            client.ack(message)
        else:
            return self.hooks.take(client, message)
        return True

    def back_range(self, client: Client, message: Message) -> None:
        wanted = message.slots
        if message.flags & ELASTIC and self.initial is not None:
            wanted = min(wanted, self.initial)
        if len(self.fds) + wanted > self.limit:
            client.ack(message, ENOMEM)
            return
        for first in range(0, wanted, ENTRIES):
            slots = range(first, min(wanted, first + ENTRIES))
            self.create(client, message.range, slots)
        client.ack(message)

    def number(self) -> int:
        with self.lock:
            self.last += 1
            return self.last

    def send(self, client: Client, op: int, range_id: int, entries: Iterable[Entry], how: int = AT_ONCE) -> int:
        listed, number = list(entries), self.number()
        fds = [each.fd for each in listed if each.fd >= 0]
        client.send(KV_ORDER, 0, order_body(number, op, range_id, listed, how), fds)
        return number

    def answer(self) -> Message:
        return self.done.get(timeout=LONG_S)

    def order(self, client: Client, op: int, range_id: int, entries: Iterable[Entry], how: int = AT_ONCE) -> Message:
        """Sends it and waits for its KV_DONE."""
        number = self.send(client, op, range_id, entries, how)
        message = self.answer()
        assert message.order == number
        return message

    def order_runs(
        self, client: Client, op: int, runs: Iterable[Run], how: int = AT_ONCE, fds: Iterable[int] = ()
    ) -> Message:
        """One order for several ranges; its KV_DONE."""
        number = self.number()
        client.send(KV_RUNS, 0, runs_body(number, op, runs, how), list(fds))
        message = self.answer()
        assert message.order == number
        return message

    def create(self, client: Client, range_id: int, slots: Iterable[int], zero: bool = False) -> list[int]:
        """New handles at these slots; their names."""
        listed = list(slots)
        names = [self.number() for _ in listed]
        flags = CREATE | (ZERO if zero else 0)
        entries = [Entry(slot, name, flags) for slot, name in zip(listed, names, strict=True)]
        message = self.order(client, BACK, range_id, entries)
        assert (message.done, message.status) == (len(listed), 0)
        fds = message.take_fds()
        assert len(fds) == len(listed)
        self.fds.update(zip(names, fds, strict=True))
        return names

    def give(self, client: Client, range_id: int, handles: dict[int, int], zero: bool = True) -> Message:
        """Handles that exist, slot to name."""
        flags = ZERO if zero else 0
        entries = [Entry(slot, name, flags, self.fds[name]) for slot, name in handles.items()]
        return self.order(client, BACK, range_id, entries)

    def forget(self, name: int) -> None:
        os.close(self.fds.pop(name))

    def close(self) -> None:
        self.hooks.close()
        for name in list(self.fds):
            self.forget(name)
        for inbox in (self.done, self.held, self.scratch):
            while not inbox.empty():
                inbox.get().close()
