"""Turns for tiles on a card: launched on a stream of low priority in a share of its processors, at most two in flight.

Needs no torch: the caller says how a tile finds its stream. No card has run it yet.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from valve_hook.cotrain.card.driver import CardDriver, CardRefused
from valve_hook.cotrain.card.flight import TilesInFlight, open_flight
from valve_hook.cotrain.card.shares import CardShare

from valve_tune.engine.turns import TileTurns
from valve_tune.tiles.grid import Phase

log = logging.getLogger("valve")
OnStream = Callable[[CardShare], AbstractContextManager[object]]


def nothing() -> None:
    """All that a call has to do is done."""


class CardTurns(TileTurns):
    """A tile's call ends when it is launched; its time is what the card says."""

    def __init__(
        self,
        flight: TilesInFlight[Phase],
        on_stream: OnStream,
        *,
        quiet_s: float,
        settle: Callable[[], object] = nothing,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`settle` waits for what the calling thread has launched outside tiles."""
        super().__init__(quiet_s=quiet_s, clock=clock)
        self._flight, self._on_stream, self._settle = flight, on_stream, settle
        self._wanted = 1.0
        self._landed: list[tuple[Phase, float]] = []

    def run(self, phase: Phase, ask: Callable[[], None], work: Callable[[], None]) -> None:
        self._hear(self._flight.ready(self._wanted))
        self._wanted = self.begin(phase, ask, ahead=len(self._flight))
        try:
            self._hear(self._flight.ready(self._wanted))  # waits where the share is another one
            self._flight.launch(phase, lambda share: self._launched(share, work))
        finally:
            landed, self._landed = self._landed, []
            self.end(phase, landed)

    def _launched(self, share: CardShare, work: Callable[[], None]) -> None:
        with self._on_stream(share):
            work()

    def settle(self) -> None:
        self._hear(self._flight.drain())
        self._settle()

    def close(self) -> None:
        try:
            self._flight.close()
        except CardRefused:
            log.exception("valve: the trainer's contexts and memory on the card stay until this process ends")

    def _hear(self, landed: list[tuple[Phase, float]]) -> None:
        self._landed += [(phase, ms / 1e3) for phase, ms in landed]


def open_card(
    on_stream: OnStream,
    *,
    quiet_s: float,
    stuck_s: float,
    reserve_mib: int,
    device: int = 0,
    settle: Callable[[], object] = nothing,
) -> tuple[CardTurns, Callable[[], AbstractContextManager[object]]]:
    """Once, when the engine starts. Also what is around the trainer's thread: its work outside tiles has the smallest
    share.
    """
    driver = CardDriver()
    flight = open_flight(driver, device=device, stuck_s=stuck_s, reserve_bytes=reserve_mib << 20)
    least = flight.shares.all[0]

    @contextmanager
    def inside() -> Iterator[None]:
        with driver.current(least.context), on_stream(least):
            yield

    return CardTurns(flight, on_stream, quiet_s=quiet_s, settle=settle), inside
