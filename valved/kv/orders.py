"""Orders to shims: map, quarantine, unmap. The books follow the answers.

An order is a packet: slots of all ranges of a process on a GPU, as runs. A shim that knows no runs gets up to 64
slots of one range.

While an order is under way its slots are claimed and its handles are moving, so nothing is ordered twice and no other
process gets them. An answer, or the end of the client, settles it; a client that never answers keeps what it was sent.
"""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Protocol

import numpy as np

from valved.abi.kv_link import CREATE, ENTRY, MAX_ENTRIES, MAX_RUNS, RUN, ZERO, KvDone, KvEntries, KvHow, KvOp, KvRuns
from valved.abi.link import Body, LinkType, Malformed
from valved.kv import journey
from valved.kv.journey import Pause
from valved.kv.pool import Pool
from valved.kv.slots import CLAIMED, NO_HANDLE, NOTHING, STRANGE, Ints, KvRangeBook, RangeSlots
from valved.machine.clock import Clock
from valved.model.ids import ClientId, GpuIndex, ProcessId

assert [ENTRY.fields[name][1] for name in ("handle", "slot", "flags")] == [0, 8, 12], "see _as_entries"  # type: ignore[index]
assert [RUN.fields[name][1] for name in RUN.names] == [0, 8, 12, 16, 20], "see cells.c"  # type: ignore[index,union-attr]


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
class Draft:
    """What an order will say, but for its number: it is in no book, and no shim knows it."""

    slots: RangeSlots
    names: Ints  # of what is to be mapped
    kind: LinkType
    raw: bytes


@dataclass(slots=True, kw_only=True)
class Order:
    number: int
    op: KvOp
    how: KvHow
    slots: RangeSlots
    rows: Ints = field(default_factory=lambda: NOTHING)  # BACK: the handles to map; none where they are made
    names: Ints = field(default_factory=lambda: NOTHING)  # of what is mapped
    sent_ns: int = 0
    done: int = 0  # slots carried out
    status: int = 0
    is_sent: bool = True
    arrived: Pause = field(default_factory=Pause)  # it lies in the client's socket
    settled: Pause = field(default_factory=Pause)  # no reclaim waits for it under a closed gate any more
    through: Pause = field(default_factory=Pause)  # its slots are what the books say
    _passes: list[Callable[[], None]] = field(default_factory=list)

    def then_pass(self, on: Callable[[], None]) -> None:
        """Call it in the turn of its answer, if all that it takes has come."""
        self._passes.append(on)

    def pass_on(self) -> None:
        """All else can wait: who waits for what it has taken gets that first."""
        passes, self._passes = self._passes, []
        for call in passes if self.done == len(self.slots) else ():
            try:
                call()
            except Exception as error:  # what it has taken is taken
                journey.failed(error)

    @property
    def client(self) -> ClientId:
        return self.slots.owner.key.client

    @property
    def is_creating(self) -> bool:
        return self.op is KvOp.BACK and not len(self.rows) and bool(len(self.slots))


