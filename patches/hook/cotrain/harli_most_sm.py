"""HARLI with another choice: of the splits that keep the target, the one with most processors for the trainer."""

from __future__ import annotations

from .harli import Harli


class HarliMostSm(Harli):
    name = "harli_most_sm"

    def rank(self, ms: float, own: float, other: float) -> tuple[float, float]:
        return other, -ms
