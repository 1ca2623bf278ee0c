"""Memory baselines as policies over the core's handles. Ours lives in ours.py, with the product's functions."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np
from valve_tools.sim.ours import take
from valve_tools.sim.world import HandleView, IntArray, MemoryPolicy

NS = 1_000_000_000
MINUTE_NS = 60 * NS


@dataclass(slots=True, kw_only=True)
class NoShare(MemoryPolicy):
    """Everything is online's from the start: the solo reference."""

    def begin(self, memory: HandleView) -> None:
        memory.take_free(memory.handles)


@dataclass(slots=True, kw_only=True)
class AllOffline(MemoryPolicy):
    """Everything is offline's: the job alone on the GPU."""

    online_elastic: bool = True

    def begin(self, memory: HandleView) -> None:
        memory.back_offline(memory.handles)


@dataclass(slots=True, kw_only=True)
class Prism(MemoryPolicy):
    """Sharing without reclaim (kvcached): both sides map free handles; online waits until offline lets go of some."""

    online_reserve: int
    """Handles that online has from the start and keeps mapped when they fall empty: kvcached holds at least ten pages
    of 2 MiB for K and V of every layer."""
    online_elastic: bool = True
    offline_elastic: bool = True

    def begin(self, memory: HandleView) -> None:
        memory.take_free(self.online_reserve)


@dataclass(slots=True, kw_only=True)
class Uvm(MemoryPolicy):
    """Managed memory: the driver moves offline pages to the host whenever online grows."""

    uvm: bool = True


@dataclass(slots=True, kw_only=True)
class StaticMem(MemoryPolicy):
    """Offline gets the least that was free in the past hour; a burst beyond it kills the job."""

    restart_ns: int
    """Weights from disk at 5 GB/s and 20 s of start-up."""
    first_hour_peak: int
    """Charity: it begins with the knowledge of an hour of this trace, else its first burst would always kill."""
    kill_ns: int = 10_000_000
    release_ns: int = 25_000
    window_minutes: int = 60
    _memory: HandleView = field(init=False)
    _peaks: deque[int] = field(init=False)
    _dead_until: int = 0

    def begin(self, memory: HandleView) -> None:
        self._peaks = deque(maxlen=self.window_minutes)
        self._memory = memory
        self._peaks.append(self.first_hour_peak)
        self._apply()
        memory.tick_at(MINUTE_NS)

    def on_tick(self, now_ns: int) -> None:
        self._peaks.append(self._memory.peak())
        if now_ns >= self._dead_until:
            self._apply()
        self._memory.tick_at(now_ns + MINUTE_NS)

    def on_pressure(self, now_ns: int, unmet_handles: int) -> None:
        memory = self._memory
        offline = memory.view().offline_backed
        if offline:
            memory.kill_offline(now_ns + self.restart_ns, self.kill_ns + offline * self.release_ns)
            self._dead_until = now_ns + self.restart_ns
        memory.take_free(memory.handles)

    def _apply(self) -> None:
        """Online holds the past hour's peak, offline the rest; shrinking offline's share needs no kill here."""
        memory = self._memory
        view = memory.view()
        share = memory.handles - max(self._peaks)
        if view.offline_backed == 0:
            memory.give(view.online_backed)
            memory.back_offline(share)
        elif share > view.offline_backed:
            memory.give(share - view.offline_backed)
            memory.back_offline(share - view.offline_backed)
        memory.take_free(memory.handles)


@dataclass(slots=True, kw_only=True)
class FixedHeadroom(MemoryPolicy):
    """Online keeps what it uses and a fixed share of the pool on top, whatever that reclaims."""

    share: float
    pressure_ratio: float = 1.0
    _memory: HandleView = field(init=False)

    def begin(self, memory: HandleView) -> None:
        self._memory = memory
        memory.take_free(self._headroom)
        memory.back_offline(memory.handles)
        memory.tick_at(NS)

    def on_pressure(self, now_ns: int, unmet_handles: int) -> None:
        memory, view = self._memory, self._memory.view()
        wanted = min(view.online_busy + unmet_handles + self._headroom, memory.handles)
        unused = view.free + view.offline_backed - view.offline_busy
        if wanted - view.online_backed > unused:
            memory.reclaims.append(now_ns)
        take(memory, wanted - view.online_backed)

    def on_tick(self, now_ns: int) -> None:
        memory, view = self._memory, self._memory.view()
        memory.give(max(0, view.online_backed - view.online_busy - self._headroom))
        memory.back_offline(memory.handles)
        memory.tick_at(now_ns + NS)

    @property
    def _headroom(self) -> int:
        return max(1, round(self.share * self._memory.handles))


