"""Memory baselines as policies over the core's handles. Ours lives in ours.py, with the product's functions."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

import numpy as np
from valve_tools.sim.ours import take
from valve_tools.sim.world import IntArray, Memory

NS = 1_000_000_000
MINUTE_NS = 60 * NS


@dataclass(slots=True, kw_only=True)
class NoShare:
    """Everything is online's from the start: the solo reference."""

    name: str = "none"
    online_elastic: bool = False
    online_reserve: int = 0
    offline_elastic: bool = False
    pressure_ratio: float = 0.0
    uvm: bool = False

    def begin(self, memory: Memory) -> None:
        memory.take_free(memory.handles)

    def on_pressure(self, now_ns: int, unmet_handles: int) -> None: ...

    def on_tick(self, now_ns: int) -> None: ...


@dataclass(slots=True, kw_only=True)
class AllOffline:
    """Everything is offline's: the job alone on the GPU."""

    name: str = "alone"
    online_elastic: bool = True
    online_reserve: int = 0
    offline_elastic: bool = False
    pressure_ratio: float = 0.0
    uvm: bool = False

    def begin(self, memory: Memory) -> None:
        memory.back_offline(memory.handles)

    def on_pressure(self, now_ns: int, unmet_handles: int) -> None: ...

    def on_tick(self, now_ns: int) -> None: ...


@dataclass(slots=True, kw_only=True)
class Prism:
    """Sharing without reclaim (kvcached): both sides map free handles; online waits until offline lets go of some."""

    online_reserve: int
    """Handles that each engine keeps mapped when they fall empty: kvcached holds ten pages of 2 MiB for K and V of
    every layer."""
    name: str = "prism"
    online_elastic: bool = True
    offline_elastic: bool = True
    pressure_ratio: float = 0.0
    uvm: bool = False

    def begin(self, memory: Memory) -> None:
        memory.take_free(self.online_reserve)

    def on_pressure(self, now_ns: int, unmet_handles: int) -> None: ...

    def on_tick(self, now_ns: int) -> None: ...


@dataclass(slots=True, kw_only=True)
class Uvm:
    """Managed memory: the driver moves offline pages to the host whenever online grows."""

    name: str = "uvm"
    online_elastic: bool = False
    online_reserve: int = 0
    offline_elastic: bool = False
    pressure_ratio: float = 0.0
    uvm: bool = True

    def begin(self, memory: Memory) -> None: ...

    def on_pressure(self, now_ns: int, unmet_handles: int) -> None: ...

    def on_tick(self, now_ns: int) -> None: ...


