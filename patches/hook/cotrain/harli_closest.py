"""HARLI as written: of the splits that keep the target, the one whose step is nearest to it."""

from __future__ import annotations

from .harli import Harli


class HarliClosest(Harli):
    name = "harli_closest"

    def rank(self, ms: float, own: float, other: float) -> tuple[float, float]:
        return ms, other
