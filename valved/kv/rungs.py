"""What each way of taking memory asks of the engines that share a GPU, and what it costs online requests.

`sparse` and `helper` stop offline work for a millisecond: memory is taken when it is needed. `cooperative` waits for
the end of an offline step: memory is taken ahead of need (`cooperative_ratio`), and the steps of engines that are asked
so are short (`offline_step_ms`), by the limit that the engine has for its tokens (step_tokens in the table).
"""

from __future__ import annotations

from dataclasses import replace

from valved.config import MemoryTable
from valved.kv.books import KvBooks
from valved.kv.engines import Engine
from valved.kv.ways import Ways
from valved.model.ids import Remap, Role
from valved.policy.reservation import ReservationSettings


class Rungs:
    def __init__(self, books: KvBooks, ways: Ways, settings: MemoryTable) -> None:
        self._books = books
        self._ways = ways
        self._ratio = settings.cooperative_ratio
        self._step_tokens = step_tokens(settings)

    def heed(self) -> None:
        """Ask engines for short steps if memory is taken between their steps, beside an online engine."""
        online = self._books.engines_with(Role.ONLINE)
        for engine in self._books.engines_with(Role.OFFLINE):
            is_shared = any(not engine.gpus.isdisjoint(other.gpus) for other in online)
            is_asked = is_shared and self._ways.way_of([engine]) is Remap.COOPERATIVE
            engine.table.set_step_tokens(self._step_tokens if is_asked else 0)

    def settings(self, engine: Engine, usual: ReservationSettings) -> ReservationSettings:
        """How early memory is taken for this online engine: as the slowest way of those beside it wants it."""
        beside = [
            other
            for other in self._books.engines_with(Role.OFFLINE)
            if not engine.gpus.isdisjoint(other.gpus) and other.can_lose
        ]
        if not beside or self._ways.way_of(beside) is not Remap.COOPERATIVE:
            return usual
        return replace(usual, pressure_ratio=min(usual.pressure_ratio, self._ratio))


def step_tokens(settings: MemoryTable) -> int:
    """Tokens that an offline engine computes in such a step, by what a token costs; 0: no limit."""
    return round(settings.offline_step_ms * 1e6 / max(1, settings.token_ns))