@dataclass(slots=True, kw_only=True)
class StaticMem:
    """Offline gets the least that was free in the past hour; a burst beyond it kills the job."""

    restart_ns: int
    """Weights from disk at 5 GB/s and 20 s of start-up."""
    first_hour_peak: int
    """Charity: it begins with the knowledge of an hour of this trace, else its first burst would always kill."""
    name: str = "static"
    online_elastic: bool = False
    online_reserve: int = 0
    offline_elastic: bool = False
    pressure_ratio: float = 0.0
    uvm: bool = False
    kill_ns: int = 10_000_000
    release_ns: int = 25_000
    _memory: Memory = field(init=False)
    _peaks: deque[int] = field(default_factory=lambda: deque(maxlen=60))
    _dead_until: int = 0

    def begin(self, memory: Memory) -> None:
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
class RecentPeak:
    """A candidate for the product, kept here to be compared: hold what was used at most within a horizon.

    MIAD on the horizon instead of on the headroom: a reclaim above the target doubles it, a calm minute shortens it.
    What no request used for a whole horizon goes back at once, an eighth of the surplus a second.
    """

    target_per_hour: float
    pressure_ratio: float = 0.9
    grow: float = 1.25
    """A take reaches this far beyond what is needed: a burst is climbed in few steps."""
    least_handles: int = 2
    name: str = "recent peak"
    online_elastic: bool = False
    online_reserve: int = 0
    offline_elastic: bool = False
    uvm: bool = False
    _memory: Memory = field(init=False)
    _minutes: deque[int] = field(default_factory=lambda: deque([0], maxlen=61))
    """Peak of each of the last minutes."""
    _reclaims: deque[int] = field(default_factory=deque)
    _horizon_min: float = 10.0
    _adjusted_ns: int = 0
    _minute: int = 0

    def begin(self, memory: Memory) -> None:
        self._memory = memory
        memory.take_free(self.least_handles)
        memory.back_offline(memory.handles)
        memory.tick_at(NS)

    def on_pressure(self, now_ns: int, unmet_handles: int) -> None:
        memory, view = self._memory, self._memory.view()
        needed = view.online_busy + unmet_handles
        self._note(now_ns, needed)
        wanted = max(self._level(needed), math.ceil(needed * self.grow), self._level(self._peak()))
        short = min(wanted, memory.handles) - view.online_backed
        if short <= 0:
            return
        unused = view.free + view.offline_backed - view.offline_busy
        take(memory, short)
        if short <= unused:
            return
        memory.reclaims.append(now_ns)
        self._reclaims.append(now_ns)
        if len(self._reclaims) > self.target_per_hour and now_ns - self._adjusted_ns >= MINUTE_NS:
            self._horizon_min = min(2 * self._horizon_min, 60.0)
            self._adjusted_ns = now_ns

    def on_tick(self, now_ns: int) -> None:
        memory = self._memory
        self._note(now_ns, memory.peak())
        if len(self._reclaims) < self.target_per_hour and now_ns - self._adjusted_ns >= MINUTE_NS:
            self._horizon_min = max(self._horizon_min - 1.0, 1.0)
            self._adjusted_ns = now_ns
        surplus = memory.view().online_backed - self._level(self._peak())
        if surplus > 0:
            memory.give(math.ceil(surplus / 8))
            memory.back_offline(memory.handles)
        memory.tick_at(now_ns + NS)

    def _level(self, used: int) -> int:
        """The least mapping at which `used` is no pressure."""
        return max(math.floor(used / self.pressure_ratio) + 1, used + self.least_handles)

    def _peak(self) -> int:
        return max(list(self._minutes)[-int(self._horizon_min) - 1 :])

    def _note(self, now_ns: int, used: int) -> None:
        while self._minute < now_ns // MINUTE_NS:
            self._minutes.append(0)
            self._minute += 1
        self._minutes[-1] = max(self._minutes[-1], used)
        while self._reclaims and self._reclaims[0] <= now_ns - 60 * MINUTE_NS:
            self._reclaims.popleft()


@dataclass(slots=True, kw_only=True)
class Plan:
    """A clairvoyant reservation: in every second online holds the peak of the coming minute, seen in the solo run."""

    usage: IntArray
    hold: list[int] = field(default_factory=list)
    """Handles to hold in every second; empty: the peak of the coming `ahead_s`."""
    name: str = "oracle"
    online_elastic: bool = False
    online_reserve: int = 0
    offline_elastic: bool = False
    pressure_ratio: float = 0.0
    uvm: bool = False
    ahead_s: int = 60
    _memory: Memory = field(init=False)

    def begin(self, memory: Memory) -> None:
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
    """The least memory online can hold, knowing the future, when it may raise its share so many times an hour.

    Between two raises the share only falls, to the largest use still to come before the next raise. Dynamic programme
    over steps of `step_s`: best[k][j] is the least sum of holdings up to step j with k segments.
    """
    steps = -(-seconds // step_s)
    peak = _per_second(usage, steps * step_s).reshape(steps, step_s).max(axis=1) + 1
    segments = max(1, int(raises_per_hour * seconds / 3600))
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
    return np.repeat(hold, step_s).tolist()  # type: ignore[no-any-return]


def _per_second(usage: IntArray, seconds: int) -> IntArray:
    peak = np.zeros(seconds, dtype=np.int64)
    inside = usage[usage[:, 0] < seconds]
    np.maximum.at(peak, inside[:, 0], inside[:, 1])
    return peak
