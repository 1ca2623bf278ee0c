"""What hooks say of where their blocks lie: packets become the layout of one rank.

After a restart a hook may be back before the shim beside it has said what it holds: its answer waits for a moment.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass, field

from valved.abi.kv_link import KvLayoutPart
from valved.kv.books import KvBooks
from valved.kv.engines import Rank
from valved.kv.tables import Tables
from valved.machine.clock import Clock
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

    def add(self, part: KvLayoutPart) -> None:
        head = self.head
        if (part.blocks, part.block_tokens, part.total) != (head.blocks, head.block_tokens, head.total):
            raise LayoutRefused("total", "the packets of one layout contradict each other")
        if part.total > MAX_PLANES:  # each has a plane of its own: more can be no layout, and none of it is kept
            raise LayoutRefused("total", f"{part.total} tensors, at most {MAX_PLANES} can be registered")
        if part.first != len(self.tensors) or len(self.tensors) + len(part.tensors) > part.total:
            raise LayoutRefused("first", f"tensors from {part.first} on, {len(self.tensors)} are known")
        if not part.tensors:
            raise LayoutRefused("count", "a packet without tensors")
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


@dataclass(frozen=True, slots=True)
class Early:
    """A whole layout that came before the ranges it lies in."""

    hook: ClientEntry
    seq: int
    told: KvLayoutPart


class Layouts:
    def __init__(self, books: KvBooks, tables: Tables, clock: Clock) -> None:
        self._books = books
        self._tables = tables
        self._clock = clock
        self._parts: dict[ClientId, LayoutParts] = {}  # by hook
        self._early: dict[ClientId, Early] = {}

    def add(self, hook: ClientEntry, seq: int, body: KvLayoutPart) -> None:
        """KV_LAYOUT."""
        try:
            parts = self._parts.get(hook.id)
            if parts is None or body.first == 0:
                parts = self._parts[hook.id] = LayoutParts(head=body)
            parts.add(body)
        except LayoutRefused as refused:
            self._parts.pop(hook.id, None)
            self._refuse(hook, seq, refused)
            return
        if not parts.is_whole:
            self._books.ack(hook.id, seq)
            return
        del self._parts[hook.id]
        early = Early(hook, seq, parts.whole())
        if not self._try(early, is_last=False):
            self._await_shim(early)

    def _await_shim(self, early: Early) -> None:
        def give_up() -> None:
            if self._early.get(early.hook.id) is early:
                del self._early[early.hook.id]
                self._try(early, is_last=True)

        self._early[early.hook.id] = early
        self._clock.call_at_ns(self._clock.now_ns() + LAYOUT_NS, give_up)

    def try_early_soon(self) -> None:
        """The ranges of a shim come one by one: a layout that lies beyond them may be early."""
        if self._early:
            self._clock.call_at_ns(self._clock.now_ns(), self.try_early)

    def try_early(self) -> None:
        for early in list(self._early.values()):
            if self._early.get(early.hook.id) is early and self._try(early, is_last=False):
                self._early.pop(early.hook.id, None)

    def _try(self, early: Early, *, is_last: bool) -> bool:
        """True if it was answered."""
        shim = self._books.shim_beside(early.hook)
        try:
            if shim is None:
                raise LayoutRefused("pid", "no shim with KV ranges lives in this process")
            if any(key.client == shim.id for key in self._books.untold):
                raise LayoutRefused("tensors", "its shim has not said all that it holds")
            ranges = self._books.pool.of_client(shim.id)
            self._tables.put_rank(shim, Rank.of(shim.id, early.hook.id, ranges, early.told))
        except LayoutRefused as refused:
            if is_last:
                self._refuse(early.hook, early.seq, refused)
            return False
        self._books.ack(early.hook.id, early.seq)
        return True

    def _refuse(self, hook: ClientEntry, seq: int, refused: LayoutRefused) -> None:
        self._tables.refuse(hook, f"KV layout refused: {refused}")
        self._books.ack(hook.id, seq, errno.EINVAL)

    def forget(self, hook: ClientId) -> None:
        self._parts.pop(hook, None)
        self._early.pop(hook, None)
