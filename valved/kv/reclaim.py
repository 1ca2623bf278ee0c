"""How memory is taken from offline work for an online service that needs it. One reclaim reads:

    gate      hold every GPU concerned, wait until the native side has stopped the last one
    select    the columns whose loss costs the offline engines least (while the channels go off)
    tell      the table says that they are lost, before anything is touched: a death from here on leaves an engine
              that recomputes for nothing, never one that believes garbage
    take      every rank puts its zero page there, and answers
    give      the service maps the handles (kv/grow.py), zeroes them, and reads in its own table that they are there
    open      the hold is dropped

Taking and giving of a large one go in stages (kv/moves.py): all is told before any is taken, and the handles of a stage
are given as soon as its orders are answered, while the next stage is taken. What the service has planned with is passed
on in the turn of the answer, before it is booked as free.

Where it was tried (kv/outside.py) valved makes the memory sparse itself instead of asking for it. A cooperative reclaim
has no gate: the same orders wait for the next step of the engine, channels on; if a service waits, they are on once
although it holds the GPU (kv/beside.py).

An order that does not come back in time: its columns stay lost, its process launches nothing more until the order has
come back after all (a half-done mapping must meet no kernel), the GPUs open so that it can, and that client is asked
cooperatively from then on.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import Any

from valved.abi.kv_link import KvHow
from valved.kv.account import Reclaim, ReclaimTeller
from valved.kv.beside import Beside
from valved.kv.books import KvBooks
from valved.kv.engines import STALE_NS, Engine
from valved.kv.first import First, Firsts
from valved.kv.journey import Pause, all_of, start, until
from valved.kv.moves import MovePlan, Moves
from valved.kv.orders import Order
from valved.kv.slots import Ints
from valved.kv.supply import Need, Supply
from valved.kv.turn import GateTurn
from valved.kv.victims import choose
from valved.kv.ways import Ways
from valved.machine.clock import Clock
from valved.model.ids import GpuIndex, Remap, ServiceId
from valved.policy.eviction import EvictionSettings

BELIEVED_NS = 10_000_000_000  # a hook says itself when it rang: nothing older than this is


@dataclass(eq=False, repr=False)
class Reclaimer:
    _books: KvBooks
    _supply: Supply
    _turn: GateTurn
    _ways: Ways
    _moves: Moves
    _firsts: Firsts
    _beside: Beside
    _teller: ReclaimTeller
    _clock: Clock
    _costs: EvictionSettings

    def __post_init__(self) -> None:
        self._needs: list[Need] = []  # that no reclaim serves yet
        self._is_running = False

    # Needs

    def ask(
        self,
        service: ServiceId,
        handles: dict[GpuIndex, int],
        is_waited_for: Callable[[], bool],
        over: Pause,
        rung_ns: int | None = None,
    ) -> Need:
        """Have so many handles free. Who asks awaits `ready`, settles the need, and sets `over` after its last try."""
        now_ns = self._clock.now_ns()
        need = Need(
            service=service,
            handles=handles,
            promised=dict(handles),
            rung_ns=rung_ns if rung_ns is not None and now_ns - BELIEVED_NS < rung_ns < now_ns else now_ns,
            asked_ns=now_ns,
            is_waited_for=is_waited_for,
            over=over,
        )
        self._needs.append(need)
        self._supply.open(need)
        if not self._is_running:
            start(self._serve())
        return need

    def stop_ahead(self, gpus: frozenset[GpuIndex]) -> None:
        """An engine is about to ask for memory whose reclaim stops these: see `GateTurn.stop_ahead`."""
        if gpus and self._supply.is_allowed and not self._is_running:
            self._turn.stop_ahead(gpus)

    def calm(self) -> None:
        """No reclaim took the gate after all: they run again. What was sent comes back first, and is free then."""
        first = self._firsts.take_over()
        if first is not None:
            start(self._end_first(first))
        self._turn.calm()

    async def _end_first(self, first: First) -> None:
        await self._turn.mine()
        try:
            how = self._ways.usual
            reclaim = Reclaim(needs=[], missing={}, how=how, began_ns=first.began_ns, victims=first.victims)
            await self._settle(reclaim, first.orders)
            self._taken(reclaim, first.orders)
        finally:
            self._turn.open()

    async def _serve(self) -> None:
        """Needs that came together are served together."""
        self._is_running = True
        try:
            while self._needs:
                await self._turn.mine()
                batch, self._needs = self._needs, []
                start(self._serve_safely(batch))
                await all_of([need.served for need in batch])
        finally:
            self._is_running = False

    async def _serve_safely(self, batch: list[Need]) -> None:
        """Whatever goes wrong, no GPU stays stopped for it, and the caller that waits goes on without."""
        is_through = False
        try:
            await self._serve_batch(batch)
            is_through = True
        finally:
            if not is_through:
                self._turn.open()
                set_ready(batch)
            for need in batch:
                need.served.set()

    async def _serve_batch(self, batch: list[Need]) -> None:
        first, missing = self._firsts.take_over(), self._supply.missing(batch)
        engines = self._supply.losers(missing)
        how = self._ways.way_of(engines)
        reclaim = Reclaim(needs=batch, missing=missing, how=how, began_ns=batch[0].asked_ns)
        self._teller.begin(reclaim)
        if first is not None:
            reclaim.begin_with(first)
            note_told(batch)
            if how is Remap.COOPERATIVE:  # what others have is asked for once this is there
                engines, reclaim.how = [], self._ways.usual
            await self._or_let_go(reclaim, self._take_gated(reclaim, engines))
        elif not missing or not engines:
            reclaim.reason = why_none(missing, is_allowed=self._supply.is_allowed)
            self._end(reclaim)
            self._turn.give_up()
        elif how is not Remap.COOPERATIVE:
            await self._or_let_go(reclaim, self._take_gated(reclaim, engines))
        else:
            self._turn.give_up()
            start(self._or_let_go(reclaim, self._take_at_step(reclaim, engines)))

    async def _or_let_go(self, reclaim: Reclaim, steps: Coroutine[Pause, None, Any]) -> None:
        """A reclaim that failed half way: its columns are what the books say once nothing is under way for them."""
        try:
            await steps
        except Exception:
            beside: list[Order] = []
            reclaim.count_first()
            for victims in reclaim.victims:
                orders = [one for client in victims.engine.clients for one in self._books.orders.under_way(client)]
                self._lost_when(victims.engine, victims.columns, orders)
                beside += [order for order in orders if order.how is not KvHow.AT_STEP]
            set_ready(reclaim.needs)
            await self._settle(reclaim, beside)
            if not reclaim.given_ns:
                reclaim.reason = "a step of it failed"
                self._end(reclaim)
            raise

    async def _settle(self, reclaim: Reclaim, orders: list[Order]) -> None:
        """The GPU stands until these have come back: no mapping is changed under a running kernel."""
        deadline_ns = self._clock.now_ns() + self._ways.order_ns(reclaim.how)
        if not await until(all_of([order.settled for order in orders]), self._clock, deadline_ns):
            late = [order for order in orders if not order.settled.is_set]
            reclaim.late = len(late)
            self._ways.mark_unsafe(late)

    # The two ways

    async def _take_gated(self, reclaim: Reclaim, engines: list[Engine]) -> None:
        stages = [reclaim.first.orders] if reclaim.first is not None else []
        before = reclaim.first.gpus if reclaim.first is not None else ()
        concerned = frozenset().union(reclaim.missing, before, *(engine.gpus for engine in engines))
        is_stopped = await self._turn.stop(concerned, lambda: self._plan(reclaim, engines))
        reclaim.stopped_ns = self._clock.now_ns()
        if is_stopped:
            stages += self._tell_and_take(reclaim, KvHow.AT_ONCE)
        else:
            reclaim.reason = "the GPU could not be stopped"
            reclaim.victims = []
        reclaim.count_first()
        if is_stopped or stages:
            orders = list(chain(*stages))
            self._begun(reclaim, stages)
            await self._settle(reclaim, orders)
            self._taken(reclaim, orders)
            await self._wait_given(reclaim)
        self._end(reclaim)
        self._turn.open()

    async def _take_at_step(self, reclaim: Reclaim, engines: list[Engine]) -> None:
        self._select(reclaim, engines)
        reclaim.stopped_ns = reclaim.selected_ns
        orders = list(chain(*self._tell_and_take(reclaim, KvHow.AT_STEP)))
        deadline_ns = self._clock.now_ns() + self._ways.order_ns(reclaim.how)
        gpus = frozenset().union(*(victims.engine.gpus for victims in reclaim.victims))
        settled = all_of([order.settled for order in orders])
        reclaim.lets, reclaim.let_ns = await self._beside.until_settled(
            settled, gpus, lambda: any(need.is_waited_for() for need in reclaim.needs), deadline_ns
        )
        await self._turn.while_turning()  # offline work is stopped again before the service maps
        reclaim.late = sum(not order.settled.is_set for order in orders)
        self._taken(reclaim, orders)
        await self._wait_given(reclaim)
        self._end(reclaim)

    # Their steps

    def _select(self, reclaim: Reclaim, engines: list[Engine]) -> None:
        reclaim.chose_ns = now_ns = self._clock.now_ns()
        for engine in engines:
            is_stale = engine.indexed_ns + STALE_NS < now_ns and not engine.is_index_new
            if engine.index is None or (is_stale and engine.book.is_small()):
                engine.index_now(self._costs, now_ns)
        reclaim.victims = choose(engines, reclaim.lacking(), self._costs)
        reclaim.selected_ns = self._clock.now_ns()

    def _plan(self, reclaim: Reclaim, engines: list[Engine]) -> None:
        """While the driver is busy: all that `_tell_and_take` would work out otherwise."""
        self._select(reclaim, engines)
        for victims in reclaim.victims:
            victims.plan = self._moves.plan_taking(victims.engine, victims.columns, KvHow.AT_ONCE)

    def _tell_and_take(self, reclaim: Reclaim, how: KvHow) -> list[list[Order]]:
        """The orders of each stage, to all engines."""
        reclaim.victims = [one for one in reclaim.victims if self._books.may_take(one.engine)]
        plans: list[MovePlan] = []
        for victims in reclaim.victims:
            engine, plan = victims.engine, victims.plan
            if plan is None or not plan.takes(victims.columns):  # what was pinned since it was chosen stays
                victims.columns = victims.columns[engine.takeable()[victims.columns]]
                plan = self._moves.plan_taking(engine, victims.columns, how)
            self._moves.lose(engine, victims.columns)
            plans.append(plan)
        reclaim.told_ns = self._clock.now_ns()
        note_told(reclaim.needs if plans else [])
        parts = zip_longest(*(plan.stages for plan in plans), fillvalue=[])
        stages = [self._moves.take(chain(*stage), how) for stage in parts]
        for victims in reclaim.victims:
            victims.orders = [order for order in chain(*stages) if order.client in victims.engine.ranks]
        return stages

    def _begun(self, reclaim: Reclaim, stages: list[list[Order]]) -> None:
        """The caller that waits prepares while the memory is taken, and maps one stage while the next is taken."""
        open_ = [[order for order in orders if not order.settled.is_set] for orders in stages]
        for need in reclaim.needs if any(open_) else ():
            need.coming = open_
            need.begun.set()
        for orders in stages[:-1]:
            all_of([order.settled for order in orders]).then(lambda: stage_came(reclaim.needs))

    def _taken(self, reclaim: Reclaim, orders: list[Order]) -> None:
        reclaim.taken_ns = self._clock.now_ns()
        reclaim.freed = sum(order.done for order in orders)
        for victims in reclaim.victims:
            orders_of = (*victims.engine.owes, *victims.orders)
            victims.engine.owes = [order for order in orders_of if not order.settled.is_set]
        set_ready(reclaim.needs)  # the services that wait come first
        for victims in reclaim.victims:
            self._lost_when(victims.engine, victims.columns, victims.orders)

    def _lost_when(self, engine: Engine, columns: Ints, orders: list[Order]) -> None:
        all_of([order.through for order in orders]).then(lambda: self._moves.lost(engine, columns))

    async def _wait_given(self, reclaim: Reclaim) -> None:
        deadline_ns = self._clock.now_ns() + self._ways.order_ns(reclaim.how)
        await until(all_of([need.given for need in reclaim.needs]), self._clock, deadline_ns)

    def _end(self, reclaim: Reclaim) -> None:
        reclaim.given_ns = self._clock.now_ns()
        set_ready(reclaim.needs)
        self._teller.end(reclaim)


def why_none(missing: dict[GpuIndex, int], *, is_allowed: bool) -> str:
    if not missing:
        return "no memory is missing any more"
    return "no attached offline engine has memory to lose there" if is_allowed else "harvesting is braked"


def note_told(needs: list[Need]) -> None:
    for need in needs:
        need.has_told = True


def stage_came(needs: list[Need]) -> None:
    for need in needs:
        need.stage_came()


def set_ready(needs: list[Need]) -> None:
    for need in needs:
        need.set_ready()
