"""Orders to shims: map, quarantine, unmap. One packet each, up to 64 slots of one range; the books follow the answers.

While an order is under way its slots are claimed and its handles are moving, so nothing is ordered twice and nobody
else gets them. An answer, or the end of the client, settles it; a client that never answers keeps what it was sent.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import numpy as np

from valved.abi.kv_link import CREATE, ENTRY, MAX_ENTRIES, ZERO, KvDone, KvEntries, KvHow, KvOp
from valved.abi.link import Body, LinkType, Malformed
from valved.kv.journey import Pause
from valved.kv.pool import CLAIMED, NO_HANDLE, NOTHING, STRANGE, Ints, KvRangeBook, Pool
from valved.machine.clock import Clock
from valved.model.ids import ClientId, GpuIndex, ProcessId

assert [ENTRY.fields[name][1] for name in ("handle", "slot", "flags")] == [0, 8, 12], "see _order"  # type: ignore[index]


class Send(Protocol):
    """False: it will not arrive, and the client is about to be dropped. `arrived`: from then on the client hears of it,
    even if valved is gone.
    """

    def __call__(
        self,
        client: ClientId,
        kind: LinkType,
        body: Body,
        seq: int,
        fds: tuple[int, ...],
        arrived: Callable[[], object] | None = None,
    ) -> bool: ...


@dataclass(slots=True, kw_only=True)
class Order:
    number: int
    op: KvOp
    how: KvHow
    book: KvRangeBook
    slots: Ints
    rows: Ints = field(default_factory=lambda: NOTHING)  # BACK: the handles to map; none where they are made
    names: Ints = field(default_factory=lambda: NOTHING)
    sent_ns: int = 0
    done: int = 0  # slots carried out
    status: int = 0
    is_sent: bool = True
    arrived: Pause = field(default_factory=Pause)  # it lies in the client's socket
    settled: Pause = field(default_factory=Pause)  # nobody waits for it under a closed gate any more
    through: Pause = field(default_factory=Pause)  # its slots are what the books say

    @property
    def client(self) -> ClientId:
        return self.book.key.client

    @property
    def is_creating(self) -> bool:
        return self.op is KvOp.BACK and not len(self.rows) and bool(len(self.slots))


class Orders:
    def __init__(self, pool: Pool, send: Send, clock: Clock) -> None:
        self.pool = pool
        self._send = send
        self._clock = clock
        self._next = 1
        self._under_way: dict[int, Order] = {}
        self._leaving: dict[
            int, Order
        ] = {}  # take away, and are not through (those from outside outlive their KV_DONE)

    # Giving orders

    def back(self, book: KvRangeBook, slots: Ints, rows: Ints, how: KvHow = KvHow.AT_ONCE) -> list[Order]:
        """Map handles that are moving. Whatever a handle held was another's: it is zeroed by who gets it."""
        orders = []
        for first in range(0, len(slots), MAX_ENTRIES):
            part = slice(first, first + MAX_ENTRIES)
            names = self.pool.names(rows[part])
            order = self._order(KvOp.BACK, how, book, slots[part], names, ZERO, self.pool.fds(rows[part]))
            order.rows = rows[part]
            orders.append(order)
        return orders

    def create(self, book: KvRangeBook, slots: Ints, how: KvHow = KvHow.AT_ONCE) -> list[Order]:
        """Have the client make handles and map them."""
        orders = []
        for first in range(0, len(slots), MAX_ENTRIES):
            part = slots[first : first + MAX_ENTRIES]
            orders.append(self._order(KvOp.BACK, how, book, part, self.pool.name(len(part)), CREATE | ZERO))
        return orders

    def take_away(self, op: KvOp, book: KvRangeBook, slots: Ints, how: KvHow = KvHow.AT_ONCE) -> list[Order]:
        """QUARANTINE or UNBACK slots that are backed."""
        orders = []
        for first in range(0, len(slots), MAX_ENTRIES):
            part = slots[first : first + MAX_ENTRIES]
            order = self._order(op, how, book, part, self.pool.names(book.at[part]), 0)
            self._leaving[order.number] = order
            order.through.then(partial(self._leaving.pop, order.number, None))
            orders.append(order)
        return orders

    def fence(self, book: KvRangeBook) -> Order:
        """An order without slots: its answer says that the mapping work of all before it is done."""
        return self._order(KvOp.BACK, KvHow.AT_ONCE, book, NOTHING, NOTHING, 0)

    def trial(self, scratch: KvRangeBook, how: KvHow) -> Order:
        """Have a client look at its scratch memory; `scratch` stands for it and is in no book."""
        return self._order(KvOp.TRY, how, scratch, NOTHING, NOTHING, 0)

    def _order(
        self, op: KvOp, how: KvHow, book: KvRangeBook, slots: Ints, names: Ints, flags: int, fds: tuple[int, ...] = ()
    ) -> Order:
        entries = np.empty((len(slots), 2), np.int64)  # as ENTRY: a handle; a slot and, above it, flags
        entries[:, 0], entries[:, 1] = names, slots + (flags << 32)
        if op is KvOp.BACK:
            book.at[slots] = CLAIMED
        order = Order(number=self._next, op=op, how=how, book=book, slots=slots, names=names)
        order.sent_ns = self._clock.now_ns()
        self._next += 1
        self._under_way[order.number] = order
        body = KvEntries(order=order.number, range=book.key.number, op=op, how=how, raw=entries.tobytes())
        order.is_sent = self._send(order.client, LinkType.KV_ORDER, body, 0, fds, order.arrived.set)
        return order

    # Hearing of them

    def answered(self, client: ClientId, body: KvDone, fds: list[int]) -> None:
        """KV_DONE. Takes the descriptors of new handles off the list."""
        order = self._under_way.get(body.order)
        if order is None or order.client != client:
            raise Malformed(f"KV_DONE for order {body.order}, which this client was not given")
        if body.done > len(order.slots) or len(fds) != (body.done if order.is_creating else 0):
            raise Malformed(f"KV_DONE of {body.done} of {len(order.slots)} slots with {len(fds)} descriptors")
        del self._under_way[order.number]
        order.done, order.status = body.done, body.status
        if order.how is KvHow.OUTSIDE and order.op is KvOp.QUARANTINE:
            return  # it has heard; what became of the memory is told by `taken`
        if order.op is KvOp.BACK:
            self._backed(order, fds)
        elif self.pool.ranges.get(order.book.key) is order.book:
            self.pool.lift(order.book, order.slots[: order.done])
        self._settle(order)

    def taken(self, order: Order) -> None:
        """valved has made the slots of this order sparse."""
        if order.settled.is_set:
            return  # its client left first, and what it had is free, or kept until its process ends
        if self.pool.ranges.get(order.book.key) is order.book:
            self.pool.lift(order.book, order.slots)
        order.done = len(order.slots)
        self._settle(order)

    def refused(self, order: Order, instead: Order) -> None:
        """Or it could not, and the client is asked otherwise: who waits under the gate goes on without them."""
        if order.settled.is_set:
            return
        order.status = errno.EIO
        instead.through.then(order.through.set)
        order.settled.set()

    def unheard(self, client: ClientId) -> int:
        return sum(order.how is KvHow.OUTSIDE for order in self.under_way(client))

    def is_unheard(self, book: KvRangeBook, first: int, last: int) -> bool:
        """Its client does not know yet that some of these slots are taken from outside."""
        return any(
            order.book is book and order.how is KvHow.OUTSIDE and ((order.slots >= first) & (order.slots <= last)).any()
            for order in self._under_way.values()
        )

    def _backed(self, order: Order, fds: list[int]) -> None:
        done, left = order.slots[: order.done], order.slots[order.done :]
        order.book.at[left] = NO_HANDLE
        if order.status == errno.EEXIST:
            order.book.at[left[:1]] = STRANGE
        if order.is_creating:
            self.pool.create(order.names[: order.done], fds, order.book, done)
            fds.clear()
        else:
            self.pool.land(order.rows[: order.done], order.book, done)
            self._return(order)
        if self.pool.ranges.get(order.book.key) is not order.book:  # deleted meanwhile: nothing is mapped there
            self.pool.lift(order.book, done)

    def _return(self, order: Order) -> None:
        """Handles that were not mapped. One that the driver refused is not worth another try."""
        left = order.rows[order.done :]
        bad = left[:1] if order.status == errno.EIO else NOTHING
        self.pool.drop(bad)
        self.pool.free(left[len(bad) :])

    def client_gone(self, client: ClientId, process: ProcessId, *, is_alive: bool) -> None:
        """Its orders will not be answered. Call before the pool forgets its ranges."""
        for order in self.leaving(frozenset({client})):
            del self._leaving[order.number]
        for order in [order for order in self._under_way.values() if order.client == client]:
            del self._under_way[order.number]
            order.status = errno.ECONNRESET
            if order.op is KvOp.BACK:
                order.book.at[order.slots] = NO_HANDLE
                self.pool.strand(order.rows, process, is_alive=is_alive)
            self._settle(order)

    def _settle(self, order: Order) -> None:
        order.settled.set()
        order.through.set()

    # Questions

    def under_way(self, client: ClientId) -> list[Order]:
        return [order for order in self._under_way.values() if order.client == client]

    def leaving(self, clients: frozenset[ClientId]) -> list[Order]:
        """Orders that take memory from these: it was told as lost, and is still mapped."""
        return [order for order in self._leaving.values() if order.client in clients]

    def creating(self, gpu: GpuIndex) -> int:
        """Handles of this GPU that are being made."""
        orders = (order for order in self._under_way.values() if order.is_creating and order.book.gpu == gpu)
        return sum(len(order.slots) for order in orders)

    @property
    def is_idle(self) -> bool:
        return not self._under_way

    def check_integrity(self) -> None:
        moving = [row for order in self._under_way.values() for row in order.rows.tolist()]
        assert len(set(moving)) == len(moving), "a handle moves twice"
        claimed = {(order.book.uid, slot) for order in self._under_way.values() for slot in order.slots.tolist()}
        for book in self.pool.ranges.values():
            for slot in np.flatnonzero(book.at == CLAIMED).tolist():
                assert (book.uid, slot) in claimed, f"slot {slot} of {book.key} is claimed by no order"
