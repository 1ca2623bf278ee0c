"""What valved does by itself, now and then: nothing here is in a hurry, and nothing waits for it."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Iterable

from valved.gate.wake import GateService
from valved.kv.reserve import Reserve
from valved.machine.cards import CardReader
from valved.machine.ports import GatePort
from valved.node.brake import Brake
from valved.node.handover import Handover
from valved.state.saved import RunFolder

log = logging.getLogger("valved")

TICK_S = 2.0  # lost stamps, leftovers, unfinished frozen processes
SAVE_EVERY_TICKS = 30
CARDS_S = 1.0
CANCEL_AGAIN_S = 1.0
AGAIN_S = 1.0  # after a failure
SETTLE_S, SETTLE_LOOK_S = 1.0, 0.001
EXIT_FAILED = 1


class Upkeep:
    def __init__(
        self,
        gate: GatePort,
        keeper: GateService,
        handover: Handover,
        brake: Brake,
        folder: RunFolder,
        *,
        has_watch: bool,
    ) -> None:
        self._gate = gate
        self._keeper = keeper
        self._handover = handover
        self._brake = brake
        self._folder = folder
        self._has_watch = has_watch  # the pause file is seen without looking

    async def run(self) -> None:
        ticks = 0
        while True:
            await asyncio.sleep(TICK_S)
            ticks += 1
            if not self._folder.is_ours():
                await self._end_unreachable()
            self._keeper.resync()
            self._handover.settle(patience_over=True)
            if not self._has_watch:
                self._brake.look_at_file()
            if ticks % SAVE_EVERY_TICKS == 0:
                self._handover.save()

    async def _end_unreachable(self) -> None:
        """Nobody finds us any more, and another valved may gate these GPUs soon: hand over and be gone.

        At once: whatever ends in good order removes sockets by their names, and those are our successor's.
        """
        self._brake.hand_over()
        await settled(self._gate)
        log.error("failed", extra={"facts": {"error": "the run folder was removed"}})
        os._exit(EXIT_FAILED)


async def settled(gate: GatePort) -> None:
    """Until no stop is under way; a driver call that hangs is not waited for."""
    looks = round(SETTLE_S / SETTLE_LOOK_S)
    while gate.is_turning() and looks > 0:
        looks -= 1
        await asyncio.sleep(SETTLE_LOOK_S)


async def keep_going(name: str, make: Callable[[], Awaitable[None]], tell: Callable[[str], None]) -> None:
    """Run this for as long as valved lives: what fails is told and begun anew, for a task that died without a word takes
    everything with it that it did.
    """
    while True:
        try:
            await make()
            return
        except Exception as error:  # a defect, or a machine in trouble: neither ends the rest
            log.exception("task failed", extra={"facts": {"task": name}})
            tell(f"{name} failed and begins anew: {type(error).__name__}: {error}")
            await asyncio.sleep(AGAIN_S)


async def end(tasks: Iterable[asyncio.Task[None]]) -> None:
    """Cancel until all are done: before Python 3.12 wait_for swallows a cancellation that meets its answer."""
    pending = set(tasks)
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=CANCEL_AGAIN_S)


async def read_cards(reserve: Reserve) -> None:
    """Free memory of the cards, while memory is managed. In a thread: NVML may take milliseconds."""
    reader = CardReader()
    try:
        while True:
            if reserve.is_in_use:
                reserve.see_cards(await asyncio.get_running_loop().run_in_executor(None, reader.look))
            await asyncio.sleep(CARDS_S)
    finally:
        reader.close()
