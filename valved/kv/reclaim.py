"""How memory moves: to an online service that needs it, from offline work if it must be, and back. One reclaim reads:

    gate      hold every GPU concerned, wait until the native side has stopped the last one
    select    the columns whose loss costs the offline engines least (while the channels go off)
    tell      the table says that they are lost, before anything is touched: whoever dies from here on leaves an engine
              that recomputes for nothing, never one that believes garbage
    take      every rank puts its zero page there, and answers
    give      who asked maps the handles, zeroes them, and reads in its own table that they are there
    open      the hold is dropped

A cooperative reclaim has no gate: the same orders wait for the next step of the engine, channels on; if a service
waits, they are on although it holds the GPU (kv/beside.py). Where it was tried (kv/outside.py) valved makes
the memory sparse itself instead of asking for it.

An order that does not come back in time: its columns stay lost, its process launches nothing more until the order has
come back after all (a half-done mapping must meet no kernel), the GPUs open so that it can, and that client is asked
cooperatively from then on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from valved.abi.kv_link import KvHow, KvOp
from valved.gate.wake import GateService
from valved.kv.account import Need, Reclaim
from valved.kv.beside import Beside
from valved.kv.engines import Cells, Engine
from valved.kv.journey import Pause, all_of, start, until
from valved.kv.memory import Memory
from valved.kv.orders import Order
from valved.kv.outside import Outside
from valved.kv.pool import Ints, KvRangeBook
from valved.kv.victims import choose
from valved.machine.clock import Clock
from valved.machine.ports import GatePort
from valved.model.events import Event, EventKind
from valved.model.ids import ClientId, GpuIndex, Reach, Remap, Role, ServiceId
from valved.policy.eviction import EvictionSettings
from valved.state.journal import Journal
from valved.state.stats import MemoryCounters

SECOND_NS = 1_000_000_000
GATE_NS = SECOND_NS  # a stop takes a millisecond; one that takes this long has failed, and the ladder is at work
TRIES = 3  # of one growth: memory that the driver did not have after all is asked of offline work
STALE_NS = SECOND_NS  # an index that is older is made again for a reclaim; what it costs is bounded (kv_files.py)
TURNING_NS = 1_000_000  # look again whether a gate is through
HUNG = "a mapping order has not come back"
RUNGS = [Remap.SPARSE, Remap.HELPER, Remap.COOPERATIVE]
STOPS = frozenset({Reach.CHANNEL_OWN, Reach.CHANNEL_FD, Reach.CHANNEL_SELF})  # ways that really stop a kernel


class Mover:
    def __init__(
        self,
        memory: Memory,
        outside: Outside,
        gate: GatePort,
        gating: GateService,
        journal: Journal,
        clock: Clock,
        costs: EvictionSettings,
    ) -> None:
        self.is_allowed = True  # harvesting, not draining: memory may be taken from offline work
        self.room: dict[GpuIndex, int] = {info.index: 1 << 30 for info in gate.gpus()}  # handles that may be made
        self.full: Callable[[GpuIndex], None] = lambda gpu: None  # the driver has no more
        self.finished: Callable[[Reclaim, Event], None] = lambda reclaim, event: None
        self.counters = outside.counters = MemoryCounters()
        self.unsafe: set[ClientId] = set()
        self.costs = costs
        self._memory = memory
        self.outside = outside
        self._gate = gate
        self._gating = gating
        self._journal = journal
        self._clock = clock
        self._needs: list[Need] = []
        self._open_needs: list[Need] = []  # until what they asked for is given, or will not be
        self._turn: Pause | None = None  # set when whoever has the gate for moving memory is through
        self._watching: list[Pause] = []  # somebody waits for GPUs to stop
        self._is_running = False
        self._beside = Beside(gating, clock, round(memory.settings.let_ms * 1e6))
        gating.after_drain.append(self._may_have_stopped)
        outside.stopper = self

    def allow(self, on: bool) -> None:
        self.is_allowed = on

    def is_pressed(self, gpus: frozenset[GpuIndex]) -> bool:
        """Somebody waits for memory there, until it has arrived: none is lent now, least of all what was just freed."""
        return any(not gpus.isdisjoint(need.handles) for need in self._open_needs)

    # To those who need it

    async def grow(self, engine: Engine, columns: Ints) -> int:
        """Back bare columns of an online engine, taking from offline work what is missing. How many have come."""
        engine.going[columns] = True
        try:
            for _ in range(TRIES):
                left = columns[~engine.backed_columns()[columns]]
                if not len(left) or not await self._grow_once(engine, left):
                    break
        finally:
            if self._is_here(engine):
                engine.going[columns] = False
                self._memory.tell(engine)
        if not self._is_here(engine):
            return 0
        return int(engine.backed_columns()[columns].sum())

    async def _grow_once(self, engine: Engine, columns: Ints) -> bool:
        """Whether another try may find more: the driver had less than we thought."""
        need = None
        orders: list[Order] = []
        try:
            if self.fitting(engine, columns) < len(columns):
                handles = {gpu: int(engine.handles_of(gpu)[columns].sum()) for gpu in engine.gpus}
                need = self.ask(engine.service, handles, lambda: self._is_short(engine))
                await need.ready
            else:
                await self.while_turning()
            if self._is_here(engine):
                orders = self.give(engine.cells(columns[: self.fitting(engine, columns)], backed=False))
            await all_of([order.settled for order in orders])
        finally:
            self.settle_need(need)
        return self._is_here(engine) and any(order.done for order in orders)

    def give(self, cells: Iterable[Cells], how: KvHow = KvHow.AT_ONCE) -> list[Order]:
        """Order these slots to be backed: free handles first, then new ones as far as there is room.

        A free handle of another trust domain goes back to the driver, and makes room for a new one.
        """
        orders: list[Order] = []
        for book, slots in cells:
            pool = self._memory.pool
            rows = pool.take(book.gpu, book.domain, len(slots))
            foreign = pool.trim(book.gpu, len(slots) - len(rows), but=book.domain)
            self.room[book.gpu] += foreign
            self.counters.remade_handles += foreign
            orders += self._memory.orders.back(book, slots[: len(rows)], rows, how)
            rest = slots[len(rows) : len(rows) + max(0, self.room[book.gpu])]
            if len(rest):
                self.room[book.gpu] -= len(rest)
                orders += self._memory.orders.create(book, rest, how)
        for order in orders:
            order.settled.then(lambda order=order: self._note_full(order))  # type: ignore[misc]
        return orders

    def _note_full(self, order: Order) -> None:
        if order.is_creating and order.done < len(order.slots):
            self.full(order.book.gpu)

    def affordable(self, gpu: GpuIndex) -> int:
        """Handles of this GPU that can be had without taking any from anybody."""
        pool = self._memory.pool
        return pool.free_handles(gpu) + max(0, min(self.room[gpu], pool.most - pool.total))

    def fitting(self, engine: Engine, columns: Ints) -> int:
        """How many of these, from the first on."""
        fits = len(columns)
        for gpu in engine.gpus:
            needed = np.cumsum(engine.handles_of(gpu)[columns])
            fits = min(fits, int(np.searchsorted(needed, self.affordable(gpu), side="right")))
        return fits

    def can_lend(self, engine: Engine) -> bool:
        """Zeroing needs the channels of who gets the memory: not while they are off."""
        is_open = not self._beside.is_on and not any(self._gating.is_stopped(gpu) for gpu in engine.gpus)
        return engine.can_lose and is_open

    # Back again

    async def give_back(self, engine: Engine, columns: Ints) -> int:
        """Unmap what an online engine offers. Its hook has withheld those blocks: nobody touches them."""
        orders: list[Order] = []
        try:
            self._lose(engine, columns)
            await self.while_turning()
            if self._is_here(engine):  # a hook that attached anew meanwhile has been told that it has them
                orders = self.take(engine, columns, KvOp.UNBACK, KvHow.AT_ONCE)
            await all_of([order.settled for order in orders])
        finally:
            self._lost(engine, columns)
        freed = sum(order.done for order in orders)
        self.counters.returned_handles += freed
        self._journal.emit(
            EventKind.RETURNED,
            service=engine.service,
            gpus=tuple(sorted(engine.gpus)),
            reason="offered by its engine",
            columns=len(columns),
            handles=freed,
        )
        return freed

    async def lend(self, engine: Engine, columns: Ints) -> int:
        """Give bare columns of an offline engine their memory back.

        A mapping over the zero page leaves a hole for a moment, so no kernel may run: either the GPUs are stopped until
        the mapping is done (zeroing needs the channels again and follows), or it happens between two steps.
        """
        engine.going[columns] = True
        orders: list[Order] = []
        try:
            if self.way_of([engine]) is Remap.HELPER:
                await self._my_turn()
                try:
                    orders = await self._give_gated(engine, columns)
                finally:
                    self._open()
            else:
                orders = self._give_at_step(engine, columns)
            await all_of([order.settled for order in orders])
        finally:
            if self._is_here(engine):
                engine.going[columns] = False
                self._memory.tell(engine)
        came = sum(order.done for order in orders)
        self.counters.lent_handles += came
        if self._is_here(engine):
            self._journal.emit(
                EventKind.LENT,
                service=engine.service,
                gpus=tuple(sorted(engine.gpus)),
                reason="memory that nobody uses",
                columns=len(columns),
                handles=came,
            )
        return came

    async def _give_gated(self, engine: Engine, columns: Ints) -> list[Order]:
        """Returns when the mapping is done."""
        if not await self._stop(engine.gpus) or not self._is_here(engine):
            return []
        orders = self.give(engine.cells(columns, backed=False))
        await self._mapped(orders)
        return orders

    async def _mapped(self, orders: list[Order]) -> None:
        """Until the mapping work of these is done; zeroing may go on."""
        books = {order.book.uid: order.book for order in orders}
        fences = [self._memory.orders.fence(book) for book in books.values()]
        deadline_ns = self._clock.now_ns() + self._order_ns(Remap.HELPER)
        if not await until(all_of([fence.settled for fence in fences]), self._clock, deadline_ns):
            self._mark_unsafe([fence for fence in fences if not fence.settled.is_set])

    def _give_at_step(self, engine: Engine, columns: Ints) -> list[Order]:
        """At the next step; at once in an engine that has never made one: no kernel knows its blocks."""
        how = KvHow.AT_STEP if engine.view().steps else KvHow.AT_ONCE
        return self.give(engine.cells(columns, backed=False), how)

    def take(self, engine: Engine, columns: Ints, op: KvOp, how: KvHow) -> list[Order]:
        orders: list[Order] = []
        for book, slots in engine.cells(columns, backed=True):
            if how is KvHow.AT_ONCE and self._best(book) is Remap.SPARSE and op is KvOp.QUARANTINE:
                orders += self.outside.take(book, slots)
            else:
                orders += self._memory.orders.take_away(op, book, slots, how)
        return orders

    # Taking from offline work

    def ask(self, service: ServiceId, handles: dict[GpuIndex, int], is_waited_for: Callable[[], bool]) -> Need:
        need = Need(service=service, handles=handles, asked_ns=self._clock.now_ns(), is_waited_for=is_waited_for)
        self._needs.append(need)
        self._open_needs.append(need)
        if not self._is_running:
            start(self._serve())
        return need

    def settle_need(self, need: Need | None) -> None:
        if need is not None:
            self._open_needs.remove(need)
            need.given.set()

    async def _serve(self) -> None:
        """Needs that came together are served together."""
        self._is_running = True
        try:
            while self._needs:
                await self._my_turn()
                batch, self._needs = self._needs, []
                start(self._serve_safely(batch))
                await all_of([need.served for need in batch])
        finally:
            self._is_running = False

    async def _serve_safely(self, batch: list[Need]) -> None:
        """Whatever goes wrong, no GPU stays stopped for it, and who waits goes on without."""
        is_through = False
        try:
            await self._serve_batch(batch)
            is_through = True
        finally:
            if not is_through:
                self._open()
                self._set_ready(batch)
            for need in batch:
                need.served.set()

    def _set_ready(self, batch: list[Need]) -> None:
        for need in batch:
            need.ready.set()

    async def _serve_batch(self, batch: list[Need]) -> None:
        missing = self._missing(batch)
        engines = self._losers(missing)
        how = self.way_of(engines)
        reclaim = Reclaim(needs=batch, missing=missing, how=how, began_ns=batch[0].asked_ns)
        if not missing or not engines:
            reclaim.reason = "nothing is missing any more" if not missing else self._why_nobody()
            self._end(reclaim)
            self._pass_turn()
        elif how is not Remap.COOPERATIVE:
            await self._gated(reclaim, engines)
        else:
            self._pass_turn()
            start(self._cooperative(reclaim, engines))

    def _missing(self, batch: list[Need]) -> dict[GpuIndex, int]:
        total: dict[GpuIndex, int] = {}
        for need in batch:
            for gpu, count in need.handles.items():
                total[gpu] = total.get(gpu, 0) + count
        return {gpu: count - self.affordable(gpu) for gpu, count in total.items() if count > self.affordable(gpu)}

    def _losers(self, missing: dict[GpuIndex, int]) -> list[Engine]:
        if not self.is_allowed:
            return []
        engines = self._memory.engines_with(Role.OFFLINE)
        return [
            engine
            for engine in engines
            if engine.can_lose and not engine.gpus.isdisjoint(missing) and engine.takeable().any()
        ]

    def takeable(self, gpu: GpuIndex) -> int:
        """Handles of this GPU that offline engines could lose."""
        losers = self._losers({gpu: 1})
        return sum(int(engine.handles_of(gpu)[engine.takeable()].sum()) for engine in losers)

    def _why_nobody(self) -> str:
        return "no attached offline engine can lose anything there" if self.is_allowed else "harvesting is braked"

    def _let_go(self, reclaim: Reclaim) -> None:
        """A reclaim that failed half way: its columns are what the books say once nothing is under way for them."""
        for victims in reclaim.victims:
            orders = [one for client in victims.engine.clients for one in self._memory.orders.under_way(client)]
            through = all_of([order.through for order in orders])
            through.then(lambda victims=victims: self._lost(victims.engine, victims.columns))  # type: ignore[misc]
        self._set_ready(reclaim.needs)

    async def _gated(self, reclaim: Reclaim, engines: list[Engine]) -> None:
        try:
            await self._take_gated(reclaim, engines)
        except Exception:
            self._let_go(reclaim)
            raise

    async def _take_gated(self, reclaim: Reclaim, engines: list[Engine]) -> None:
        concerned = frozenset().union(reclaim.missing, *(engine.gpus for engine in engines))
        is_stopped = await self._stop(concerned, lambda: self._select(reclaim, engines))
        reclaim.stopped_ns = self._clock.now_ns()
        if is_stopped:
            orders = self._tell_and_take(reclaim, KvHow.AT_ONCE)
            deadline_ns = self._clock.now_ns() + self._order_ns(reclaim.how)
            if not await until(all_of([order.settled for order in orders]), self._clock, deadline_ns):
                late = [order for order in orders if not order.settled.is_set]
                reclaim.late = len(late)
                self._mark_unsafe(late)
            self._taken(reclaim, orders)
            await self._wait_given(reclaim)
        else:
            reclaim.reason = "the GPU could not be stopped"
            reclaim.victims = []
        self._end(reclaim)
        self._open()

    async def _cooperative(self, reclaim: Reclaim, engines: list[Engine]) -> None:
        try:
            await self._take_at_step(reclaim, engines)
        except Exception:
            self._let_go(reclaim)
            raise

    async def _take_at_step(self, reclaim: Reclaim, engines: list[Engine]) -> None:
        self._select(reclaim, engines)
        reclaim.stopped_ns = reclaim.selected_ns
        orders = self._tell_and_take(reclaim, KvHow.AT_STEP)
        deadline_ns = self._clock.now_ns() + self._order_ns(reclaim.how)
        gpus = frozenset().union(*(victims.engine.gpus for victims in reclaim.victims))
        settled = all_of([order.settled for order in orders])
        reclaim.let_ns = await self._beside.until_settled(
            settled, gpus, lambda: any(need.is_waited_for() for need in reclaim.needs), deadline_ns
        )
        await self.while_turning()  # offline work stands again before anybody maps
        reclaim.late = sum(not order.settled.is_set for order in orders)
        self._taken(reclaim, orders)
        await self._wait_given(reclaim)
        self._end(reclaim)

    def _select(self, reclaim: Reclaim, engines: list[Engine]) -> None:
        reclaim.chose_ns = now_ns = self._clock.now_ns()
        for engine in engines:
            if engine.index is None or engine.indexed_ns + STALE_NS < now_ns:
                engine.refresh_index(self.costs, now_ns)
        reclaim.victims = choose(engines, reclaim.missing, self.costs)
        reclaim.selected_ns = self._clock.now_ns()

    def _tell_and_take(self, reclaim: Reclaim, how: KvHow) -> list[Order]:
        reclaim.victims = [victims for victims in reclaim.victims if self._is_here(victims.engine)]
        for victims in reclaim.victims:
            self._lose(victims.engine, victims.columns)
        reclaim.told_ns = self._clock.now_ns()
        orders: list[Order] = []
        for victims in reclaim.victims:
            victims.orders = self.take(victims.engine, victims.columns, KvOp.QUARANTINE, how)
            orders += victims.orders
        return orders

    def _taken(self, reclaim: Reclaim, orders: list[Order]) -> None:
        reclaim.taken_ns = self._clock.now_ns()
        reclaim.freed = sum(order.done for order in orders)
        for need in reclaim.needs:
            need.ready.set()  # who waits comes first
        for victims in reclaim.victims:
            through = all_of([order.through for order in victims.orders])
            through.then(lambda victims=victims: self._lost(victims.engine, victims.columns))  # type: ignore[misc]

    async def _wait_given(self, reclaim: Reclaim) -> None:
        deadline_ns = self._clock.now_ns() + self._order_ns(reclaim.how)
        await until(all_of([need.given for need in reclaim.needs]), self._clock, deadline_ns)

    def _end(self, reclaim: Reclaim) -> None:
        reclaim.given_ns = self._clock.now_ns()
        for need in reclaim.needs:
            need.ready.set()
        if reclaim.missing:
            event = self._journal.emit(
                EventKind.RECLAIMED,
                service=reclaim.needs[0].service,
                gpus=tuple(sorted(reclaim.missing)),
                reason=reclaim.reason or "; ".join(v.decision.reason for v in reclaim.victims) or "nothing to take",
                **reclaim.account(self._memory.pool.handle_bytes),
            )
            self.counters.reclaims += 1
            self.counters.reclaims_short += reclaim.freed < sum(reclaim.missing.values())
            self.counters.reclaimed_handles += reclaim.freed
            self.counters.late_orders += reclaim.late
            self.finished(reclaim, event)

    # The gate, one at a time

    async def _my_turn(self) -> None:
        while self._turn is not None:
            await self._turn
        self._turn = Pause()

    def when_still(self, call: Callable[[], None]) -> None:
        """At once, or when no mapping is being changed under the gate any more."""
        if self._turn is None:
            call()
        else:
            self._turn.then(lambda: self.when_still(call))

    def _pass_turn(self) -> None:
        turn, self._turn = self._turn, None
        if turn is not None:
            turn.set()

    async def _stop(self, gpus: frozenset[GpuIndex], meanwhile: Callable[[], None] = lambda: None) -> bool:
        """Hold these GPUs; True once the last disable of each came back well."""
        self._gating.set_moving(gpus)
        meanwhile()
        deadline_ns = self._clock.now_ns() + GATE_NS
        while not all(self._gating.is_proven_stopped(gpu) for gpu in gpus):
            now_ns = self._clock.now_ns()
            if now_ns >= deadline_ns:
                return False
            change = Pause()
            self._watching.append(change)
            # Held again before it was enabled, a GPU stays stopped without a stamp: look from time to time, too.
            await until(change, self._clock, min(deadline_ns, now_ns + TURNING_NS))
        return True

    def _may_have_stopped(self) -> None:
        watching, self._watching = self._watching, []
        for pause in watching:
            pause.set()

    def _open(self) -> None:
        self._gating.set_moving(frozenset())
        self._pass_turn()

    async def stop_for(self, gpu: GpuIndex) -> bool:
        await self._my_turn()
        return self.is_allowed and await self._stop(frozenset({gpu}))

    def open(self) -> None:
        self._open()

    async def while_turning(self) -> None:
        """Mapping work takes the driver's locks in write mode: it waits for gates that are being closed.

        Not for ever for one that hangs: memory of the other GPUs must move on.
        """
        deadline_ns = self._clock.now_ns() + GATE_NS
        while self._gate.is_turning() and self._clock.now_ns() < deadline_ns:
            pause = Pause()
            self._clock.call_at_ns(self._clock.now_ns() + TURNING_NS, pause.set)
            await pause

    # Small things

    @property
    def usual(self) -> Remap:
        """The way where nothing speaks against it."""
        setting = self._memory.settings.remap
        return setting if setting in (Remap.SPARSE, Remap.HELPER) else Remap.COOPERATIVE

    def way_of(self, engines: list[Engine]) -> Remap:
        """The way for these engines: what the setting allows, and what is known to work with each of them."""
        if self.usual is Remap.COOPERATIVE:
            return Remap.COOPERATIVE
        clients = frozenset().union(*(engine.clients for engine in engines))
        gpus = frozenset().union(*(engine.gpus for engine in engines))
        stops = all(self._gate.reach(gpu)[0] in STOPS for gpu in gpus)
        if not stops or not self.unsafe.isdisjoint(clients):
            return Remap.COOPERATIVE
        ways = {self._best(book) for engine in engines for rank in engine.ranks.values() for book in rank.books}
        return max(ways, key=RUNGS.index, default=self.usual)

    def _best(self, book: KvRangeBook) -> Remap:
        return self.outside.best(book.key.client, book.gpu) if self.usual is Remap.SPARSE else self.usual

    def _order_ns(self, how: Remap) -> int:
        settings = self._memory.settings
        return round((settings.step_s if how is Remap.COOPERATIVE else settings.order_s) * SECOND_NS)

    def _lose(self, engine: Engine, columns: Ints) -> None:
        """Tell first, then do."""
        engine.going[columns] = engine.lost[columns] = True
        engine.table.record(engine.blocks_of(columns), False, self._clock.now_ns())

    def _lost(self, engine: Engine, columns: Ints) -> None:
        if self._is_here(engine):
            engine.going[columns] = engine.lost[columns] = False
            self._memory.tell(engine)

    def _is_short(self, engine: Engine) -> bool:
        """It would use more than it has."""
        here = engine.backed_columns() & ~engine.lost
        return self._is_here(engine) and engine.view().wanted_blocks > int(here.sum()) * engine.blocks_per_column

    def _is_here(self, engine: Engine) -> bool:
        return self._memory.engines.get(engine.service) is engine and engine.is_complete

    def _mark_unsafe(self, late: list[Order]) -> None:
        for client in {order.client for order in late}:
            self.unsafe.add(client)
            self._memory.holds.hold(client, HUNG)
            mine = all_of([order.settled for order in late if order.client == client])
            mine.then(lambda client=client: self._let_launch(client))  # type: ignore[misc]
            self._journal.emit(
                EventKind.REMAP_UNSAFE,
                service=self._memory.service_of(client),
                client=client,
                reason=f"a mapping order took longer than {self._memory.settings.order_s:g} s",
            )

    def _let_launch(self, client: ClientId) -> None:
        self._memory.holds.release(client, HUNG)
