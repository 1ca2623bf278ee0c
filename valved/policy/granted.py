"""What granting would be worth to offline work, from what a node knows without a consent. Pure.

The formula is the hook's own (patches/hook/policy/worth.py). A node knows less: the shortest step must stand for what
no request adds to a step, and the prompts among the steps are not known. Both make this an upper bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log1p
from statistics import median

from valve_hook.policy.credits import PACE
from valve_hook.policy.worth import busy_share, grants_per_ms, worth

LEAST_STEPS = 16
MOST_BUSY = 0.999  # a service that never rests has no load that could be told from its time
LEAST_COSTS, MOST_COSTS = 5.0, 20.0  # a grant lasts so many times its cost
FAR = 2.0  # where no target is stated, twice the step


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """In ms. None: not known."""

    steps_ms: Sequence[float]
    busy: float | None  # share of time in which it held its GPUs
    cost_ms: float | None  # a stop and a wake
    tpot_ms: float = 0.0  # 0: not stated
    gap_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GrantWorth:
    """points: of a GPU, for each ms of tpot given. None: unknown."""

    points: float | None = None
    words: str = ""


def expected_worth(known: Known) -> GrantWorth:
    if not known.steps_ms:
        return GrantWorth(words="worth unknown: no engine's hook reports its steps")
    if len(known.steps_ms) < LEAST_STEPS:
        return GrantWorth(words=f"worth unknown: {len(known.steps_ms)} of {LEAST_STEPS} steps seen")
    if known.busy is None or known.cost_ms is None:
        return GrantWorth(words=f"worth unknown: no {'stop' if known.cost_ms is None else 'time'} was measured yet")
    step_ms, busy = median(known.steps_ms), min(known.busy, MOST_BUSY)
    target_ms = known.tpot_ms or FAR * step_ms
    given_ms = PACE * target_ms - step_ms
    if given_ms <= 0:
        return GrantWorth(
            points=0.0, words=f"worth nothing: a step takes {step_ms:.3g} ms, the target is {target_ms:g} ms"
        )
    points = 100.0 * _share(known, step_ms, busy, PACE * target_ms, known.cost_ms) / given_ms
    return GrantWorth(
        points=points,
        words=f"worth at most {points:.2g} points of a GPU per ms of tpot given, up to a target of {target_ms:.3g} ms"
        f" (steps of {step_ms:.3g} ms, busy {busy:.0%})",
    )


def _share(known: Known, step_ms: float, busy: float, paced_ms: float, cost_ms: float) -> float:
    room_ms = known.gap_ms - step_ms
    if room_ms <= 0 or room_ms < LEAST_COSTS * cost_ms:
        return 0.0
    length_ms = max(LEAST_COSTS * cost_ms, min(MOST_COSTS * cost_ms, room_ms)) or room_ms
    steps = -log1p(-busy)  # that are asked for in the time of one: requests x tokens x step
    load = steps / step_ms
    gain = worth(
        fixed_ms=min(known.steps_ms),
        natural_ms=step_ms,
        paced_ms=paced_ms,
        requests_per_ms=load,
        tokens=1.0,
        cost_ms=cost_ms,
        grants_a_ms=grants_per_ms(step_ms, paced_ms, length_ms, busy_share(paced_ms, load, 1.0)),
    )
    return max(0.0, gain)
