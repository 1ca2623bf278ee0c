"""How many replicas should be awake: the least number whose predicted P95 is within the fill of the target.

More are asked for at once, fewer only after the need was lower for a while, and then by one at a time: a replica that
sleeps comes back late. Never below the operator's floor, never above what there is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import log

from valve_router.plan.profile import Law

LATE = 0.05  # of the requests: P95


@dataclass(frozen=True, slots=True, kw_only=True)
class ActiveSettings:
    floor: int = 1
    hold_s: float = 300.0  # so long the need must be lower before one goes to sleep
    fill: float = 0.5  # of the target, as `pack` fills
    target_factor: float = 5.0

    def __post_init__(self) -> None:
        if self.floor < 1 or self.hold_s < 0:
            raise ValueError("--least-replicas: at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """Requests of late: how many a second, and their lengths."""

    per_s: float
    tokens: Sequence[int]
    law: Law
    stages: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Active:
    """The advice, and what it stands on."""

    wanted: int
    p95_s: float  # predicted with so many
    lower_since_s: float | None = None  # since when fewer would have done


def predicted_p95_s(demand: Demand, replicas: int) -> float:
    """Of a request's first token, if requests come at random and are spread over so many lines of stages.

    Waiting of one line by Pollaczek and Khinchine, its tail as an exponential; the longest stage is every stage.
    """
    if not demand.tokens:
        return 0.0
    costs = sorted(
        demand.law.fixed_s + one * (demand.law.per_token_s + demand.law.per_square_s * one) for one in demand.tokens
    )
    mean = sum(costs) / len(costs)
    square = sum(one * one for one in costs) / len(costs)
    busy = demand.per_s * mean / replicas
    if busy >= 1:
        return float("inf")
    wait_s = demand.per_s / replicas * square / (2 * (1 - busy))
    long_s = costs[min(len(costs) - 1, int((1 - LATE) * len(costs)))]
    # Of those that wait at all (`busy` of them) the waits fall off as exp(-t busy / mean wait).
    waits95 = wait_s / busy * log(busy / LATE) if busy > LATE else 0.0
    return demand.stages * long_s + waits95


def needed(demand: Demand, there: int, settings: ActiveSettings) -> int:
    """Without a memory."""
    if not demand.tokens or demand.per_s <= 0:
        return min(settings.floor, there)
    mean = sum(
        demand.law.fixed_s + one * (demand.law.per_token_s + demand.law.per_square_s * one) for one in demand.tokens
    ) / len(demand.tokens)
    longest = predicted_p95_s(replace(demand, per_s=0.0), 1)
    # A target is a multiple of each request's own time: of the mean one, and never less than a long one takes alone.
    limit_s = max(settings.fill * settings.target_factor * demand.stages * mean, 1.1 * longest)
    for count in range(min(settings.floor, there), there + 1):
        if predicted_p95_s(demand, max(1, count)) <= limit_s:
            return count
    return there


def advise(before: Active | None, demand: Demand, there: int, now_s: float, settings: ActiveSettings) -> Active:
    """`there`: replicas that could be awake."""
    if there < 1:
        return Active(wanted=0, p95_s=0.0)
    need = needed(demand, there, settings)
    held = min(there, before.wanted) if before is not None else there
    held = max(held, min(settings.floor, there))
    if need >= held:
        return Active(wanted=need, p95_s=predicted_p95_s(demand, need))
    since = before.lower_since_s if before is not None and before.lower_since_s is not None else now_s
    if now_s - since >= settings.hold_s:
        return Active(wanted=held - 1, p95_s=predicted_p95_s(demand, held - 1), lower_since_s=now_s)
    return Active(wanted=held, p95_s=predicted_p95_s(demand, held), lower_since_s=since)
