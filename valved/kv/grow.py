"""An online engine gets more memory: from what is free, else from offline work."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

import numpy as np

from valved.kv.books import KvBooks
from valved.kv.engines import Engine
from valved.kv.first import Firsts, Foreseen
from valved.kv.journey import Pause, all_of
from valved.kv.moves import MovePlan, Moves
from valved.kv.orders import Order
from valved.kv.reclaim import Reclaimer
from valved.kv.slots import NOTHING, Ints
from valved.kv.supply import Need, Supply
from valved.kv.turn import GateTurn
from valved.model.ids import GpuIndex

TRIES = 3  # of one growth: memory that the driver did not have after all is asked of offline work


@dataclass(slots=True)
class Grown:
    """What came of a growth."""

    came: int = 0  # columns
    has_cost: bool = False  # offline work lost memory for it


class Growth:
    def __init__(
        self, books: KvBooks, supply: Supply, turn: GateTurn, moves: Moves, firsts: Firsts, reclaimer: Reclaimer
    ) -> None:
        self._books = books
        self._supply = supply
        self._turn = turn
        self._moves = moves
        self._firsts = firsts
        self._reclaimer = reclaimer

    def would_stop(self, engine: Engine, columns: int) -> frozenset[GpuIndex]:
        """The GPUs whose offline work a need for so many more columns stops; none where they can be had without."""
        bare = engine.bare_columns()[: max(0, columns)]
        short = frozenset(self._supply.short(engine, engine.lacking(bare)))
        return self._firsts.would_stop(short) if short else short

    def hurry(self, gpus: frozenset[GpuIndex]) -> None:
        """A need is about to be told that stops these: that begins meanwhile. Ends with `calm`, in this turn of the
        loop."""
        self._reclaimer.stop_ahead(gpus)

    def hurry_foreseen(self, seen: Foreseen, wanted_blocks: int) -> None:
        if wanted_blocks > seen.had_blocks:
            self.hurry(seen.gpus)
            self._firsts.send(seen, wanted_blocks)

    @property
    def is_hurrying(self) -> bool:
        return self._turn.is_ahead

    def calm(self) -> None:
        self._reclaimer.calm()

    async def grow(self, engine: Engine, columns: Ints, rung_ns: int | None = None) -> Grown:
        """Back bare columns of an online engine, taking from offline work what is missing.

        `rung_ns`: since when its hook has waited for an answer; None if no hook rang.
        """
        self._moves.coming(engine, columns)
        over, grown = Pause(), Grown()
        try:
            left = columns  # all are bare as yet
            for _ in range(TRIES):
                if not len(left) or not await self._grow_once(engine, left, over, rung_ns, grown):
                    break
                left = columns[~engine.backed_columns()[columns]]
            over.set()
            await self._let_parts_go(engine, columns)
        finally:
            over.set()
            self._moves.came(engine, columns)
        if self._books.is_attached(engine):
            grown.came = int(engine.backed_columns()[columns].sum())
        return grown

    async def _let_parts_go(self, engine: Engine, columns: Ints) -> None:
        """Handles of a column that lacks others are of no use: no engine was told of them, and no need may follow."""
        parts = np.intersect1d(columns, engine.partial_columns())
        if len(parts):
            await self._turn.while_turning()
        if len(parts) and self._books.is_attached(engine):
            await all_of([order.settled for order in self._moves.unback(engine, parts)])

    async def _grow_once(self, engine: Engine, columns: Ints, over: Pause, rung_ns: int | None, grown: Grown) -> bool:
        """Whether another try may find more: the driver had less than we thought."""
        need = plan = None
        orders: list[Order] = []
        try:
            handles = engine.lacking(columns)
            if self._supply.short(engine, handles):
                need = self._reclaimer.ask(engine.service, handles, lambda: self._is_short(engine), over, rung_ns)
                await need.begun
                if not need.ready.is_set and self._books.is_attached(engine):
                    plan = self._plan(need, engine, columns, orders)
                while not need.ready.is_set:
                    await need.partly
                    if plan is not None and not need.ready.is_set and self._books.is_attached(engine):
                        given, plan = self._moves.give_ahead(plan)
                        self._supply.note_given(need, given)
                        orders += given
            else:
                await self._turn.while_turning()
            if self._books.is_attached(engine):
                orders += self._moves.give_columns(engine, columns, plan)
            if need is not None:
                grown.has_cost |= need.has_told
                need.promised.clear()  # it is on its way
            await all_of([order.settled for order in orders])
        finally:
            self._supply.settle(need)
        # What seemed to be free was not: the next try asks for it, where an engine has some.
        may_ask = need is None and any(self._supply.takeable(gpu) for gpu in engine.gpus)
        return self._books.is_attached(engine) and (may_ask or any(order.done for order in orders))

    def _plan(self, need: Need, engine: Engine, columns: Ints, orders: list[Order]) -> MovePlan:
        """What is coming goes where it says: as soon as it is there, or in its stage."""

        def given(more: list[Order]) -> None:
            self._supply.note_given(need, more)
            orders.extend(more)

        def may() -> bool:
            return self._supply.oldest is need and not need.ready.is_set

        rows = [np.concatenate([NOTHING, *(one.slots.standing() for one in stage)]) for stage in need.coming]
        plan = self._moves.plan_giving(engine, columns, rows)
        self._moves.pass_on(plan, list(chain(*need.coming)), np.concatenate([NOTHING, *rows]), may, given)
        return plan

    def _is_short(self, engine: Engine) -> bool:
        """It would use more than it has. One that has left waits for nothing, and its book is closed."""
        if not self._books.is_attached(engine):
            return False
        return engine.view().wanted_blocks > engine.standing_count() * engine.blocks_per_column
