"""Columns of an engine become orders, and what is under way stands in its table: first told, then done."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import zip_longest

import numpy as np

from valved.abi.kv_link import KvHow, KvOp
from valved.kv.books import KvBooks
from valved.kv.engines import Engine
from valved.kv.orders import Order
from valved.kv.outside import Outside, Packed
from valved.kv.slots import NOTHING, Ints, RangeSlots
from valved.kv.supply import Supply
from valved.kv.ways import Ways
from valved.machine.clock import Clock
from valved.model.ids import Remap
from valved.state.stats import MemoryCounters


@dataclass(frozen=True, slots=True, kw_only=True)
class MovePlan:
    """What is worked out while somebody else is busy: the driver that stops the GPU, or who unmaps. It stands in no
    book, and nobody has heard of it. If the books have changed since, or the stop failed, it is thrown away."""

    engine: Engine
    columns: Ints
    parts: list[Packed]
    made_by: tuple[int, int]  # changes of the engine's books
    blocks: Ints = field(default_factory=lambda: NOTHING)  # that are lost

    def is_for(self, columns: Ints) -> bool:
        """Of these columns, by the books as they are."""
        return self.engine.changes == self.made_by and np.array_equal(columns, self.columns)


@dataclass(eq=False, repr=False)
class Moves:
    _books: KvBooks
    _supply: Supply
    _ways: Ways
    _outside: Outside
    _clock: Clock
    _counters: MemoryCounters

    def give_columns(self, engine: Engine, columns: Ints, plan: MovePlan | None = None) -> list[Order]:
        if plan is not None and plan.is_for(columns):
            return self.give([part.slots for part in plan.parts], drafted=plan.parts)
        return self.give(engine.cells(columns, backed=False))

    def give(
        self, cells: Iterable[RangeSlots], how: KvHow = KvHow.AT_ONCE, drafted: Iterable[Packed] = ()
    ) -> list[Order]:
        """Order these slots to be backed: free handles first, then new ones as far as there is room. `drafted`: for
        these, if they get the handles that were expected.

        A free handle of another trust domain goes back to the driver, and makes room for a new one.
        """
        orders: list[Order] = []
        for slots, part in zip_longest(cells, drafted):
            book = slots.book
            rows = self._books.pool.take(book.gpu, book.domain, len(slots))
            short = len(slots) - len(rows)
            is_as_drafted = part is not None and np.array_equal(self._books.pool.names(rows), part.names)
            drafts = part.drafts if part is not None and is_as_drafted else None
            orders += self._books.orders.back(slots[: len(rows)], rows, how, drafts)
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

    def unback(self, engine: Engine, columns: Ints) -> list[Order]:
        cells = engine.cells(columns, backed=True)
        return [order for slots in cells for order in self._books.orders.take_away(KvOp.UNBACK, slots)]

    def take(self, plan: MovePlan, how: KvHow) -> list[Order]:
        """Precondition: the engine's table says that they are lost."""
        orders: list[Order] = []
        for part in plan.parts:
            if how is KvHow.AT_ONCE and self._ways.best(part.slots.book) is Remap.SPARSE:
                orders += self._outside.take(part)
            else:
                orders += self._books.orders.take_away(KvOp.QUARANTINE, part.slots, how, part.drafts)
        return orders

    # What can be worked out before

    def plan_taking(self, engine: Engine, columns: Ints) -> MovePlan:
        parts = [self._outside.plan(slots) for slots in engine.cells(columns, backed=True)]
        blocks = engine.blocks_of(columns)
        return MovePlan(engine=engine, columns=columns, parts=parts, made_by=engine.changes, blocks=blocks)

    def plan_giving(self, engine: Engine, columns: Ints, coming: Ints) -> MovePlan:
        """`coming`: handles that will be free by then."""
        pool, orders = self._books.pool, self._books.orders
        parts = []
        for slots in engine.cells(columns, backed=False):
            rows = pool.next_rows(slots.book.gpu, slots.book.domain, len(slots), coming)
            drafts = orders.draft_back(slots[: len(rows)], rows)
            parts.append(Packed(slots=slots, drafts=drafts, names=pool.names(rows)))
        return MovePlan(engine=engine, columns=columns, parts=parts, made_by=engine.changes)

    # What is under way

    def coming(self, engine: Engine, columns: Ints) -> None:
        engine.mark(columns, going=True)

    def came(self, engine: Engine, columns: Ints) -> None:
        """Or not: the table says what is there."""
        if self._books.is_attached(engine):
            engine.mark(columns, going=False)
            self._books.tell(engine)

    def lose(self, engine: Engine, columns: Ints, blocks: Ints | None = None) -> None:
        """Tell first, then do. `blocks`: of just these columns."""
        engine.mark(columns, going=True, lost=True)
        lost = engine.blocks_of(columns) if blocks is None else blocks
        engine.table.record(lost, False, self._clock.now_ns())

    def lost(self, engine: Engine, columns: Ints) -> None:
        if self._books.is_attached(engine):
            engine.mark(columns, going=False)
            self._books.tell(engine)
