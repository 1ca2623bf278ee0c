"""Lends free memory to offline engines, as far as they may have more. Takes what online ones offer."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np

from valved.abi.kv_link import KvHow
from valved.gate.wake import GateService
from valved.kv.beside import LET_REST_NS, Beside, waits_in_vain
from valved.kv.books import KvBooks
from valved.kv.changes import Changes, Look
from valved.kv.engines import Engine
from valved.kv.journey import Pause, all_of, start, until
from valved.kv.moves import Moves
from valved.kv.orders import Order
from valved.kv.slots import Ints
from valved.kv.supply import Supply
from valved.kv.turn import GateTurn
from valved.kv.ways import Ways
from valved.machine.clock import Clock
from valved.model.events import EventKind
from valved.model.ids import GpuIndex, Remap, ServiceId
from valved.state.journal import Journal
from valved.state.stats import MemoryCounters

TRIES = 3  # to take all of what an engine offers: its shim may carry out a part
RETRY_NS = 1_000_000_000  # after a lending that brought nothing
REST_NS = 60 * RETRY_NS  # the longest between two of them: each may cost a stop of the GPU
LOOK_NS = 100_000_000  # does a service wait for what is being lent?
LEND_HANDLES = 64  # at a time and GPU: one packet of orders, a stop of a millisecond


@dataclass(eq=False, repr=False)
class Lending:
    _books: KvBooks
    _supply: Supply
    _turn: GateTurn
    _ways: Ways
    _moves: Moves
    _beside: Beside
    _gating: GateService
    _journal: Journal
    _clock: Clock
    _counters: MemoryCounters

    def can_lend(self, engine: Engine) -> bool:
        """Zeroing needs the channels of the process that gets the memory, so they must be on."""
        is_open = not self._beside.is_on and not any(self._gating.is_stopped(gpu) for gpu in engine.gpus)
        return engine.can_lose and is_open

    async def lend(self, engine: Engine, columns: Ints) -> int:
        """Give bare columns of an offline engine their memory back. Returns the number of handles that came.

        A mapping over the zero page leaves a hole for a moment, so no kernel may run: either the GPUs are stopped until
        the mapping is done (zeroing needs the channels again and follows), or it happens between two steps.
        """
        orders: list[Order] = []
        self._moves.coming(engine, columns)
        try:
            if self._ways.way_of([engine]) is Remap.HELPER:
                orders = await self._give_gated(engine, columns)
            else:
                orders = self._give_at_step(engine, columns)
            await self._arrived(engine, all_of([order.settled for order in orders]))
        finally:
            self._moves.came(engine, columns)
        came = sum(order.done for order in orders)
        self._counters.lent_handles += came
        if self._books.is_attached(engine):
            self._note(EventKind.LENT, engine, columns, came, "free memory")
        return came

    async def _arrived(self, engine: Engine, settled: Pause) -> None:
        """The work that gets it zeroes it, or maps it at its next step. A service may wait for just this memory, and so
        keep that work off: then it runs beside the service until it can give the memory."""
        while not settled.is_set:
            lets, until_ns = 0, self._clock.now_ns() + LOOK_NS
            if self._is_waited_for(engine):
                is_waited_for = partial(self._is_waited_for, engine)
                lets, _ = await self._beside.until_settled(settled, engine.gpus, is_waited_for, until_ns)
            await until(settled, self._clock, self._clock.now_ns() + LET_REST_NS if lets else until_ns)

    def _is_waited_for(self, engine: Engine) -> bool:
        return waits_in_vain(self._books, self._supply, engine.gpus)

    async def _give_gated(self, engine: Engine, columns: Ints) -> list[Order]:
        """Returns when the mapping is done."""
        await self._turn.mine()
        try:
            if not await self._turn.stop(engine.gpus) or not self._books.is_attached(engine):
                return []
            if self._supply.is_pressed(engine.gpus):  # a service has asked for memory since
                return []
            columns = columns[: self._supply.fitting(engine, columns)]
            orders = self._moves.give(engine.cells(columns, backed=False))
            await self._mapped(orders)
            return orders
        finally:
            self._turn.open()

    async def _mapped(self, orders: list[Order]) -> None:
        """Until the mapping work of these is done; zeroing may go on."""
        fences = [self._books.orders.fence(one.slots.book) for one in {one.client: one for one in orders}.values()]
        deadline_ns = self._clock.now_ns() + self._ways.order_ns(Remap.HELPER)
        if not await until(all_of([fence.settled for fence in fences]), self._clock, deadline_ns):
            self._ways.mark_unsafe([fence for fence in fences if not fence.settled.is_set])

    def _give_at_step(self, engine: Engine, columns: Ints) -> list[Order]:
        """At the next step. At once in an engine that has made no step yet, because no kernel knows its blocks."""
        how = KvHow.AT_STEP if engine.view().steps else KvHow.AT_ONCE
        return self._moves.give(engine.cells(columns, backed=False), how)

    async def give_back(self, engine: Engine, columns: Ints) -> int:
        """Unmap what an online engine offers. Its hook has withheld those blocks, so no request uses them."""
        orders: list[Order] = []
        try:
            self._moves.lose(engine, columns)
            await self._turn.while_turning()
            left = columns
            for _ in range(TRIES):
                if self._books.is_attached(
                    engine
                ):  # a hook that attached anew meanwhile has been told that it has them
                    more = self._moves.unback(engine, left)
                    await all_of([order.settled for order in more])
                    orders += more
                    left = np.intersect1d(columns, engine.partial_columns())
                if not len(left):
                    break
        finally:
            self._moves.lost(engine, columns)
        freed = sum(order.done for order in orders)
        self._counters.returned_handles += freed
        self._note(EventKind.RETURNED, engine, columns, freed, "offered by its engine")
        return freed

    def _note(self, kind: EventKind, engine: Engine, columns: Ints, handles: int, reason: str) -> None:
        self._journal.emit(
            kind,
            service=engine.service,
            gpus=tuple(sorted(engine.gpus)),
            reason=reason,
            columns=len(columns),
            handles=handles,
        )


@dataclass(slots=True, kw_only=True)
class Offline:
    """The same about an offline engine. A lending that brings nothing is tried again after ever longer pauses."""

    lending: bool = False
    rest_ns: int = 0
    blocked_until_ns: int = 0

    def note(self, came: int, now_ns: int) -> None:
        self.rest_ns = 0 if came else min(REST_NS, max(RETRY_NS, 2 * self.rest_ns))
        self.blocked_until_ns = now_ns + self.rest_ns


class Shares(Protocol):
    """On a Kubernetes node: offline pods that are lent their memory in steps."""

    def share_of(self, cgroup: str) -> float:
        """Which share of its columns the pod of this control group is lent at most."""
        ...


@dataclass(eq=False, repr=False)
class Lender:
    """Decides which engine is lent how much."""

    _books: KvBooks
    _supply: Supply
    _lending: Lending
    _clock: Clock
    _changes: Changes
    _shares: Shares | None

    def __post_init__(self) -> None:
        self._offline: dict[ServiceId, Offline] = {}

    def serve(self, engine: Engine) -> None:
        """Gives offline work free memory, a packet of orders at a time, while its GPUs are open."""
        if self._supply.is_pressed(engine.gpus):
            return
        offline = self._offline.setdefault(engine.service, Offline())
        if offline.lending or self._clock.now_ns() < offline.blocked_until_ns or not self._lending.can_lend(engine):
            return
        bare = engine.bare_columns()
        least = max(1, LEND_HANDLES // engine.handles_per_column)
        columns = bare[: min(least, max(0, self.short_of_ceiling(engine)), self._supply.fitting(engine, bare))]
        if len(columns):
            offline.lending = True
            start(self._lending_to(engine, offline, columns))

    async def _lending_to(self, engine: Engine, offline: Offline, columns: Ints) -> None:
        came = 0
        try:
            came = await self._lending.lend(engine, columns)
        finally:
            offline.lending = False
            offline.note(came, self._clock.now_ns())
        if came:
            self._changes.put(Look())

    def engine_left(self, engine: Engine) -> None:
        self._offline.pop(engine.service, None)

    def short_of_ceiling(self, engine: Engine) -> int:
        """Columns up to the ceiling of an offline engine. Negative when it has more."""
        return math.ceil(self._share(engine.service) * engine.columns) - int(engine.backed_columns().sum())

    def _share(self, service: ServiceId) -> float:
        if self._shares is None:
            return 1.0
        claims = self._books.registry.claims.values()
        return min((self._shares.share_of(one.cgroup) for one in claims if one.service == service), default=1.0)

    def withheld(self, engine: Engine) -> dict[GpuIndex, int]:
        """Bytes that only its ceiling keeps from an offline engine."""
        bare = engine.bare_columns()
        could = bare[max(0, self.short_of_ceiling(engine)) : self._supply.fitting(engine, bare)]
        size = self._books.pool.handle_bytes
        return {gpu: int(engine.handles_of(gpu)[could].sum()) * size for gpu in engine.gpus}

    def can_have_more(self, engine: Engine) -> bool:
        """Without taking it from any engine."""
        return self._supply.fitting(engine, engine.bare_columns()) > 0
