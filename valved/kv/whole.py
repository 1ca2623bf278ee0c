"""Ranges that are backed whole or not at all: before an allocation returns, or because no hook heeds their table."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from valved.abi.kv_link import KvOp
from valved.kv.books import KvBooks
from valved.kv.grow import TRIES
from valved.kv.journey import Pause, all_of
from valved.kv.moves import Moves
from valved.kv.orders import Order
from valved.kv.ranges import Ranges
from valved.kv.reclaim import Reclaimer
from valved.kv.slots import KvRangeBook, RangeSlots
from valved.kv.supply import Supply
from valved.kv.turn import GateTurn
from valved.kv.unheeded import UnheededRanges
from valved.machine.clock import Clock
from valved.model.ids import Role

DRAIN_NS = 100_000_000  # for what was launched before launches were held


@dataclass(eq=False, repr=False)
class WholeRanges:
    _books: KvBooks
    _supply: Supply
    _turn: GateTurn
    _moves: Moves
    _reclaimer: Reclaimer
    _ranges: Ranges
    _unheeded: UnheededRanges
    _clock: Clock

    async def back_whole(self, book: KvRangeBook, seq: int) -> None:
        """All of a range before its allocation returns, or that fails: no process works on holes without knowing it.

        For an online service memory is taken from offline work. If that is not enough, what is free goes back to the
        driver: the shim makes the range ordinary memory then. A hook that attaches later gives back what is too much.
        """
        is_online = self._books.role_of(book.key.client) is Role.ONLINE
        await self._back(book, may_take=is_online)
        if not self._is_here(book):
            return
        if seq and is_online and not book.is_whole:
            backed = RangeSlots.of_range(book, np.flatnonzero(book.at >= 0))
            await all_of([order.settled for order in self._books.orders.take_away(KvOp.UNBACK, backed)])
            self._books.pool.trim(book.gpu, self._books.pool.free_handles(book.gpu), is_awaited=True)
        self._ranges.answer_whole(book, seq, len(book.empty_slots()))

    async def _back(self, book: KvRangeBook, *, may_take: bool) -> None:
        over = Pause()
        try:
            for _ in range(TRIES):
                if book.is_whole or not await self._back_once(book, may_take, over):
                    break
        finally:
            over.set()

    async def _back_once(self, book: KvRangeBook, may_take: bool, over: Pause) -> bool:
        """Whether another try may find more."""
        empty = book.empty_slots()
        service = self._books.service_of(book.key.client)
        need = None
        orders: list[Order] = []
        try:
            if may_take and len(empty) > self._supply.affordable(book.gpu, service, for_good=True):
                need = self._reclaimer.ask(service, {book.gpu: len(empty)}, lambda: True, over)
                await need.ready
            empty = book.empty_slots()  # a hook may have come meanwhile, and its engine may have been given some
            if self._is_here(book) and len(empty) <= self._supply.affordable(book.gpu, service, for_good=True):
                orders = self._moves.give([RangeSlots.of_range(book, empty)])
            if need is not None:
                need.promised.clear()
            await all_of([order.settled for order in orders])
        finally:
            self._supply.settle(need)
        # What seemed to be free was not: the next try asks for it, where an engine has some.
        may_ask = may_take and need is None and self._is_here(book) and self._supply.takeable(book.gpu) > 0
        return may_ask or any(order.done for order in orders)

    def _is_here(self, book: KvRangeBook) -> bool:
        is_known = book.key.client in self._books.registry.clients  # else the pool forgets it next
        return is_known and self._books.pool.ranges.get(book.key) is book

    async def back_held(self, book: KvRangeBook) -> None:
        """The same for a process that works on the zero page, and whose launches are held (kv/unheeded.py).

        What it launched before the hold ends first: a mapping over the zero page leaves a hole for a moment.
        """
        if self._books.role_of(book.key.client) is Role.ONLINE:
            await self.back_whole(book, 0)
            return
        pause = Pause()
        self._clock.call_at_ns(self._clock.now_ns() + DRAIN_NS, pause.set)
        await pause
        await self._turn.while_turning()
        await self._back(book, may_take=False)
        if self._is_here(book):
            self._ranges.answer_whole(book, 0, len(book.empty_slots()))
        self._unheeded.backed(book)
