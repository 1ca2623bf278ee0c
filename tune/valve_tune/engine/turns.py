"""Turns of trainer and engine inside one process: the engine's thread hands out time, the trainer's thread asks before
each tile.

The engine never waits for a tile longer than the plan says. A tile that is late runs on beside the step; one that
never ends costs the job its place, and the engine nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from valve_tune.tiles.grid import Phase

LOOK_S = 0.05
"""How often a trainer that waits for its turn asks whether it is still wanted."""
WEIGHT = 0.2
"""Of a new tile in the running mean."""
FORGET = 0.95
"""Of what a tile took, at each pause that was too short for it: one slow tile never ends training for good."""

GRACE_S = 0.002
"""A pause goes on so long without a trainer that wants a tile: it may be between two."""


@dataclass(slots=True)
class Count:
    tiles: int = 0
    in_pauses: int = 0
    beside: int = 0
    idle: int = 0
    late: int = 0
    """Began in a pause, and ran on when it was over."""


class TileTurns:
    """One trainer and one engine. `quiet_s` without a step is idleness: then tiles run freely."""

    def __init__(self, *, quiet_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.count = Count()
        self._quiet_s, self._clock = quiet_s, clock
        self._changed = threading.Condition()
        self._stopped = False
        self._stepping = False
        self._last_step = clock()
        self._until = 0.0
        """The pause ends then; 0: there is none."""
        self._spent = False
        """The next tile does not fit into what is left of the pause."""
        self._had = False
        """This pause had a tile."""
        self._tickets, self._share = 0, 1.0
        """Of the card, for tiles beside this step."""
        self._waiting = False
        """The trainer wants a tile now: it is not paused by its user, nor at its optimizer."""
        self._ended = 0.0
        """The last tile."""
        self._began = 0.0
        """The tile in work; 0: there is none."""
        self._took_s: dict[Phase, float] = {}

    # ---- the engine's thread ----

    def pause(self, seconds: float) -> float:
        """Let tiles run that fit, and return when no more fits or no job wants one; seconds that the engine waited."""
        with self._changed:
            began = self._clock()
            self._until, self._spent, self._had = began + seconds, False, False
            self._changed.notify_all()
            while not (self._stopped or (self._spent and not self._began)):
                now, is_away = self._clock(), not self._wants()
                if now >= self._until or (is_away and now - max(began, self._ended) >= GRACE_S):
                    break
                self._changed.wait(GRACE_S if is_away else self._until - now)
            if self._began:
                self.count.late += 1
            self._until = 0.0
            return self._clock() - began

    def wants(self) -> bool:
        """Is there a job to give time to?"""
        with self._changed:
            return self._wants()

    def _wants(self) -> bool:
        return self._waiting or self._began > 0

    def step(self, tickets: int = 0, share: float = 1.0) -> None:
        """A step begins, and so many tiles may run beside it, on that share of a card."""
        with self._changed:
            self._stepping, self._tickets, self._share = True, tickets, share
            self._changed.notify_all()

    def stepped(self) -> None:
        with self._changed:
            self._stepping, self._tickets, self._last_step = False, 0, self._clock()

    def stop(self) -> None:
        """No tile begins any more."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def running_s(self) -> float:
        """How long the tile in work has been at it."""
        with self._changed:
            return self._clock() - self._began if self._began else 0.0

    def tile_s(self, phase: Phase) -> float:
        return self._took_s.get(phase, 0.0)

    # ---- the trainer's thread ----

    def run(self, phase: Phase, ask: Callable[[], None], work: Callable[[], None]) -> None:
        """One tile, in its turn."""
        self.begin(phase, ask)
        try:
            work()
        finally:
            self.end(phase)

    def settle(self) -> None:
        """Before and after what is no tile: nothing of a tile is on its way any more."""

    def close(self) -> None:
        """The job is over."""

    def begin(self, phase: Phase, ask: Callable[[], None], ahead: int = 0) -> float:
        """Wait for the turn; the share of the card it is for. `ask` is called while it does not come, and raises to end
        the job. `ahead` tiles are on their way, and end first.
        """
        while True:
            with self._changed:
                self._waiting = True
                self._changed.notify_all()
                if not self._stopped and self._may(phase, 1 + ahead):
                    self._began, self._waiting = self._clock(), False
                    return self._share if self._stepping else 1.0
                if self._until and not self._spent:
                    self._spent = True
                    if not self._had:
                        self._took_s[phase] = self.tile_s(phase) * FORGET
                    self._changed.notify_all()
                self._changed.wait(LOOK_S)
                self._waiting = False
            ask()

    def _may(self, phase: Phase, tiles: int) -> bool:
        now, count = self._clock(), self.count
        if self._until:
            if now + tiles * self.tile_s(phase) > self._until:
                return False
            self._had = True
            count.in_pauses += 1
        elif self._stepping:
            if not self._tickets:
                return False
            self._tickets -= 1
            count.beside += 1
        elif now - self._last_step >= self._quiet_s:
            count.idle += 1
        else:
            return False
        return True

    def inside(self, ask: Callable[[], None]) -> None:
        """A question in the middle of a tile: a job that is paused there is no tile that hangs."""
        with self._changed:
            began, self._began = self._began, 0.0
            self._changed.notify_all()
        asked = self._clock()
        try:
            ask()
        finally:
            with self._changed:
                self._began = began + self._clock() - asked

    def end(self, phase: Phase, measured: Iterable[tuple[Phase, float]] | None = None) -> None:
        """What tiles took is `measured` (phase, seconds) where they end later than their calls do."""
        with self._changed:
            self._ended = self._clock()
            for of, took in [(phase, self._ended - self._began)] if measured is None else measured:
                before = self._took_s.get(of, took)
                self._took_s[of] = before + WEIGHT * (took - before)
            self._began = 0.0
            self.count.tiles += 1
            self._changed.notify_all()
