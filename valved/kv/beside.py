"""Offline work beside a busy online service, for memory that the service waits for, and no longer than it takes.

Memory is taken between two steps of the offline engine (kv/reclaim.py, cooperative). A step that the gate stopped
in its middle never ends while the service has open requests; and the request that waits for the memory is one of them.
So the GPUs of the engine are let run, once and for `let_ms` at most: its steps are cut to a part of that (kv/rungs.py).
An engine whose step did not end in it, because nothing cuts its steps, is let again, LET_REST_NS later; that is
counted apart. Gate words stay closed: online launches meanwhile cost what they always cost, and share the GPU.

After a restart of valved such a step keeps an engine also from attaching, and until then nobody may take its memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from valved.abi.kv_link import KvMode
from valved.gate.wake import GateService
from valved.kv.books import KvBooks
from valved.kv.engines import Engine
from valved.kv.journey import Pause, start, until
from valved.kv.supply import Supply
from valved.machine.clock import Clock
from valved.model.ids import GpuIndex, Role
from valved.state.registry import ClientEntry
from valved.state.stats import MemoryCounters

LOOK_NS = 5_000_000  # has a gate closed or opened, does a service wait by now?
LET_REST_NS = 1_000_000_000
NEW_NS = 20_000_000_000  # whose hook has not come by then has none


class Beside:
    def __init__(self, gating: GateService, clock: Clock, let_ns: int, counters: MemoryCounters) -> None:
        self._counters = counters
        self._gating = gating
        self._clock = clock
        self._let_ns = let_ns
        self._letting: dict[object, frozenset[GpuIndex]] = {}

    @property
    def is_on(self) -> bool:
        return bool(self._letting)

    async def until_settled(
        self, settled: Pause, gpus: frozenset[GpuIndex], is_waited_for: Callable[[], bool], deadline_ns: int
    ) -> tuple[int, int]:
        """Until then or the deadline. How often, and for how many ns, offline work was let run."""
        count = total_ns = resting_until_ns = 0
        while not settled.is_set and (now_ns := self._clock.now_ns()) < deadline_ns:
            may_let = self._let_ns and now_ns >= resting_until_ns and self._gating.may_let(gpus)
            if may_let and is_waited_for():
                await self._let(settled, gpus, min(deadline_ns, now_ns + self._let_ns))
                resting_until_ns = self._clock.now_ns() + LET_REST_NS
                total_ns += self._clock.now_ns() - now_ns
                count += 1
            else:
                await until(settled, self._clock, min(deadline_ns, now_ns + LOOK_NS))
        self._counters.lets += count
        self._counters.lets_again += max(0, count - 1)
        self._counters.let_ns += total_ns
        return count, total_ns

    async def _let(self, settled: Pause, gpus: frozenset[GpuIndex], until_ns: int) -> None:
        me = object()
        self._letting[me] = gpus
        self._tell()
        try:
            while not settled.is_set and (now_ns := self._clock.now_ns()) < until_ns and self._gating.is_held(gpus):
                await until(settled, self._clock, min(until_ns, now_ns + LOOK_NS))
        finally:
            del self._letting[me]
            self._tell()

    def _tell(self) -> None:
        self._gating.let(frozenset().union(*self._letting.values()))


def waits_in_vain(books: KvBooks, supply: Supply, gpus: Iterable[GpuIndex]) -> bool:
    """A service there waits for memory that nobody could give now."""
    beside = (one for one in books.engines_with(Role.ONLINE) if not one.gpus.isdisjoint(gpus))
    short = (one for one in beside if one.view().wanted_blocks > one.standing_count() * one.blocks_per_column)
    return any(len(one.bare_columns()) and not supply.obtainable(one, supply.within_reach(one)) for one in short)


@dataclass(eq=False, repr=False)
class Latecomers:
    """Lets offline engines that have memory attach, while a service waits for it."""

    _books: KvBooks
    _supply: Supply
    _beside: Beside
    _clock: Clock

    def __post_init__(self) -> None:
        self._settled: Pause | None = None

    def look(self) -> None:
        gpus = self._late()
        if self._settled is not None:
            if not gpus:
                self._settled.set()
        elif gpus:
            self._settled = Pause()
            start(self._let(self._settled, gpus))

    async def _let(self, settled: Pause, gpus: frozenset[GpuIndex]) -> None:
        try:
            await self._beside.until_settled(settled, gpus, lambda: bool(self._late()), self._clock.now_ns() + NEW_NS)
        finally:
            self._settled = None

    def _late(self) -> frozenset[GpuIndex]:
        """GPUs where memory is waited for that such an engine has."""
        new_ns = self._clock.now_ns() - NEW_NS
        late = {
            book.gpu
            for entry in self._books.registry.with_role(Role.OFFLINE)
            if entry.joined_ns > new_ns and self._is_late(entry)
            for book in self._books.pool.of_client(entry.id)
            if (book.at >= 0).any()
        }
        return frozenset(gpu for gpu in late if waits_in_vain(self._books, self._supply, [gpu]))

    def _is_late(self, entry: ClientEntry) -> bool:
        """Its hook may come yet, or has not taken in its table."""
        engine: Engine | None = self._books.engine_of(entry.id)
        return engine is None or (engine.attached_mode is not KvMode.NONE and not engine.can_lose)
