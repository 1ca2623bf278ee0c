"""Figures that live on: a latency histogram, time accounts of a GPU, and the node's counters."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

from valved.model.states import HistogramState

# Upper bounds in us. The promise is 1 ms (P1) and 50 us for our own share, so the resolution is around those.
BOUNDS_US = (5, 10, 20, 35, 50, 75, 100, 150, 200, 300, 400, 500, 650, 800, 1000, 1500, 2000, 5000, 10000, 100000)
# A reclaim that waits for the next step of an engine takes seconds, and is given up after `step_s` (30 s).
RECLAIM_BOUNDS_US = (*BOUNDS_US, *(round(1e6 * seconds) for seconds in (0.2, 0.5, 1, 2, 5, 10, 30, 60)))


@dataclass(slots=True)
class Histogram:
    """Counts per bound, the last one beyond every bound."""

    bounds_us: tuple[int, ...] = BOUNDS_US
    counts: list[int] = field(init=False)
    sum_ns: int = 0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds_us) + 1)

    def add(self, value_ns: int) -> None:
        self.counts[bisect_left(self.bounds_us, value_ns / 1000)] += 1
        self.sum_ns += value_ns

    @property
    def total(self) -> int:
        return sum(self.counts)

    def state(self) -> HistogramState:
        bounds = tuple(map(float, self.bounds_us))
        return HistogramState(bound_us=bounds, count=tuple(self.counts), sum_us=self.sum_ns / 1e3)


@dataclass(slots=True)
class GpuAccount:
    """Time of one GPU, split by whether offline work is there and whether it may run.

    `open_ns` runs whether offline work is there or not: two readings of it tell how long an offline job, which came
    and went between them, was allowed to run. `left_ns` is the time that online services left: standing holds (the
    brake, the guard, a move of memory) do not count against it.
    """

    channels: int = 0  # offline compute channels known
    holders: set[int] = field(default_factory=set)
    standing: frozenset[int] = frozenset()  # holders that are no online service
    harvest_ns: int = 0
    gated_ns: int = 0
    open_ns: int = 0
    left_ns: int = 0
    gates: int = 0  # preemptions by a launch
    latency: Histogram = field(default_factory=Histogram)
    since_ns: int = 0

    def advance(self, now_ns: int) -> None:
        """Book the time since the last change. Stamps may lie a little in the past: time never runs backwards."""
        elapsed_ns = now_ns - self.since_ns
        if elapsed_ns <= 0:
            return
        self.since_ns = now_ns
        if self.holders <= self.standing:
            self.left_ns += elapsed_ns
        if self.holders:
            self.gated_ns += elapsed_ns if self.channels else 0
        else:
            self.open_ns += elapsed_ns
            self.harvest_ns += elapsed_ns if self.channels else 0

    def hold(self, service: int, at_ns: int) -> None:
        """One more holder changes what the time is booked as only where no service holds."""
        if service not in self.holders:
            if self.holders <= self.standing:
                self.advance(at_ns)
            self.holders.add(service)

    def release(self, service: int, at_ns: int) -> None:
        if service in self.holders:
            self.holders.remove(service)
            if self.holders <= self.standing:
                self.holders.add(service)  # until now
                self.advance(at_ns)
                self.holders.remove(service)

    def set_channels(self, channels: int, at_ns: int) -> None:
        self.advance(at_ns)
        self.channels = channels


@dataclass(slots=True)
class MemoryCounters:
    """Counts of KV memory that survive restarts."""

    reclaims: int = 0
    reclaims_short: int = 0  # that gave less than was missing
    reclaimed_handles: int = 0
    lent_handles: int = 0
    remade_handles: int = 0  # free ones of another trust domain that were given back to the driver and made anew
    returned_handles: int = 0
    full: int = 0  # orders to make handles for which the driver had less than the card said
    late_orders: int = 0
    demotions: int = 0  # processes whose memory is not taken in the way that the setting names
    lost_tokens: int = 0  # told by engines that have left
    trials_passed: int = 0  # processes whose memory may be taken from outside
    trials_failed: int = 0
    lets: int = 0  # times an offline step was let end beside a waiting request
    lets_again: int = 0  # of those, for a reclaim that had been let before: its step was not as short as asked
    let_ns: int = 0


@dataclass(slots=True)
class NodeCounters:
    """Counts that survive restarts. Names are those of message Counters in node.proto."""

    gates: int = 0
    wakes: int = 0
    wake_refused: int = 0
    gate_failures: int = 0
    clients: int = 0  # welcomed in all
    refused: int = 0
    malformed: int = 0
    refusals: dict[str, int] = field(default_factory=dict)
    restarts: int = 0
    channels_enabled_on_exit: int = 0
    stamps_lost: int = 0  # records of stops and wakes that a full ring did not take

    def refuse(self, why: str) -> None:
        self.refused += 1
        self.refusals[why] = self.refusals.get(why, 0) + 1
