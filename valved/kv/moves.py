"""Columns of an engine become orders, and what is under way stands in its table: first told, then done."""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, chain, zip_longest

import numpy as np

from valved.abi.kv_link import KvHow, KvOp
from valved.kv.books import KvBooks
from valved.kv.engines import Engine
from valved.kv.orders import Order
from valved.kv.outside import Outside, Packed
from valved.kv.pool import PlannedRows
from valved.kv.slots import NO_HANDLE, NOTHING, Ints, RangeSlots
from valved.kv.supply import Supply
from valved.kv.ways import Ways
from valved.machine.clock import Clock
from valved.model.ids import GpuIndex, Remap
from valved.state.stats import MemoryCounters

CUT_FROM = 8  # slots of one process
CUTS = {Remap.SPARSE: (0.25,), Remap.HELPER: (0.5, 0.9375), Remap.COOPERATIVE: ()}
"""Where the slots that are taken from a process are cut into stages. The service maps one stage while the next is being
taken, so that packets and computing cost no time of their own. The last stage is small where taking is no quicker than
mapping: when it comes, the service is still busy with the stage before. With `sparse` taking is quicker."""


@dataclass(slots=True, kw_only=True)
class MovePlan:
    """A plan that is made while the driver stops the GPU, or while a process unmaps. It stands in no book, and no
    client was told of it. If the books have changed since, or the stop failed, it is thrown away."""

    engine: Engine
    columns: Ints
    stages: list[list[Packed]]  # one after the other
    made_by: tuple[int, int] = (-1, -1)  # to take: changes of the engine's books
    given: tuple[RangeSlots, ...] = ()  # to give: what earlier stages were

    def takes(self, columns: Ints) -> bool:
        """Just these columns, by the books as they are."""
        is_alike = columns is self.columns or np.array_equal(columns, self.columns)
        return is_alike and self.engine.changes == self.made_by

    @property
    def gives(self) -> bool:
        """Just what its columns lack. What became of earlier stages meanwhile changes nothing of that, if it came."""
        gone = [*self.given, *(part.slots for part in chain(*self.stages) if part.given)]
        are_bare = all(_is_bare(part.slots) for part in self.left)
        return are_bare and all((slots.standing() != NO_HANDLE).all() for slots in gone)

    @property
    def left(self) -> list[Packed]:
        return [part for part in chain(*self.stages) if not part.given]


Given = Callable[[list[Order]], object]


def _is_bare(slots: RangeSlots) -> bool:
    return bool((slots.standing() == NO_HANDLE).all())


