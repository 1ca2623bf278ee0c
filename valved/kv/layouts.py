"""What hooks say of where their blocks lie: packets become the layout of one rank.

After a restart a hook may be back before the shim beside it has said what it holds: its answer waits for a moment.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass, field
from functools import partial

from valved.abi.kv_link import KvLayoutPart
from valved.kv.books import KvBooks
from valved.kv.columns import Rank
from valved.kv.tables import Tables
from valved.machine.clock import Clock
from valved.machine.ports import WorkPort
from valved.model.ids import ClientId
from valved.model.memory import KvTensor, LayoutRefused
from valved.policy.columns import MAX_PLANES
from valved.state.registry import ClientEntry

LAYOUT_NS = 500_000_000  # hooks wait a second or more for an answer


@dataclass(slots=True, kw_only=True)
class LayoutParts:
    """Packets of one registration until all tensors are there."""

    head: KvLayoutPart
    tensors: list[KvTensor] = field(default_factory=list)
    touched: int = 0

    def add(self, part: KvLayoutPart, handle_bytes: int) -> None:
        head = self.head
        if (part.blocks, part.block_tokens, part.total) != (head.blocks, head.block_tokens, head.total):
            raise LayoutRefused("total", "the packets of one layout disagree")
        if part.total > MAX_PLANES:  # each has a plane of its own: more can be no layout, and none of it is kept
            raise LayoutRefused("total", f"{part.total} tensors, at most {MAX_PLANES} can be registered")
        if part.first != len(self.tensors) or len(self.tensors) + len(part.tensors) > part.total:
            raise LayoutRefused("first", f"tensors from {part.first} on, {len(self.tensors)} are known")
        if not part.tensors:
            raise LayoutRefused("count", "a packet without tensors")
        self.touched = part.touched(self.touched, handle_bytes)
        self.tensors += part.tensors

    @property
    def is_whole(self) -> bool:
        return len(self.tensors) == self.head.total

    def whole(self) -> KvLayoutPart:
        head = self.head
        return KvLayoutPart(
            blocks=head.blocks,
            block_tokens=head.block_tokens,
            total=head.total,
            first=0,
            pinned=head.pinned,
            tensors=tuple(self.tensors),
        )


@dataclass(slots=True, kw_only=True, eq=False)
class Early:
    """A whole layout without an answer: its ranges may come later, and a thread works out where its blocks lie."""

    hook: ClientEntry
    seq: int
    told: KvLayoutPart
    until_ns: int
    is_at_work: bool = False
    is_asked_again: bool = False  # ranges came, or its time ran out, while a thread was at work


class Layouts:
    def __init__(self, books: KvBooks, tables: Tables, clock: Clock, work: WorkPort) -> None:
        self._books = books
        self._tables = tables
        self._clock = clock
        self._work = work
        self._parts: dict[ClientId, LayoutParts] = {}  # by hook
        self._early: dict[ClientId, Early] = {}

    def add(self, hook: ClientEntry, seq: int, body: KvLayoutPart) -> None:
        """KV_LAYOUT."""
        try:
            parts = self._parts.get(hook.id)
            if parts is None or body.first == 0:
                parts = self._parts[hook.id] = LayoutParts(head=body)
            parts.add(body, self._books.pool.handle_bytes)
        except LayoutRefused as refused:
            self._parts.pop(hook.id, None)
            self._refuse(hook, seq, refused)
            return
        if not parts.is_whole:
            self._books.ack(hook.id, seq)
            return
        del self._parts[hook.id]
        until_ns = self._clock.now_ns() + LAYOUT_NS
        early = self._early[hook.id] = Early(hook=hook, seq=seq, told=parts.whole(), until_ns=until_ns)
        self._try(early)
        if self._early.get(hook.id) is early:
            self._clock.call_at_ns(until_ns, lambda: self._try(early))

    def try_early_soon(self) -> None:
        """The ranges of a shim come one by one: a layout that lies beyond them may be early."""
        if self._early:
            self._clock.call_at_ns(self._clock.now_ns(), self.try_early)

    def try_early(self) -> None:
        for early in list(self._early.values()):
            self._try(early)

    def _try(self, early: Early) -> None:
        if self._early.get(early.hook.id) is not early:
            return
        if early.is_at_work:
            early.is_asked_again = True
            return
        shim = self._books.shim_beside(early.hook)
        if shim is None:
            self._not_yet(early, LayoutRefused("pid", "this process has no shim with KV ranges"))
        elif any(key.client == shim.id for key in self._books.untold):
            self._not_yet(early, LayoutRefused("tensors", "its shim has not reported all that it holds"))
        else:
            ranges = self._books.pool.of_client(shim.id)
            early.is_at_work, early.is_asked_again = True, False
            job = partial(Rank.of, shim.id, early.hook.id, ranges, early.told)
            self._work.do(job, partial(self._made, early, shim, [book.uid for book in ranges]))

    def _made(
        self, early: Early, shim: ClientEntry, ranges: list[int], rank: Rank | None, error: Exception | None
    ) -> None:
        early.is_at_work = False
        if self._early.get(early.hook.id) is not early:
            return
        if [book.uid for book in self._books.pool.of_client(shim.id)] != ranges:
            self._try(early)  # they are not what they were
            return
        try:
            if rank is None:
                raise error or AssertionError("neither a rank nor an error")
            self._tables.put_rank(shim, rank)
        except LayoutRefused as refused:
            self._not_yet(early, refused)
            if early.is_asked_again:
                self._try(early)
            return
        del self._early[early.hook.id]
        self._books.ack(early.hook.id, early.seq)

    def _not_yet(self, early: Early, refused: LayoutRefused) -> None:
        if self._clock.now_ns() >= early.until_ns:
            del self._early[early.hook.id]
            self._refuse(early.hook, early.seq, refused)

    def _refuse(self, hook: ClientEntry, seq: int, refused: LayoutRefused) -> None:
        self._tables.refuse(hook, f"KV layout refused: {refused}")
        self._books.ack(hook.id, seq, errno.EINVAL)

    def forget(self, hook: ClientId) -> None:
        self._parts.pop(hook, None)
        self._early.pop(hook, None)
