"""Ranges that are backed whole or not at all: before an allocation returns, or because no hook heeds their table."""

from __future__ import annotations

import numpy as np

from valved.abi.kv_link import KvOp
from valved.kv.journey import Pause, all_of
from valved.kv.memory import Memory
from valved.kv.orders import Order
from valved.kv.pool import KvRangeBook
from valved.kv.reclaim import TRIES, Mover
from valved.machine.clock import Clock
from valved.model.ids import Role

DRAIN_NS = 100_000_000  # for what was launched before launches were held


class Whole:
    def __init__(self, memory: Memory, mover: Mover, clock: Clock) -> None:
        self._memory = memory
        self._mover = mover
        self._clock = clock

    async def back_whole(self, book: KvRangeBook, seq: int) -> None:
        """All of a range before its allocation returns, or that fails: nobody works on holes unawares.

        For an online service memory is taken from offline work. If that is not enough, what is free goes back to the
        driver: the shim makes the range ordinary memory then. A hook that attaches later gives back what is too much.
        """
        is_online = self._memory.role_of(book.key.client) is Role.ONLINE
        for _ in range(TRIES):
            if book.is_whole or not await self._back_once(book, is_online):
                break
        if self._memory.pool.ranges.get(book.key) is not book:
            return
        if seq and is_online and not book.is_whole:
            backed = np.flatnonzero(book.at >= 0)
            await all_of([order.settled for order in self._memory.orders.take_away(KvOp.UNBACK, book, backed)])
            self._memory.pool.trim(book.gpu, self._memory.pool.free_handles(book.gpu))
        self._memory.answer_whole(book, seq, len(book.empty_slots()))

    async def _back_once(self, book: KvRangeBook, may_take: bool) -> bool:
        """Whether another try may find more."""
        empty = book.empty_slots()
        need = None
        orders: list[Order] = []
        try:
            if may_take and len(empty) > self._mover.affordable(book.gpu):
                need = self._mover.ask(self._memory.service_of(book.key.client), {book.gpu: len(empty)}, lambda: True)
                await need.ready
            if self._memory.pool.ranges.get(book.key) is book and self._fits(book):
                orders = self._mover.give([(book, empty)])
            await all_of([order.settled for order in orders])
        finally:
            self._mover.settle_need(need)
        return any(order.done for order in orders)

    def _fits(self, book: KvRangeBook) -> bool:
        return len(book.empty_slots()) <= self._mover.affordable(book.gpu)

    async def back_held(self, book: KvRangeBook) -> None:
        """The same for a process that works on the zero page, and whose launches are held (kv/unheeded.py).

        What it launched before the hold ends first: a mapping over the zero page leaves a hole for a moment.
        """
        if self._memory.role_of(book.key.client) is Role.ONLINE:
            await self.back_whole(book, 0)
            return
        pause = Pause()
        self._clock.call_at_ns(self._clock.now_ns() + DRAIN_NS, pause.set)
        await pause
        await self._mover.while_turning()
        for _ in range(TRIES):
            if book.is_whole or not await self._back_once(book, False):
                break
        if self._memory.pool.ranges.get(book.key) is book:
            self._memory.answer_whole(book, 0, len(book.empty_slots()))
        self._memory.unheeded.backed(book)
