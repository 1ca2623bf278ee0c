"""How far each request is ahead of its target: the time until its next token is due.

    credit(r) = first(r) + pace * (tokens delivered after the first + 1) - now

One step usually gives every request one token, so all due times move together. They are kept as a common shift and a
base per request; a step costs the same for one request and for a thousand.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

PACE = 0.98
"""The share of the target that requests are paced at: what is left pays for rounding and for the last step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A finished request, as its reader saw it."""

    tokens: int
    """After the first."""
    tpot_ms: float
    missed: bool


@dataclass(slots=True)
class _Reader:
    base_ms: float
    first_ms: float
    steps: int
    """Steps of the books when it began."""
    corrected: int
    streamed: bool


class Credits:
    """The due times of all requests that have their first token."""

    def __init__(self, tpot_ms: float) -> None:
        self._tpot_ms = tpot_ms
        self._pace_ms = PACE * tpot_ms
        self._readers: dict[int, _Reader] = {}
        self._heap: list[tuple[float, int]] = []
        self._shift_ms = 0.0
        self._steps = 0
        self._last_ms = float("-inf")
        self._behind: dict[int, float] = {}
        self._streams = 0

    def __len__(self) -> int:
        return len(self._readers)

    def begin(self, request: int, now_ms: float, *, streamed: bool = True) -> None:
        """`request` got its first token."""
        self.drop(request)
        if now_ms > self._last_ms:
            # Whoever got no token in this step is told by nobody.
            for other, reader in self._readers.items():
                if reader.streamed:
                    self._behind.setdefault(other, self._last_ms)
            self._last_ms = now_ms
        base = now_ms + self._pace_ms - self._shift_ms
        self._readers[request] = _Reader(base, now_ms, self._steps, 0, streamed)
        self._streams += streamed
        heappush(self._heap, (base, request))

    def delivered(self, now_ms: float, skipped: Iterable[int] = (), extra: Mapping[int, int] | None = None) -> None:
        """Every request got a token; those of `skipped` none, those of `extra` so many more."""
        before_ms, self._last_ms = self._last_ms, now_ms
        self._steps += 1
        self._shift_ms += self._pace_ms
        if skipped or self._behind:
            self._lag(before_ms, skipped)
        if extra:
            for request, more in extra.items():
                self._correct(request, more)

    def _lag(self, before_ms: float, skipped: Iterable[int]) -> None:
        behind = self._behind
        self._behind = {}
        for request in skipped:
            reader = self._readers.get(request)
            if reader is not None:
                if reader.streamed:
                    self._behind[request] = behind.get(request, before_ms)
                self._correct(request, -1)

    def _correct(self, request: int, tokens: int) -> None:
        reader = self._readers.get(request)
        if reader is None:
            return
        reader.base_ms += tokens * self._pace_ms
        reader.corrected += tokens
        heappush(self._heap, (reader.base_ms, request))
        if len(self._heap) > 64 + 4 * len(self._readers):
            self._heap = [(one.base_ms, name) for name, one in self._readers.items()]
            heapify(self._heap)

    def end(self, request: int, now_ms: float) -> Served | None:
        """`request` got its last token; None where it had one token only, or was never begun."""
        reader = self._readers.get(request)
        self.drop(request)
        if reader is None:
            return None
        tokens = self._steps - reader.steps + reader.corrected
        if tokens <= 0:
            return None
        tpot_ms = (now_ms - reader.first_ms) / tokens
        return Served(tokens=tokens, tpot_ms=tpot_ms, missed=tpot_ms > self._tpot_ms)

    def drop(self, request: int) -> None:
        """`request` is gone, whatever it got."""
        reader = self._readers.pop(request, None)
        if reader is not None:
            self._streams -= reader.streamed
            self._behind.pop(request, None)

    def least_due_ms(self) -> float:
        """When the first of all next tokens is due; infinity where nobody waits for one."""
        heap, readers = self._heap, self._readers
        while heap:
            base, request = heap[0]
            reader = readers.get(request)
            if reader is not None and reader.base_ms == base:
                return base + self._shift_ms
            heappop(heap)
        return float("inf")

    def oldest_token_ms(self) -> float:
        """The time of the oldest latest token of any streamed answer; infinity where none is streamed."""
        if not self._streams:
            return float("inf")
        return min(self._behind.values()) if self._behind else self._last_ms
