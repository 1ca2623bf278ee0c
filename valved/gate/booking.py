"""Books whole batches of ordinary stamps in C (native/books/booking.c), and adds what came of it to the accounts.

What it leaves, and what it would not take, is done by gate/edges.py, which says the same stamp by stamp.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from operator import add

from valved.gate.online import OnlineService
from valved.machine.stamps import Stamps
from valved.model.ids import GpuIndex, ServiceId
from valved.native._booking import ffi, lib
from valved.state.stats import BOUNDS_US, GpuAccount, NodeCounters

LEAST = 16  # stamps: below this the accounts are carried over and back for nothing

GPU = struct.Struct("<6q26I")  # struct valve_book_gpu of native/books/booking.h; a test compares them
NO_DELAYS = (0,) * (lib.VALVE_BOOK_BUCKETS + 1)


class Note(enum.IntEnum):
    """enum valve_book_note: what is left to do after a stamp."""

    HIT = lib.VALVE_BOOK_HIT
    LOCKS = lib.VALVE_BOOK_LOCKS
    WOKEN = lib.VALVE_BOOK_WOKEN
    LEARN = lib.VALVE_BOOK_LEARN


@dataclass(slots=True, kw_only=True)
class Booked:
    """Stamps from `begin` up to `end` are booked."""

    begin: int
    end: int
    gpus: Mapping[ServiceId, frozenset[GpuIndex]]  # of the services, then
    notes: list[tuple[int, int]]  # place of a stamp, Note
    stopped: list[OnlineService]  # that preempted somebody

    def told(self) -> Iterable[int]:
        """Places of those that are events."""
        silent = {at for at, what in self.notes if what == Note.LEARN}
        return [at for at in range(self.begin, self.end) if at not in silent]


class Booking:
    """`online`, `gpus` and `counters` are the gate's own books."""

    def __init__(
        self, online: Mapping[ServiceId, OnlineService], gpus: Mapping[GpuIndex, GpuAccount], counters: NodeCounters
    ) -> None:
        self._online = online
        self._gpus = gpus
        self._counters = counters
        self._bounds = ffi.new("int64_t[]", [1000 * bound for bound in BOUNDS_US])
        self._has: list[object] = []  # what the table below was made of
        self._services: list[OnlineService] = []  # by id, rising
        self._gpus_of: Mapping[ServiceId, frozenset[GpuIndex]] = {}
        self._table = self._changed = ffi.NULL

    def take(self, stamps: Stamps, begin: int) -> Booked:
        """Book from `begin` on, up to the first stamp that is out of the ordinary."""
        self._refresh()
        accounts = self._gpus.values()
        gpus = bytearray().join(map(gpu_row, accounts))
        notes = ffi.new("uint32_t[]", 2 * (len(stamps) - begin))
        parts = {
            "services": self._table,
            "gpus": ffi.from_buffer("struct valve_book_gpu[]", gpus),
            "holders": ffi.new("uint64_t[]", [*chain.from_iterable(account.holders for account in accounts)]),
            "bounds_ns": self._bounds,
            "notes": notes,
            "changed": self._changed,
            "service_count": len(self._services),
            "gpu_count": len(accounts),
        }
        book = ffi.new("struct valve_book *", parts)
        end = lib.valve_book_take(book, stamps.raw, begin, len(stamps))
        self._counters.gates += book.stops
        self._counters.wakes += book.wakes
        self._counters.wake_refused += book.refused
        for account, row in zip(accounts, GPU.iter_unpack(gpus), strict=True):
            add_to_gpu(account, row)
        changed = [self._services[at] for at in ffi.unpack(self._changed, book.changed_count)]
        for online in changed:
            self._move(online)
        return Booked(
            begin=begin,
            end=end,
            gpus=self._gpus_of,
            notes=[divmod(note, 8) for note in ffi.unpack(notes, book.note_count)],
            stopped=[online for online in changed if online.book.stopped],
        )

    def _refresh(self) -> None:
        """The table names the services that there are."""
        has = [*self._online.values(), *(online.gpus for online in self._online.values())]
        if has == self._has:
            return
        self._has = has
        self._services = sorted(self._online.values(), key=lambda online: online.id)
        self._gpus_of = {online.id: online.gpus for online in self._services}
        for online in self._services:
            online.book.gpus = sum(1 << gpu for gpu in online.gpus)
        self._table = ffi.new("struct valve_book_service *[]", [online.book for online in self._services])
        self._changed = ffi.new("uint32_t[]", len(self._services))

    def _move(self, online: OnlineService) -> None:
        """It holds these GPUs, and no others."""
        held = online.book.held
        for gpu in online.gpus if held != online.book.booked else ():
            holders = self._gpus[gpu].holders
            (holders.add if held >> gpu & 1 else holders.discard)(online.id)


def gpu_row(account: GpuAccount) -> bytes:
    return GPU.pack(account.since_ns, 0, 0, 0, 0, 0, len(account.holders), account.channels, 0, 0, *NO_DELAYS)


def add_to_gpu(account: GpuAccount, row: tuple[int, ...]) -> None:
    account.since_ns, harvest_ns, gated_ns, open_ns, left_ns, delay_ns, _, _, _, gates = row[:10]
    account.harvest_ns += harvest_ns
    account.gated_ns += gated_ns
    account.open_ns += open_ns
    account.left_ns += left_ns
    if gates:
        account.gates += gates
        account.latency.sum_ns += delay_ns
        account.latency.counts = [*map(add, account.latency.counts, row[10:])]