class Orders:
    def __init__(self, pool: Pool, send: Send, clock: Clock, takes_runs: Callable[[ClientId], bool]) -> None:
        self.pool = pool
        self.takes_runs = takes_runs
        self._send = send
        self._clock = clock
        self._next = 1
        self._under_way: dict[int, Order] = {}
        self._leaving: dict[
            int, Order
        ] = {}  # take away, and are not through (those from outside outlive their KV_DONE)

    # Giving orders

    def back(
        self, slots: RangeSlots, rows: Ints, how: KvHow = KvHow.AT_ONCE, drafts: list[Draft] | None = None
    ) -> list[Order]:
        """Map handles that are moving. A handle holds the data of another: its new process zeroes it. `drafts`: for
        just these."""
        orders: list[Order] = []
        first = 0
        for draft in self.draft_back(slots, self.pool.names(rows)) if drafts is None else drafts:
            part = rows[first : first + len(draft.slots)]
            order = self._give(draft, KvOp.BACK, how, self.pool.fds(part))
            order.rows = part
            orders.append(order)
            first += len(part)
        return orders

    def draft_back(self, slots: RangeSlots, names: Ints) -> list[Draft]:
        return [self._draft(slots[part], names[part], ZERO) for part in self._parts(slots)]

    def create(self, slots: RangeSlots, how: KvHow = KvHow.AT_ONCE) -> list[Order]:
        """Have the client make handles and map them."""
        parts = [(slots[part], part.stop - part.start) for part in self._parts(slots)]
        drafts = (self._draft(part, self.pool.name(count), CREATE | ZERO) for part, count in parts)
        return [self._give(draft, KvOp.BACK, how) for draft in drafts]

    def take_away(
        self, op: KvOp, slots: RangeSlots, how: KvHow = KvHow.AT_ONCE, drafts: list[Draft] | None = None
    ) -> list[Order]:
        """QUARANTINE or UNBACK slots that are backed. `drafts`: for just these."""
        orders: list[Order] = []
        for draft in self.draft_away(slots) if drafts is None else drafts:
            order = self._give(draft, op, how)
            self._leaving[order.number] = order
            order.through.then(partial(self._leaving.pop, order.number, None))
            orders.append(order)
        return orders

    def draft_away(self, slots: RangeSlots, raw: bytes | None = None) -> list[Draft]:
        """What goes away has no names: a packet holds as many runs as fit. `raw`: the runs of just these."""
        if raw is None:
            if not slots.slots.size or not self.takes_runs(slots.owner.key.client):
                return [self._draft(slots[part], NOTHING, 0) for part in self._parts(slots)]
            raw = slots.runs()
        if len(raw) <= RUN.itemsize * MAX_RUNS:
            return [Draft(slots=slots, names=NOTHING, kind=LinkType.KV_RUNS, raw=raw)]
        counts = np.frombuffer(raw, RUN)["count"].astype(np.int64)
        ends = counts.cumsum().tolist()
        drafts: list[Draft] = []
        first = 0
        for low in range(0, len(ends), MAX_RUNS):
            high = min(low + MAX_RUNS, len(ends))
            part = raw[RUN.itemsize * low : RUN.itemsize * high]
            drafts.append(Draft(slots=slots[first : ends[high - 1]], names=NOTHING, kind=LinkType.KV_RUNS, raw=part))
            first = ends[high - 1]
        return drafts

    def fence(self, book: KvRangeBook) -> Order:
        """An order without slots: its answer says that the mapping work of all before it is done."""
        draft = self._draft(RangeSlots.of_range(book, NOTHING), NOTHING, 0)
        return self._give(draft, KvOp.BACK, KvHow.AT_ONCE)

    def trial(self, scratch: KvRangeBook, how: KvHow) -> Order:
        """Have a client look at its scratch memory; `scratch` stands for it and is in no book."""
        return self._give(self._draft(RangeSlots.of_range(scratch, NOTHING), NOTHING, 0), KvOp.TRY, how)

    def _parts(self, slots: RangeSlots) -> list[slice]:
        """What fits into a packet, by its descriptors or entries; of one range, where its client knows no runs."""
        count = slots.slots.size
        if count and self.takes_runs(slots.owner.key.client):
            edges = list(range(0, count, MAX_ENTRIES))
        else:
            ranges = [0, *(np.flatnonzero(np.diff(slots.of)) + 1).tolist(), count]
            edges = [first for low, high in pairwise(ranges) for first in range(low, high, MAX_ENTRIES)]
        return [slice(first, last) for first, last in pairwise([*edges, count])]

    def _draft(self, slots: RangeSlots, names: Ints, flags: int) -> Draft:
        if not slots.slots.size or not self.takes_runs(slots.owner.key.client):
            return Draft(slots=slots, names=names, kind=LinkType.KV_ORDER, raw=_as_entries(slots, names, flags))
        return Draft(slots=slots, names=names, kind=LinkType.KV_RUNS, raw=slots.runs(names, flags))

    def _give(self, draft: Draft, op: KvOp, how: KvHow, fds: tuple[int, ...] = ()) -> Order:
        slots, number = draft.slots, self._next
        if op is KvOp.BACK:
            slots.put(CLAIMED)
        now_ns = self._clock.now_ns()
        order = Order(number=number, op=op, how=how, slots=slots, rows=NOTHING, names=draft.names, sent_ns=now_ns)
        self._next += 1
        self._under_way[number] = order
        if draft.kind is LinkType.KV_RUNS:
            body: Body = KvRuns(order=number, op=op, how=how, raw=draft.raw)
        else:
            body = KvEntries(order=number, range=slots.book.key.number, op=op, how=how, raw=draft.raw)
        order.is_sent = self._send(order.client, draft.kind, body, 0, fds, order.arrived.set)
        return order

    # Hearing of them

    def answered(self, client: ClientId, body: KvDone, fds: list[int]) -> None:
        """KV_DONE. Takes the descriptors of new handles off the list."""
        order = self._under_way.get(body.order)
        if order is None or order.client != client:
            raise Malformed(f"KV_DONE for order {body.order}, which is not an order to this client")
        if body.done > len(order.slots) or len(fds) != (body.done if order.is_creating else 0):
            raise Malformed(f"KV_DONE of {body.done} of {len(order.slots)} slots with {len(fds)} descriptors")
        del self._under_way[order.number]
        order.done, order.status = body.done, body.status
        if order.how is KvHow.OUTSIDE and order.op is KvOp.QUARANTINE:
            return  # it has heard; what became of the memory is told by `taken`
        if order.op is KvOp.BACK:
            self._backed(order, fds)
        else:
            order.pass_on()
            self._lift(order.slots[: order.done])
        self._settle(order)

    def taken(self, order: Order) -> None:
        """valved has made the slots of this order sparse."""
        if order.settled.is_set:
            return  # its client left first, and what it had is free, or kept until its process ends
        order.done = len(order.slots)
        order.pass_on()
        self._lift(order.slots)
        self._settle(order)

    def refused(self, order: Order, instead: Order) -> None:
        """Or it could not, and the client is asked otherwise: the reclaim that waits under the gate goes on without
        them."""
        if order.settled.is_set:
            return
        order.status = errno.EIO
        instead.through.then(order.through.set)
        order.settled.set()

    def doubt(self, order: Order, process: ProcessId) -> None:
        """It is not known whether the rest of it is mapped: that is backed no more, and no other process gets its
        handles before this one has ended."""
        left = order.slots[order.done :]
        left = left[self.pool.is_there(left) & (left.standing() >= 0)]
        if len(left):
            rows = left.standing()
            left.put(STRANGE)
            self.pool.strand(rows, process, is_alive=True)

    def unheard(self, client: ClientId) -> int:
        return sum(order.how is KvHow.OUTSIDE for order in self.under_way(client))

    def is_unheard(self, book: KvRangeBook, first: int, last: int) -> bool:
        """Its client does not know yet that some of these slots are taken from outside."""
        outside = [order.slots for order in self._under_way.values() if order.how is KvHow.OUTSIDE]
        return any(((one.slots >= first) & (one.slots <= last) & one.is_in(book)).any() for one in outside)

    def _backed(self, order: Order, fds: list[int]) -> None:
        done, left = order.slots[: order.done], order.slots[order.done :]
        left.put(NO_HANDLE)
        if order.status == errno.EEXIST:
            left[:1].put(STRANGE)
        if order.is_creating:
            self.pool.create(order.names[: order.done], fds, done)
            fds.clear()
        else:
            self.pool.land(order.rows[: order.done], done)
            self._return(order)
        are_there = self.pool.is_there(done)
        if not are_there.all():  # their ranges were deleted meanwhile: nothing is mapped there
            self.pool.lift(done[~are_there])

    def _lift(self, slots: RangeSlots) -> None:
        """What a range that was deleted held is free already."""
        are_there = self.pool.is_there(slots)
        self.pool.lift(slots if are_there.all() else slots[are_there])

    def _return(self, order: Order) -> None:
        """Handles that were not mapped. One that the driver refused is not worth another try."""
        left = order.rows[order.done :]
        bad = left[:1] if order.status == errno.EIO else NOTHING
        self.pool.drop(bad)
        self.pool.free(left[len(bad) :])

    def client_gone(self, client: ClientId, process: ProcessId, *, is_alive: bool) -> None:
        """Its orders will not be answered, and no reclaim waits for those that it was only told of. Call
        before the pool forgets its ranges.
        """
        heard = [order for order in self.leaving(frozenset({client})) if order.number not in self._under_way]
        for order in [*heard, *(order for order in self._under_way.values() if order.client == client)]:
            self._leaving.pop(order.number, None)
            self._under_way.pop(order.number, None)
            order.status, order.done = errno.ECONNRESET, 0
            if order.op is KvOp.BACK:
                order.slots.put(NO_HANDLE)
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
        orders = (order for order in self._under_way.values() if order.is_creating and order.slots.owner.gpu == gpu)
        return sum(len(order.slots) for order in orders)

    def coming(self) -> Counter[tuple[GpuIndex, ClientId]]:
        """How many handles are on their way."""
        backs = (order for order in self._under_way.values() if order.op is KvOp.BACK)
        found = Counter[tuple[GpuIndex, ClientId]]()
        for order in backs:
            found[order.slots.owner.gpu, order.client] += len(order.slots)
        return found

    @property
    def is_idle(self) -> bool:
        return not self._under_way

    def check_integrity(self) -> None:
        moving = [row for order in self._under_way.values() for row in order.rows.tolist()]
        assert len(set(moving)) == len(moving), "a handle moves twice"
        claimed = {
            (order.slots.books[of].uid, slot)
            for order in self._under_way.values()
            for of, slot in zip(order.slots.of.tolist(), order.slots.slots.tolist(), strict=True)
        }
        for book in self.pool.ranges.values():
            for slot in np.flatnonzero(book.at == CLAIMED).tolist():
                assert (book.uid, slot) in claimed, f"slot {slot} of {book.key} is claimed by no order"


def _as_entries(slots: RangeSlots, names: Ints, flags: int) -> bytes:
    entries = np.empty((len(slots), 2), np.int64)  # as ENTRY: a handle; a slot and, above it, flags
    entries[:, 0] = names if len(names) else 0
    entries[:, 1] = slots.slots + (flags << 32)
    return entries.tobytes()
