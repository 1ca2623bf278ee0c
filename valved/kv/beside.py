"""Offline work beside a busy online service, for memory that the service waits for, and no longer than it takes.

Memory is taken between two steps of the offline engine (kv/reclaim.py, cooperative). A step that the gate stopped
in its middle never ends while the service has open requests; and the request that waits for the memory is one of them.
So the GPUs of the engine are let run, at most `let_ms` at a time and with as long a rest after it, until the orders
have come back. Gate words stay closed: online launches meanwhile cost what they always cost, and share the GPU.
"""

from __future__ import annotations

from collections.abc import Callable

from valved.gate.wake import GateService
from valved.kv.journey import Pause, until
from valved.machine.clock import Clock
from valved.model.ids import GpuIndex

LOOK_NS = 5_000_000  # has a gate closed or opened, does somebody wait by now?


class Beside:
    def __init__(self, gating: GateService, clock: Clock, let_ns: int) -> None:
        self._gating = gating
        self._clock = clock
        self._let_ns = let_ns
        self._letting: dict[object, frozenset[GpuIndex]] = {}

    @property
    def is_on(self) -> bool:
        return bool(self._letting)

    async def until_settled(
        self, settled: Pause, gpus: frozenset[GpuIndex], is_waited_for: Callable[[], bool], deadline_ns: int
    ) -> int:
        """Until then or the deadline. How long offline work was let run, in ns."""
        total_ns = 0
        while not settled.is_set and (now_ns := self._clock.now_ns()) < deadline_ns:
            if self._let_ns and self._gating.may_let(gpus) and is_waited_for():
                await self._let(settled, gpus, min(deadline_ns, now_ns + self._let_ns))
                total_ns += self._clock.now_ns() - now_ns
                await until(settled, self._clock, min(deadline_ns, self._clock.now_ns() + self._let_ns))
            else:
                await until(settled, self._clock, min(deadline_ns, now_ns + LOOK_NS))
        return total_ns

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
