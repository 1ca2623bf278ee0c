"""Who the clients are: for closed loops and batches latency is throughput, and a pause costs them what it gives."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import Enum


class ClientKind(Enum):
    OPEN = "open"
    CLOSED_LOOP = "closed loop"
    BATCH = "batch"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientSettings:
    declared: ClientKind | None = None
    """What the owner says; it is believed."""
    answer_ms: float = 50.0
    """A request that comes so soon after another has ended is taken for its follower."""
    loop_share: float = 0.8
    """Of the latest requests; fewer followers come by chance."""
    batch_requests: int = 8
    batch_ms: float = 250.0
    """So many requests within this time come from one hand."""
    batch_share: float = 0.6
    latest: int = 128
    least: int = 32


class Clients:
    """Tells closed loops and batches from clients that come when they will."""

    def __init__(self, settings: ClientSettings) -> None:
        self._settings = settings
        self._arrivals: deque[float] = deque(maxlen=settings.batch_requests)
        self._followers: deque[bool] = deque(maxlen=settings.latest)
        self._batched: deque[bool] = deque(maxlen=settings.latest)
        self._ended_ms = float("-inf")
        self.kind = settings.declared or ClientKind.OPEN

    def arrived(self, now_ms: float) -> None:
        rules = self._settings
        if rules.declared is not None:
            return
        self._followers.append(now_ms - self._ended_ms <= rules.answer_ms)
        # One end is answered by one request: the second that comes is none of its own.
        self._ended_ms = float("-inf")
        self._arrivals.append(now_ms)
        full = len(self._arrivals) == rules.batch_requests
        self._batched.append(full and now_ms - self._arrivals[0] <= rules.batch_ms)
        self.kind = self._judged()

    def finished(self, now_ms: float) -> None:
        self._ended_ms = now_ms

    def _judged(self) -> ClientKind:
        rules, seen = self._settings, len(self._followers)
        if seen < rules.least:
            return ClientKind.OPEN
        if sum(self._batched) > rules.batch_share * seen:
            return ClientKind.BATCH
        if sum(self._followers) > rules.loop_share * seen:
            return ClientKind.CLOSED_LOOP
        return ClientKind.OPEN
