"""What missed targets teach: how much time to keep in reserve, and when to grant nothing at all."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from .recent import Recent


@dataclass(frozen=True, slots=True, kw_only=True)
class MissSettings:
    share: float = 0.005
    """The share of requests that may miss."""
    up_ms: float = 10.0
    """What the reserve grows by at a miss."""
    factor: float = 1.25
    """And by which factor on top."""
    floor: float = 0.5
    """The least reserve, in prefill bursts (p95)."""
    ceiling: float = 4.0
    """The largest, in prefill bursts (p95)."""
    window: int = 400
    """Finished requests over which misses are counted."""
    trial: int = 48
    """Requests in a row that must keep the target, served without a grant, before the first grant."""
    again: int = 200
    """The same after too many misses: 1 / share."""


class TimeReserve:
    """Time kept back for prompts that come while others are served. It tracks the (1 - share) quantile of need."""

    def __init__(self, settings: MissSettings) -> None:
        self._settings = settings
        self._bursts = Recent(0.95, size=256, every=16)
        self._ms = 0.0

    @property
    def ms(self) -> float:
        burst, rules = self._bursts.value, self._settings
        return min(max(self._ms, rules.floor * burst), rules.ceiling * burst)

    def burst(self, ms: float) -> None:
        """A prefill burst held up decoding requests by `ms`."""
        self._bursts.add(ms)

    def finished(self, missed: bool) -> None:
        rules = self._settings
        # From where it stands: a value far outside the bounds would need hundreds of requests to come back.
        held = self.ms
        if missed:
            self._ms = (held + rules.up_ms) * rules.factor
        else:
            self._ms = max(0.0, held - rules.up_ms * rules.share / (1.0 - rules.share))


class MissStop:
    """Stops granting while more than the allowed share misses; begins stopped, until the service alone has shown that
    it keeps its target."""

    def __init__(self, settings: MissSettings) -> None:
        self._settings = settings
        self._window: deque[bool] = deque(maxlen=settings.window)
        self._misses = 0
        self._clean = 0
        self._needed = settings.trial
        self.is_open = settings.trial == 0
        self.stops = 0

    def finished(self, missed: bool) -> None:
        if not self.is_open:
            self._clean = 0 if missed else self._clean + 1
            if self._clean >= self._needed:
                self._restart(is_open=True)
            return
        if len(self._window) == self._window.maxlen:
            self._misses -= self._window[0]
        self._window.append(missed)
        self._misses += missed
        if self._misses > self._settings.share * self._settings.window:
            self.stops += 1
            self._needed = self._settings.again
            self._restart(is_open=False)

    def _restart(self, *, is_open: bool) -> None:
        self.is_open = is_open
        self._window.clear()
        self._misses = self._clean = 0
