"""Offline work beside a busy online service, for memory that the service waits for, and no longer than it takes.

Memory is taken between two steps of the offline engine (kv/reclaim.py, cooperative). A step that the gate stopped
in its middle never ends while the service has open requests; and the request that waits for the memory is one of them.
So the GPUs of the engine are let run, once and for `let_ms` at most: its steps are cut to a part of that (kv/rungs.py).
An engine whose step did not end in it, because nothing cuts its steps, is let again, LET_REST_NS later; that is
counted apart. Gate words stay closed: online launches meanwhile cost what they always cost, and share the GPU.
"""

from __future__ import annotations

from collections.abc import Callable

from valved.gate.wake import GateService
from valved.kv.journey import Pause, until
from valved.machine.clock import Clock
from valved.model.ids import GpuIndex
from valved.state.stats import MemoryCounters

LOOK_NS = 5_000_000  # has a gate closed or opened, does a service wait by now?
LET_REST_NS = 1_000_000_000


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
