"""Work that valved does every few seconds: lost stamps, leftovers, the state file, the cards. Nothing waits for it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass

from valved.gate.wake import GateService
from valved.kv.service import KvService
from valved.machine.cards import CardReader, CardUse
from valved.machine.clock import Clock, Ticker, beat_of
from valved.machine.ports import GatePort, PromptPort
from valved.node.brake import Brake
from valved.node.bystanders import Bystanders
from valved.node.handover import Handover
from valved.state.saved import RunFolder

log = logging.getLogger("valved")

TICK_S = 2.0  # lost stamps, leftovers, unfinished frozen processes
SAVE_EVERY_TICKS = 30
CARDS_S = 1.0
CANCEL_AGAIN_S = 1.0
BEAT_NS = 500_000_000
LATE_S = 2.0 - BEAT_NS / 1e9  # main.LOOP_NS is counted from the beat before
TELL_S = 5.0
AGAIN_S = 1.0  # after a failure
WELL_S = 60.0  # one that ran so long before it failed again is told again
SETTLE_S, SETTLE_LOOK_S = 1.0, 0.001
EXIT_FAILED = 1


@dataclass(eq=False, repr=False)
class Upkeep:
    _gate: GatePort
    _gating: GateService
    _handover: Handover
    _brake: Brake
    _folder: RunFolder
    _files: PromptPort
    _: KW_ONLY
    has_watch: bool  # the pause file is seen without looking

    async def run(self) -> None:
        ticks = 0
        while True:
            await beat_of(TICK_S)
            ticks += 1
            if self.is_lost():
                await self._end_unreachable()
            is_minute = ticks % SAVE_EVERY_TICKS == 0
            with contextlib.ExitStack() as parts:  # from the last to the first: none stands still because one fails
                if is_minute:
                    parts.callback(self._handover.save)
                is_told = self.has_watch and not self._brake.is_unsure  # which tells once
                if not is_told or self._brake.unwritten():  # an order that no file took is tried again
                    parts.callback(self._brake.look_at_file)
                parts.callback(self._handover.settle, patience_over=True)
                parts.callback(self._gating.resync, is_thorough=is_minute)
                parts.callback(self._gating.listener.time_passed)

    def is_lost(self) -> bool:
        """Somebody removed the run folder. As long as its disk hangs nobody knows."""
        try:
            return not self._files.ask(self._folder.is_ours)
        except TimeoutError:
            return False

    async def _end_unreachable(self) -> None:
        """No command finds us any more, and another valved may gate these GPUs soon: hand over and end.

        At once: whatever ends in good order removes sockets by their names, and those are our successor's.
        """
        self._brake.hand_over()
        await leave_nobody_standing(self._gate, self._brake)
        log.error("failed", extra={"facts": {"error": "the run folder was removed"}})
        leave_at_once(EXIT_FAILED)


def leave_at_once(status: int) -> None:
    """Whatever ends in good order asks the disk of the run folder, and may wait for it without end."""
    logging.shutdown()  # else the last line stays in the queue
    os._exit(status)


async def settled(is_under_way: Callable[[], bool]) -> None:
    """Until no stop is under way, say; a driver call that hangs is not waited for."""
    looks = round(SETTLE_S / SETTLE_LOOK_S)
    while is_under_way() and looks > 0:
        looks -= 1
        await asyncio.sleep(SETTLE_LOOK_S)


async def leave_nobody_standing(gate: GatePort, brake: Brake) -> None:
    """Before valved ends, and after it handed over: whom it was about to kill it kills, and who stands it lets go. No
    successor is certain, and none is needed: who goes on launches nothing before a valved has taken it."""
    await settled(lambda: gate.is_turning() or bool(brake.ladder.to_end()))
    brake.ladder.let_all_go()
    await settled(brake.leaving.owes_signals)


class LoopBeat:
    """Says that the loop turns, from the loop itself: to the native gate, and now and then to the service manager.

    `late` hears of a pass that was far too long: every GPU was held meanwhile.
    """

    def __init__(
        self,
        clock: Clock,
        alive: Callable[[], None],
        tell: Callable[[], None],
        late: Callable[[str], None],
    ) -> None:
        self._clock = clock
        self._ticker = Ticker(clock, self.beat, on_beat=True)
        self._late = late
        self._due_s = clock.now_ns() / 1e9
        self._alive = alive
        self._tell = tell
        self._told_s = float("-inf")
        self._ticker.start(BEAT_NS)
        self.beat()

    def beat(self) -> None:
        self._alive()
        now_s = self._clock.now_ns() / 1e9
        late_s, self._due_s = now_s - self._due_s, now_s + BEAT_NS / 1e9
        if late_s > LATE_S:
            self._late(f"valved's loop was stuck for {late_s:.1f} s: every GPU was held meanwhile")
        if now_s - self._told_s >= TELL_S:
            self._told_s = now_s
            self._tell()

    def stop(self) -> None:
        self._ticker.stop()


async def keep_going(name: str, make: Callable[[], Awaitable[None]], tell: Callable[[str], None]) -> None:
    """Run this for as long as valved lives. What fails is told and begun anew: a task that died without a word takes
    everything with it that it did.
    """
    told = ""
    while True:
        began_s = time.monotonic()
        try:
            await make()
            return
        except Exception as error:  # a defect, or a machine in trouble: neither ends the rest
            text = f"{name} failed and begins anew: {type(error).__name__}: {error}"
            if text != told or time.monotonic() - began_s > WELL_S:
                told = text
                log.exception("task failed", extra={"facts": {"task": name}})
                tell(text)
            await asyncio.sleep(AGAIN_S)


async def end(tasks: Iterable[asyncio.Task[None]]) -> None:
    """Cancel until all are done: before Python 3.12 wait_for swallows a cancellation that meets its answer."""
    pending = set(tasks)
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=CANCEL_AGAIN_S)


async def read_cards(
    memory: KvService | None, guard: Bystanders | None, read: Callable[[], Awaitable[Mapping[bytes, CardUse]]]
) -> None:
    """What the cards say, once for all who need it, while one does."""
    beats = 0
    while True:
        is_due = memory is not None and (memory.is_in_use or memory.needs_cards(beats))
        if is_due or (guard is not None and guard.needs_cards(beats)):
            cards = await read()
            with contextlib.ExitStack() as parts:  # from the last to the first: neither goes without because one fails
                if memory is not None:
                    parts.callback(memory.see_cards, cards)
                if guard is not None:
                    parts.callback(guard.look, {uuid: card.by_pid for uuid, card in cards.items()})
        beats += 1
        await beat_of(CARDS_S)


async def keep_reading(memory: KvService | None, guard: Bystanders | None, reader: CardReader) -> None:
    """Begun anew with the same reader, which has a thread."""
    try:
        await read_cards(memory, guard, reader.read)
    finally:
        reader.leave()
