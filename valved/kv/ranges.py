"""What shims say of their KV ranges: where they are, what they hold, which slots are pinned, and that they are gone."""

from __future__ import annotations

import errno
import os

import numpy as np

from valved.abi.kv_link import ELASTIC, HEEDED, KvEntries, KvRangeMessage, KvSpan
from valved.abi.link import Malformed
from valved.clients.complaints import Complaints
from valved.gate.wake import GateService
from valved.kv.books import KvBooks
from valved.kv.changes import BackWhole, Changes, Look, PinCame, RangeCame, RangeGone, RangeTold
from valved.kv.slots import NO_HANDLE, KvRangeBook, RangeKey, RangeSlots
from valved.kv.unheeded import UnheededRanges
from valved.model.ids import TRIED_FIRST, ClientId, GpuIndex
from valved.state.registry import ClientEntry

NO_UUID = bytes(16)


class Ranges:
    def __init__(
        self, books: KvBooks, unheeded: UnheededRanges, gating: GateService, told: Complaints, changes: Changes
    ) -> None:
        self._books = books
        self._pool = books.pool
        self._unheeded = unheeded
        self._gating = gating
        self._told = told
        self._changes = changes
        self._gpu_of_uuid = {info.uuid: info.index for info in books.gpus}
        self._gpu_of_instance = {info.device_instance: info.index for info in books.gpus}

    def find_gpu(self, uuid: bytes, instance: int) -> GpuIndex | None:
        return self._gpu_of_instance.get(instance) if uuid == NO_UUID else self._gpu_of_uuid.get(uuid)

    def add(self, entry: ClientEntry, seq: int, body: KvRangeMessage) -> None:
        """KV_RANGE."""
        gpu = self.find_gpu(body.gpu_uuid, body.device_instance)
        status = errno.ENODEV if gpu is None else self._why_not(entry, body)
        if gpu is None or status:
            self._refuse(entry, body, status)
            self._books.ack(entry.id, seq, status)
            return
        book = KvRangeBook(
            key=RangeKey(entry.id, body.range),
            gpu=gpu,
            domain="" if self._books.settings.one_domain else entry.domain,
            base=body.base,
            handle_bytes=body.handle_bytes,
            is_elastic=bool(body.flags & ELASTIC),
            is_heeded=bool(body.flags & HEEDED),
            at=np.full(body.slots, NO_HANDLE, np.int64),
        )
        self._pool.add_range(book)
        self._changes.put(RangeCame())
        if body.held:
            self._books.untold[book.key] = body.held
            self._books.ack(entry.id, seq)
        elif book.is_elastic and self._unheeded.may_begin(entry):
            self._books.ack(entry.id, seq)  # it is lent memory when its engine has attached
            self._unheeded.expect(book)
        else:
            self._changes.put(BackWhole(book, seq))

    def _why_not(self, entry: ClientEntry, body: KvRangeMessage) -> int:
        """An errno value, 0 if the range can be."""
        mine, settings = self._pool.of_client(entry.id), self._books.settings
        stop = body.base + body.slots * body.handle_bytes
        if body.handle_bytes != self._pool.handle_bytes or body.slots == 0 or body.held > body.slots or stop >> 64:
            return errno.EINVAL
        if RangeKey(entry.id, body.range) in self._pool.ranges:
            return errno.EEXIST
        if any(book.base < stop and body.base < book.base + book.slots * book.handle_bytes for book in mine):
            return errno.EEXIST
        slots = sum(book.slots for book in mine) + body.slots
        if len(mine) >= settings.ranges_per_client or slots > settings.slots_per_client:
            return errno.ENOSPC
        return 0

    def _refuse(self, entry: ClientEntry, body: KvRangeMessage, status: int) -> None:
        mine = self._pool.handle_bytes
        is_other = body.handle_bytes != mine
        reason = f"handles of {body.handle_bytes} bytes, not {mine}" if is_other else os.strerror(status)
        if status != errno.EEXIST:
            self._unheeded.refused(RangeKey(entry.id, body.range), body, reason)
        self._told.tell(entry, f"KV range refused: {reason}", slots=body.slots, handle_bytes=body.handle_bytes)
        self._gating.counters.refuse("kv-range")

    def _find(self, entry: ClientEntry, number: int) -> KvRangeBook:
        book = self._pool.ranges.get(RangeKey(entry.id, number))
        if book is None:
            raise Malformed(f"range {number} of client {entry.id} does not exist")
        return book

    def drop(self, entry: ClientEntry, body: KvSpan) -> None:
        """KV_RANGE_DEL."""
        book = self._find(entry, body.range)
        self._pool.drop_range(book.key)
        self._unheeded.may_go(entry.id)
        self._books.untold.pop(book.key, None)
        self._changes.put(RangeGone(entry, book))

    def pin(self, entry: ClientEntry, seq: int, body: KvSpan) -> None:
        """KV_PIN. Where memory is taken from outside, nothing leaves the process before this is answered."""
        book = self._find(entry, body.range)
        if body.offset + body.bytes > book.slots * book.handle_bytes or not body.bytes:
            raise Malformed(f"a pin of {body.bytes} bytes at {body.offset} lies outside range {body.range}")
        first, last = body.offset // book.handle_bytes, (body.offset + body.bytes - 1) // book.handle_bytes
        if self._books.settings.remap in TRIED_FIRST:
            is_going = self._books.orders.is_unheard(book, first, last)
            self._books.ack(entry.id, seq, errno.EBUSY if is_going else 0)
            if is_going:
                return
        book.pinned[first : last + 1] = True
        self._changes.put(PinCame(entry.id))

    # What a client of a predecessor holds, or one whose link broke

    def held(self, entry: ClientEntry, seq: int, body: KvEntries, fds: list[int]) -> None:
        """KV_HELD. Takes the descriptors of handles that are new here off the list."""
        book = self._find(entry, body.range)
        names, slots = body.entries["handle"].astype(np.int64), body.entries["slot"].astype(np.int64)
        left = self._books.untold.get(book.key, 0)
        if len(slots) != len(fds) or len(slots) > left:
            raise Malformed(f"KV_HELD of {len(slots)} slots with {len(fds)} descriptors, {left} were announced")
        if len(np.unique(slots)) != len(slots) or len(np.unique(names)) != len(names):
            raise Malformed("KV_HELD names a slot or a handle twice")
        if int(slots.max(initial=0)) >= book.slots or (book.at[slots] != NO_HANDLE).any():
            raise Malformed("KV_HELD names a slot that does not exist or is known")
        if self._pool.total + len(slots) > self._pool.most or self._pool.is_taken(names, entry.process, book).any():
            self._gating.counters.refuse("kv-held")  # the range stays untold: nothing is given to it, nothing taken
            self._books.ack(entry.id, seq, errno.EEXIST)
            return
        known = self._pool.readopt(entry.process, names, book, slots)
        fresh = [fd for fd, is_known in zip(fds, known.tolist(), strict=True) if not is_known]
        fds[:] = [fd for fd, is_known in zip(fds, known.tolist(), strict=True) if is_known]  # these we have
        self._pool.create(names[~known], fresh, RangeSlots.of_range(book, slots[~known]))
        self._books.untold[book.key] = left - len(slots)
        if not self._books.untold[book.key]:
            self._told_all(entry, book)
        self._books.ack(entry.id, seq)

    def _told_all(self, entry: ClientEntry, book: KvRangeBook) -> None:
        del self._books.untold[book.key]
        if book.is_elastic:
            self._unheeded.expect(book)
            self._unheeded.may_go(entry.id)
        elif len(book.empty_slots()):
            self._changes.put(BackWhole(book, 0))
        self._changes.put(RangeTold(entry))

    def answer_whole(self, book: KvRangeBook, seq: int, missing: int) -> None:
        """All of it is backed, or its allocation fails and what came is free again once the client says so."""
        if missing:
            self._gating.counters.refuse("kv-memory")
        engine = self._books.engines.get(self._books.service_of(book.key.client))
        if engine is not None:
            self._books.tell(engine)
        self._unheeded.may_go(book.key.client)
        if seq:
            self._books.ack(book.key.client, seq, errno.ENOMEM if missing else 0)
        self._changes.put(Look())

    def forget(self, client: ClientId) -> None:
        self._unheeded.forget(client)
        for key in [key for key in self._books.untold if key.client == client]:
            del self._books.untold[key]
