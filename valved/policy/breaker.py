"""Is Valve costing this online service too much? Then stop harvesting beside it for a while.

The measured delay of a service (launch to channels off, summed over its preemptions) is set against the time it held
its GPUs, over a sliding window made of two halves. Delay over held time bounds the lengthening of its requests: a
request lasts no longer than the hold it lies in. When the share exceeds the budget the breaker opens: the service
keeps its hold, so nothing can preempt it again, and rests. Each further trip soon after doubles the rest.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from valved.policy.cooldown import SECOND

MOST_TRIPS = 16  # no further one makes a rest longer


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakerSettings:
    budget_share: float = 0.05  # twice the mean TTFT bound of promise P5: below it the promise itself is judged
    least_gates: int = 50  # fewer preemptions say little about a share
    window_ns: int = 60 * SECOND
    rest_ns: int = 600 * SECOND
    rest_most: int = 6  # the rest grows to at most this many times rest_ns

    def __post_init__(self) -> None:
        if not self.budget_share > 0:
            raise ValueError("breaker budget_share must be greater than 0")
        if min(self.least_gates, self.window_ns, self.rest_ns, self.rest_most) <= 0:
            raise ValueError("breaker least_gates, window and rest must be greater than 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """Sums over a stretch of time."""

    delay_ns: int = 0
    held_ns: int = 0
    gates: int = 0

    def plus(self, other: Tally) -> Tally:
        return Tally(
            delay_ns=self.delay_ns + other.delay_ns,
            held_ns=self.held_ns + other.held_ns,
            gates=self.gates + other.gates,
        )

    def minus(self, other: Tally) -> Tally:
        return Tally(
            delay_ns=self.delay_ns - other.delay_ns,
            held_ns=self.held_ns - other.held_ns,
            gates=self.gates - other.gates,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakerState:
    since_ns: int  # start of the newer half window
    newer: Tally = Tally()
    older: Tally = Tally()
    trips: int = 0
    open_until_ns: int = 0  # 0: closed


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakerDecision:
    is_open: bool
    tripped: bool  # with this very observation
    share: float
    gates: int
    open_until_ns: int


def step_breaker(
    state: BreakerState, observation: Tally, now_ns: int, settings: BreakerSettings
) -> tuple[BreakerState, BreakerDecision]:
    """Add what happened since the last step and judge the window."""
    state = _forget(state, now_ns, settings)
    state = BreakerState(
        since_ns=state.since_ns,
        newer=state.newer.plus(observation),
        older=state.older,
        trips=state.trips,
        open_until_ns=state.open_until_ns,
    )
    whole = state.newer.plus(state.older)
    share = whole.delay_ns / whole.held_ns if whole.held_ns > 0 else 0.0
    is_open = now_ns < state.open_until_ns
    tripped = not is_open and whole.gates >= settings.least_gates and share > settings.budget_share
    if tripped:
        rest_ns = settings.rest_ns * min(1 << min(state.trips, MOST_TRIPS), settings.rest_most)
        state = BreakerState(since_ns=now_ns, trips=state.trips + 1, open_until_ns=now_ns + rest_ns)
    decision = BreakerDecision(
        is_open=is_open or tripped,
        tripped=tripped,
        share=share,
        gates=whole.gates,
        open_until_ns=state.open_until_ns if is_open or tripped else 0,
    )
    return state, decision


def resumed(open_until_ns: int, trips: int, now_ns: int, settings: BreakerSettings) -> BreakerState:
    """That of a predecessor. Whatever its file says: no rest is longer than the longest one that begins now."""
    latest_ns = now_ns + settings.rest_most * settings.rest_ns
    return BreakerState(
        since_ns=now_ns, trips=min(max(trips, 0), MOST_TRIPS), open_until_ns=min(max(open_until_ns, 0), latest_ns)
    )


def _forget(state: BreakerState, now_ns: int, settings: BreakerSettings) -> BreakerState:
    """Let the window slide by halves; a long time without a trip forgives the earlier ones."""
    half_ns = settings.window_ns // 2
    age_ns = now_ns - state.since_ns
    if age_ns < half_ns:
        return state
    older = state.newer if age_ns < 2 * half_ns else Tally()
    long_closed = now_ns - state.open_until_ns > settings.rest_most * settings.rest_ns
    trips = 0 if state.open_until_ns and long_closed else state.trips
    return replace(state, since_ns=now_ns, newer=Tally(), older=older, trips=trips)