@dataclass(eq=False, repr=False)
class Moves:
    _books: KvBooks
    _supply: Supply
    _ways: Ways
    _outside: Outside
    _clock: Clock
    _counters: MemoryCounters

    def give_columns(self, engine: Engine, columns: Ints, plan: MovePlan | None = None) -> list[Order]:
        """As many of these as there is memory for, from the first on. `plan`: for what of them is left."""
        parts = plan.left if plan is not None else []
        if plan is not None and plan.gives and self._is_free(engine, parts):
            return self.give([part.slots for part in parts], drafted=parts)
        return self.give(engine.cells(columns[: self._supply.fitting(engine, columns)], backed=False))

    def give_ahead(self, plan: MovePlan) -> tuple[list[Order], MovePlan]:
        """All stages but the last, as far as their handles are free by now; and what is left of the plan."""
        orders: list[Order] = []
        while len(plan.stages) > 1 and plan.gives:
            stage, *stages = plan.stages
            left = [part for part in stage if not part.given]
            if not self._is_free(plan.engine, left):
                break
            orders += self.give([part.slots for part in left], drafted=left)
            plan = replace(plan, stages=stages, given=(*plan.given, *(part.slots for part in stage)))
        return orders, plan

    def pass_on(self, plan: MovePlan, orders: list[Order], rows: Ints, may: Callable[[], bool], given: Given) -> None:
        """A part goes in the turn of the loop in which the order is answered that takes the last of its handles, and
        before anything else is done about that: `given` hears of it. `rows`: what stands at the slots of the orders.
        `may`: looks at that moment."""
        ends = np.array([0, *accumulate(len(order.slots) for order in orders)])
        by_row = rows.argsort()
        in_order = rows[by_row]
        for part in plan.left if rows.size else ():
            found = by_row[np.minimum(in_order.searchsorted(part.rows), rows.size - 1)]
            places = found[rows[found] == part.rows]
            if len(part.rows) == len(part.slots) and places.size:
                number = int(ends.searchsorted(places.max(), "right")) - 1
                here = places[places >= ends[number]]
                slots = orders[number].slots[here - ends[number]]
                orders[number].then_pass(partial(self._pass_on, plan.engine, part, slots, rows[here], may, given))

    def _pass_on(
        self, engine: Engine, part: Packed, here: RangeSlots, last: Ints, may: Callable[[], bool], given: Given
    ) -> None:
        """`last`: those of its handles that stand here, and come; unless they stand elsewhere by now."""
        pool, is_so = self._books.pool, may() and self._books.is_attached(engine) and _is_bare(part.slots)
        if is_so and np.array_equal(here.standing(), last):
            pool.lift(here)
            if pool.take_planned(part.rows, part.names):
                part.given = self._books.orders.back(part.slots, part.rows, KvHow.AT_ONCE, part.drafts)
                given(part.given)

    def _is_free(self, engine: Engine, stage: list[Packed]) -> bool:
        """For this engine, and now."""
        wanted: Counter[tuple[GpuIndex, str]] = Counter()
        for part in stage:
            wanted[part.slots.owner.gpu, part.slots.owner.domain] += len(part.slots)
        on_gpu: Counter[GpuIndex] = Counter()
        for (gpu, domain), count in wanted.items():
            on_gpu[gpu] += count
            if self._books.pool.free_in(gpu, domain) < count:
                return False
        return all(count <= self._supply.affordable(gpu, engine.service) for gpu, count in on_gpu.items())

    def give(
        self, cells: Iterable[RangeSlots], how: KvHow = KvHow.AT_ONCE, drafted: Iterable[Packed] = ()
    ) -> list[Order]:
        """Order these slots to be backed: free handles first, then new ones as far as there is room. `drafted`: for
        these, if the handles that were planned for them are free.

        A free handle of another trust domain goes back to the driver, and makes room for a new one.
        """
        pool, orders = self._books.pool, list[Order]()
        for slots, part in zip_longest(cells, drafted):
            if part is not None and pool.take_planned(part.rows, part.names):
                orders += self._books.orders.back(slots[: len(part.rows)], part.rows, how, part.drafts)
                slots = slots[len(part.rows) :]
            book = slots.owner
            rows = pool.take(book.gpu, book.domain, len(slots)) if len(slots) else NOTHING
            orders += self._books.orders.back(slots[: len(rows)], rows, how) if len(rows) else []
            if short := len(slots) - len(rows):
                self._counters.remade_handles += self._supply.trim(book.gpu, short, book.domain)
                rest = slots[len(rows) : len(rows) + self._supply.make(book.gpu, short)]
                orders += self._books.orders.create(rest, how)
        for order in orders:
            if order.is_creating:
                order.settled.then(lambda order=order: self._note_made(order))  # type: ignore[misc]
        return orders

    def _note_made(self, order: Order) -> None:
        gpu, left = order.slots.owner.gpu, len(order.slots) - order.done
        if left and order.status != errno.ECONNRESET:  # a process that ended says nothing of the card
            self._supply.full.hear(gpu, self._books.service_of(order.client), is_short=order.status == errno.ENOMEM)
        self._supply.note_made(gpu, order.done, left)

    def unback(self, engine: Engine, columns: Ints) -> list[Order]:
        cells = engine.cells(columns, backed=True)
        return [order for slots in cells for order in self._books.orders.take_away(KvOp.UNBACK, slots)]

    def take(self, parts: Iterable[Packed], how: KvHow) -> list[Order]:
        """Precondition: the engine's table says that they are lost."""
        orders: list[Order] = []
        for part in parts:
            if how is KvHow.AT_ONCE and self._ways.best(part.slots.owner) is Remap.SPARSE:
                orders += self._outside.take(part)
            else:
                orders += self._books.orders.take_away(KvOp.QUARANTINE, part.slots, how, part.drafts)
        return orders

    # What can be worked out before

    def plan_taking(self, engine: Engine, columns: Ints, how: KvHow) -> MovePlan:
        """Between two steps nothing is given ahead: one stage."""
        stages: list[list[Packed]] = []
        for part in engine.parts:
            books = part.slots.books
            way = self._ways.best(books[0])
            taken = part.runs.take(columns, CUTS[way] if how is KvHow.AT_ONCE else (), CUT_FROM)
            stages += [[] for _ in range(len(taken) - len(stages))]
            told = [(RangeSlots(books=books, of=of, slots=slots), raw) for of, slots, raw in taken]
            for stage, one in zip(stages, self._outside.plan(told, is_ours=way is Remap.SPARSE), strict=False):
                stage.append(one)
        return MovePlan(engine=engine, columns=columns, stages=stages, made_by=engine.changes)

    def plan_giving(self, engine: Engine, columns: Ints, coming: list[Ints]) -> MovePlan:
        """`coming`: handles that will be free, stage by stage. All stages but the last back whole columns, as far as
        there are handles for them by then, or a part of the first one."""
        stages: list[list[Packed]] = []
        rests: list[RangeSlots] = []
        done, free, picked = 0, PlannedRows(self._books.pool), Counter[GpuIndex]()
        for number, more in enumerate(coming, 1):
            is_last = number == len(coming)
            free.come(more)
            within_reach = {gpu: picked[gpu] + free.count(gpu) for gpu in engine.gpus}
            upto = len(columns) if is_last else max(1, engine.fitting(columns, within_reach))
            cells = [*rests, *engine.cells(columns[done:upto], backed=False)]
            stage, rests, done = [], [], max(done, upto)
            for slots in cells:
                mine = free.pick(slots.owner.gpu, slots.owner.domain, len(slots))
                picked[slots.owner.gpu] += len(mine)
                here = len(slots) if is_last else len(mine)
                stage += [self._pack(slots[:here], mine)] if here else []
                rests += [slots[here:]] if here < len(slots) else []
            stages.append(stage)
        return MovePlan(engine=engine, columns=columns, stages=stages)

    def _pack(self, slots: RangeSlots, rows: Ints) -> Packed:
        names = self._books.pool.names(rows)
        drafts = self._books.orders.draft_back(slots[: len(rows)], names)
        return Packed(slots=slots, drafts=drafts, rows=rows, names=names)

    # What is under way

    def coming(self, engine: Engine, columns: Ints) -> None:
        engine.mark(columns, going=True)

    def came(self, engine: Engine, columns: Ints) -> None:
        """Or not: the table says what is there."""
        self._over(engine, columns)

    def lose(self, engine: Engine, columns: Ints) -> None:
        """Tell first, then do."""
        engine.mark(columns, going=True, lost=True)
        engine.table.lose(engine.block_places, columns, self._clock.now_ns())

    def lost(self, engine: Engine, columns: Ints) -> None:
        self._over(engine, columns)

    def _over(self, engine: Engine, columns: Ints) -> None:
        """A hook may have attached anew meanwhile: its table says it, too, and nothing else would tell it."""
        if self._books.is_attached(engine):
            engine.mark(columns, going=False)
        present = self._books.engines.get(engine.service)
        if present is not None:
            self._books.tell(present)
