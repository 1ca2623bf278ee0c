"""How far the use of memory returns to its mean, learned second by second over about half an hour.

Above a use that is high for the moment a service needs less room than above one that is low, if its load stays what it
is. The slope says how much less: that of the highest use of the next `LOOK_AHEAD` seconds over the use now. It is 1
where use stays what it has become, as between the phases of a bursty load, and then nothing is changed.
"""

from __future__ import annotations

from dataclasses import replace

from valved.model.memory import UseHistory

SECOND_NS = 1_000_000_000
LOOK_AHEAD = 30
"""Seconds. With 15 as with 45 offline work keeps a point less memory on a heavy load (docs/policies.md)."""
KEPT = 1 - 1 / 1800
"""What is left of a second's weight after the next one."""
LEARNED = 600.0
"""Seconds of weight before the slope counts."""


def note(history: UseHistory, used: int, now_ns: int) -> UseHistory:
    """`used` handles were in use since the last call, at most."""
    if not 0 < history.noted_ns <= now_ns:
        return replace(history, noted_ns=now_ns)
    seconds = (now_ns - history.noted_ns) // SECOND_NS
    if not seconds:
        return history
    sums, recent = history.sums, history.recent
    for _ in range(min(seconds, LOOK_AHEAD)):
        recent = (*recent, used)
        if len(recent) > LOOK_AHEAD:
            now, recent = recent[0], recent[1:]
            sums = _added(sums, now, max(recent), KEPT, 1.0)
    alike = seconds - LOOK_AHEAD
    if alike > 0:
        kept = KEPT**alike
        sums = _added(sums, used, used, kept, (1 - kept) / (1 - KEPT))
    return UseHistory(noted_ns=history.noted_ns + seconds * SECOND_NS, recent=recent, sums=sums)


def expected(history: UseHistory, used: int) -> float:
    """Where a use of so much is heading: between it and the mean. With room on top, what a service should keep."""
    weight, now, peak, squares, products = history.sums
    if weight < LEARNED:
        return float(used)
    mean = now / weight
    variance = squares / weight - mean * mean
    if variance < 1e-6:
        return float(used)
    slope = min(1.0, max(0.0, (products / weight - mean * peak / weight) / variance))
    return used + (1 - slope) * (mean - used)


def _added(
    sums: tuple[float, float, float, float, float], now: int, peak: int, kept: float, weight: float
) -> tuple[float, float, float, float, float]:
    old = [kept * one for one in sums]
    new = (1.0, now, peak, now * now, now * peak)
    first, second, third, fourth, fifth = (a + weight * b for a, b in zip(old, new, strict=True))
    return first, second, third, fourth, fifth
