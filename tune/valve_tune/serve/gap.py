"""How long decoding stood still: one stream of our own at the service, watched before, during and after something."""

from __future__ import annotations

import itertools
import threading
import time
from dataclasses import dataclass
from types import TracebackType

from valve_tune.serve.engines import EngineError, RunningEngine

TOKENS = 192  # of one request; the next begins where it ends
PIECES = 30  # watched before, and at least after, so that both sides have a longest gap of their own
WAIT_S = 60.0
LEAST_SEEN = 0.5  # of the disturbance, inside answers: the longest gap of a sliver says nothing of the rest


@dataclass(frozen=True, slots=True, kw_only=True)
class Gaps:
    """The longest of each kind. None: there was none to measure, as most of it fell between two answers."""

    calm_ms: float | None
    disturbed_ms: float | None

    def words(self) -> str:
        return f"{_words(self.disturbed_ms)} while publishing, {_words(self.calm_ms)} before and after"


def _words(ms: float | None) -> str:
    return "not measured" if ms is None else f"{ms:.1f} ms"


class GapProbe:
    """`with` it around what may disturb. Gaps are between pieces of one answer, never between two requests."""

    def __init__(self, engine: RunningEngine) -> None:
        self._engine = engine
        self._pieces: list[list[float]] = [[]]
        self._count = threading.Condition()
        self._is_over = False
        self.error = ""
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._span = (0.0, 0.0)

    def __enter__(self) -> GapProbe:
        self._thread.start()
        self._see(PIECES)
        self._span = (time.monotonic(), float("inf"))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._span = (self._span[0], time.monotonic())
        if kind is None:  # for as long as it was disturbed: of more gaps the longest is longer
            during = sum(self._span[0] < each < self._span[1] for pieces in list(self._pieces) for each in list(pieces))
            self._see(max(PIECES, during))
        self._is_over = True
        self._thread.join(WAIT_S)

    def _watch(self) -> None:
        try:
            while not self._is_over:
                for when in self._engine.stream(TOKENS):
                    with self._count:
                        self._pieces[-1].append(when)
                        self._count.notify_all()
                    if self._is_over:
                        break
                self._pieces.append([])
        except (EngineError, OSError, ValueError) as error:
            self.error = str(error)
        with self._count:
            self._is_over = True
            self._count.notify_all()

    def _see(self, more: int) -> None:
        with self._count:
            wanted = sum(map(len, self._pieces)) + more
            self._count.wait_for(lambda: self._is_over or sum(map(len, self._pieces)) >= wanted, WAIT_S)

    def gaps(self) -> Gaps:
        """One that touches the disturbance counts as with it."""
        calm: list[float] = []
        disturbed: list[float] = []
        seen_s, (since, until) = 0.0, self._span
        for begin, end in itertools.chain.from_iterable(map(itertools.pairwise, self._pieces)):
            is_in = end > since and begin < until
            (disturbed if is_in else calm).append((end - begin) * 1e3)
            seen_s += max(0.0, min(end, until) - max(begin, since))
        if seen_s < LEAST_SEEN * (until - since):
            disturbed.clear()
        return Gaps(calm_ms=max(calm, default=None), disturbed_ms=max(disturbed, default=None))
