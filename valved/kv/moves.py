"""Columns of an engine become orders, and what is under way stands in its table: first told, then done."""

from __future__ import annotations

from collections.abc import Iterable

from valved.abi.kv_link import KvHow, KvOp
from valved.kv.books import KvBooks
from valved.kv.engines import Engine
from valved.kv.orders import Order
from valved.kv.outside import Outside
from valved.kv.slots import Ints, RangeSlots
from valved.kv.supply import Supply
from valved.kv.ways import Ways
from valved.machine.clock import Clock
from valved.model.ids import Remap
from valved.state.stats import MemoryCounters


class Moves:
    def __init__(
        self,
        books: KvBooks,
        supply: Supply,
        ways: Ways,
        outside: Outside,
        clock: Clock,
        counters: MemoryCounters,
    ) -> None:
        self._books = books
        self._supply = supply
        self._ways = ways
        self._outside = outside
        self._clock = clock
        self._counters = counters

    def give(self, cells: Iterable[RangeSlots], how: KvHow = KvHow.AT_ONCE) -> list[Order]:
        """Order these slots to be backed: free handles first, then new ones as far as there is room.

        A free handle of another trust domain goes back to the driver, and makes room for a new one.
        """
        orders: list[Order] = []
        for slots in cells:
            book = slots.book
            rows = self._books.pool.take(book.gpu, book.domain, len(slots))
            short = len(slots) - len(rows)
            orders += self._books.orders.back(slots[: len(rows)], rows, how)
            if short:
                self._counters.remade_handles += self._supply.trim(book.gpu, short, book.domain)
                rest = slots[len(rows) : len(rows) + self._supply.make(book.gpu, short)]
                orders += self._books.orders.create(rest, how)
        for order in orders:
            if order.is_creating:
                order.settled.then(lambda order=order: self._note_full(order))  # type: ignore[misc]
        return orders

    def _note_full(self, order: Order) -> None:
        if order.done < len(order.slots):
            self._supply.note_full(order.slots.book.gpu)

    def take(self, engine: Engine, columns: Ints, op: KvOp, how: KvHow) -> list[Order]:
        orders: list[Order] = []
        for slots in engine.cells(columns, backed=True):
            if how is KvHow.AT_ONCE and self._ways.best(slots.book) is Remap.SPARSE and op is KvOp.QUARANTINE:
                orders += self._outside.take(slots)
            else:
                orders += self._books.orders.take_away(op, slots, how)
        return orders

    # What is under way

    def coming(self, engine: Engine, columns: Ints) -> None:
        engine.mark(columns, going=True)

    def came(self, engine: Engine, columns: Ints) -> None:
        """Or not: the table says what is there."""
        if self._books.is_attached(engine):
            engine.mark(columns, going=False)
            self._books.tell(engine)

    def lose(self, engine: Engine, columns: Ints) -> None:
        """Tell first, then do."""
        engine.mark(columns, going=True, lost=True)
        engine.table.record(engine.blocks_of(columns), False, self._clock.now_ns())

    def lost(self, engine: Engine, columns: Ints) -> None:
        if self._books.is_attached(engine):
            engine.mark(columns, going=False)
            self._books.tell(engine)
