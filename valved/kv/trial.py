"""Tries in one process whether its memory can be taken from outside, before anything relies on it.

In the flow: kv/outside.py -> here. The process has passed some scratch memory. Its GPU is stopped as a reclaim would
stop it, and valved makes the scratch memory sparse. With the GPU open again the shim looks, on its own thread and in
the process's own context: it must read zero and take a write without harm, the memory beside it must be as it was, and
its own bytes must be back once it is mapped again. A context in which anything faulted answers with the driver's error.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import dataclass

from valved.abi.kv_link import KvHow
from valved.config import MemoryTable
from valved.kv.journey import Pause, until
from valved.kv.orders import Order, Orders
from valved.kv.slots import KvRangeBook
from valved.kv.turn import GateTurn
from valved.machine.clock import Clock
from valved.machine.ports import Door, SparseResult
from valved.model.ids import TrialOutcome
from valved.model.statuses import status_text

LOOK_NS = 100_000_000
WORDS = {
    errno.ENODATA: "the trial failed: memory that was taken did not read as zero",
    errno.EBADMSG: "the trial failed: the bytes were not the same when mapped again",
    errno.EFAULT: "the trial failed: memory beside the taken memory changed",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialResult:
    outcome: TrialOutcome
    reason: str = ""
    took_ns: int = 0  # of the driver's call


NOT_STOPPED = TrialResult(outcome=TrialOutcome.UNTRIED, reason="the GPU could not be stopped for the trial")
LEFT = TrialResult(outcome=TrialOutcome.UNTRIED, reason="it has left")


class Trials:
    """Carries out trials. What a trial waits for is bounded: a process that does not answer goes on cooperatively."""

    def __init__(self, orders: Orders, turn: GateTurn, clock: Clock, settings: MemoryTable) -> None:
        self._orders = orders
        self._turn = turn
        self._clock = clock
        self._order_ns = round(settings.order_s * 1e9)
        self._step_ns = round(settings.step_s * 1e9)

    async def attempt(self, door: Door, scratch: KvRangeBook, is_open: Callable[[], bool]) -> TrialResult:
        """The driver is called under a closed gate; looking at what came of it needs an open one."""
        made = await self._make_sparse(door, scratch, is_open)
        if isinstance(made, TrialResult):
            return made
        trial = self._orders.trial(scratch, KvHow.OUTSIDE)
        left_ns = self._step_ns
        while not trial.settled.is_set and left_ns > 0:
            was_open = not self._turn.is_stopped(scratch.gpu)
            await until(trial.settled, self._clock, self._clock.now_ns() + LOOK_NS)
            left_ns -= LOOK_NS if was_open else 0  # the copies that it looks by wait as long as offline work stands
        if not trial.settled.is_set:
            why = f"the shim has not answered the trial for {self._step_ns / 1e9:g} s"
            return TrialResult(outcome=TrialOutcome.HUNG, reason=why, took_ns=made.took_ns)
        return result_of(trial, made.took_ns)

    async def _make_sparse(
        self, door: Door, scratch: KvRangeBook, is_open: Callable[[], bool]
    ) -> SparseResult | TrialResult:
        ended = Pause()
        results: list[SparseResult] = []

        def then(result: SparseResult) -> None:
            results.append(result)
            ended.set()

        try:
            if not await self._turn.stop_for(scratch.gpu):
                return NOT_STOPPED
            if is_open():
                door.make_sparse([(scratch.base, scratch.handle_bytes)], then)
                await until(ended, self._clock, self._clock.now_ns() + self._order_ns)
        finally:
            self._turn.open()
        if not is_open():
            return LEFT
        if not results:
            why = f"making memory sparse took longer than {self._order_ns / 1e9:g} s"
            return TrialResult(outcome=TrialOutcome.HUNG, reason=why)
        if results[0].status:
            why = f"making memory sparse was refused: {status_text(results[0].status)}"
            return TrialResult(outcome=TrialOutcome.REFUSED, reason=why, took_ns=results[0].took_ns)
        return results[0]


def result_of(trial: Order, took_ns: int) -> TrialResult:
    """What the shim has found."""
    if not trial.status:
        return TrialResult(outcome=TrialOutcome.PASSED, took_ns=took_ns)
    words = WORDS.get(trial.status)
    outcome = TrialOutcome.WRONG if words else TrialOutcome.REFUSED
    return TrialResult(outcome=outcome, reason=words or f"the trial ended with error {trial.status}", took_ns=took_ns)