@dataclass(slots=True, kw_only=True)
class Clairvoyant(MemoryPolicy):
    """A clairvoyant reservation: in every second online holds the peak of the coming minute, seen in the solo run."""

    usage: IntArray
    hold: list[int] = field(default_factory=list)
    """Handles to hold in every second; empty: the peak of the coming `ahead_s`."""
    ahead_s: int = 60
    _memory: HandleView = field(init=False)

    def begin(self, memory: HandleView) -> None:
        self._memory = memory
        self.hold = self.hold or hold_ahead(self.usage, int(memory.world.seconds), self.ahead_s)
        self._apply(0)

    def on_tick(self, now_ns: int) -> None:
        self._apply(now_ns)

    def on_pressure(self, now_ns: int, unmet_handles: int) -> None:
        """The solo run and this one differ by a few blocks; the difference is taken at once."""
        take(self._memory, unmet_handles)

    def _apply(self, now_ns: int) -> None:
        memory = self._memory
        second = min(now_ns // NS, len(self.hold) - 1)
        view = memory.view()
        wanted = max(self.hold[second], view.online_busy)
        if wanted > view.online_backed:
            take(memory, wanted - view.online_backed)
        elif wanted < view.online_backed:
            memory.give(view.online_backed - wanted)
        memory.back_offline(memory.handles)
        memory.tick_at((now_ns // NS + 1) * NS)


def hold_ahead(usage: IntArray, seconds: int, ahead_s: int) -> list[int]:
    """For every second the largest use within the next `ahead_s`, one handle above it."""
    peak = _per_second(usage, seconds + ahead_s + 1)
    windows = np.lib.stride_tricks.sliding_window_view(peak, ahead_s + 1)
    hold: list[int] = (windows.max(axis=1)[: seconds + 1] + 1).tolist()
    return hold


def budget_plan(usage: IntArray, seconds: int, raises_per_hour: float, step_s: int = 20) -> list[int]:
    """The least memory online can hold, knowing the future, when it may raise its share so many times an hour."""
    steps = -(-seconds // step_s)
    peak = _per_second(usage, steps * step_s).reshape(steps, step_s).max(axis=1) + 1
    hold = cheapest_steps(peak, max(1, int(raises_per_hour * seconds / 3600)))
    return np.repeat(hold, step_s).tolist()  # type: ignore[no-any-return]


def cheapest_steps(peak: IntArray, segments: int) -> IntArray:
    """The least that covers these peaks in so many segments: within one it only falls, to the largest still to come.

    Dynamic programme: best[k][j] is the least sum of holdings up to step j with k segments.
    """
    steps = len(peak)
    cost = np.full((steps + 1, steps + 1), np.inf)
    for stop in range(1, steps + 1):
        falling = np.maximum.accumulate(peak[:stop][::-1])
        cost[:stop, stop] = np.cumsum(falling)[::-1]
    best = cost[0].copy()
    cuts = []
    for _ in range(min(segments, steps) - 1):
        total = best[:, None] + cost
        cuts.append(total.argmin(axis=0))
        best = np.minimum(best, total.min(axis=0))
    hold = np.empty(steps, dtype=np.int64)
    stop = steps
    for cut in [*reversed(cuts), np.zeros(steps + 1, dtype=np.int64)]:
        start = min(int(cut[stop]), stop)
        hold[start:stop] = np.maximum.accumulate(peak[start:stop][::-1])[::-1]
        stop = start
    return hold


def _per_second(usage: IntArray, seconds: int) -> IntArray:
    peak = np.zeros(seconds, dtype=np.int64)
    inside = usage[usage[:, 0] < seconds]
    np.maximum.at(peak, inside[:, 0], inside[:, 1])
    return peak
