"""Does this driver stop the GPUs of one service side by side, or one after another?

Nothing in the driver says so, but the stops do. Two calls for two GPUs that are entered together end together where
each takes its own GPU's lock (the one-word patch of patches/driver), and one call apart where both want all locks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import median

SAMPLES = 9  # the middle of so many: a thread that starts late makes a sample wrong, now and then
LEAST = 3
TOGETHER = 0.25  # the second call is entered within this share of the first one, or the pair says nothing
APART = 0.5  # between "ends with it" (0) and "ends one call later" (1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """The calls that stopped one GPU: from the first one's entry to the last one's return."""

    service: int
    epoch: int  # of the service: the stops of one edge share it
    ioctl_ns: int
    done_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LockState:
    first: Stop | None = None  # of the latest edge
    is_paired: bool = False
    lags: tuple[float, ...] = ()  # from the end of the first call to that of the second, in first calls

    @property
    def is_per_gpu(self) -> bool | None:
        """None: too little was seen, as on a node whose services have one GPU each."""
        return median(self.lags) < APART if len(self.lags) >= LEAST else None


def step_locks(state: LockState, stop: Stop) -> LockState:
    """`stop`s come in the order in which they were done. The first two of an edge are a pair; the rest says no more."""
    first = state.first
    if first is None or (first.service, first.epoch) != (stop.service, stop.epoch):
        return LockState(first=stop, lags=state.lags)
    took_ns = first.done_ns - first.ioctl_ns
    if state.is_paired or took_ns <= 0 or abs(stop.ioctl_ns - first.ioctl_ns) > TOGETHER * took_ns:
        return replace(state, is_paired=True)
    lag = max(0, stop.done_ns - first.done_ns) / took_ns
    return replace(state, is_paired=True, lags=(*state.lags, lag)[-SAMPLES:])
