"""Figures that clients report: cut to what is possible where they are read, so that no later sum of them fails."""

from __future__ import annotations

from collections.abc import Iterable

LARGEST = 1 << 48  # of a count that a client tells: a million tokens a second for nine years
LARGEST_SUM = (1 << 63) - 1  # what every signed and unsigned field of 64 bits holds
MOST_OPEN = 1 << 20  # requests of one process


def plausible(value: int, largest: int = LARGEST) -> int:
    return value if 0 <= value <= largest else min(max(value, 0), largest)


def total(values: Iterable[int]) -> int:
    """Their sum, or the largest that fits."""
    return min(sum(values), LARGEST_SUM)


def fits(said: object) -> bool:
    """Whether all numbers in it, as JSON has them, are such as a field of 64 bits holds: no float holds any larger."""
    if isinstance(said, dict):
        return all(map(fits, said.values()))
    if isinstance(said, list):
        return all(map(fits, said))
    return not isinstance(said, int) or abs(said) <= LARGEST_SUM
