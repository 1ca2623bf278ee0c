"""The two ways by which granted time is given, and what the second one needs before a node may take it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Rung(Enum):
    GATE = "gate"
    TIMESLICE = "timeslice"


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceSettings:
    rung: Rung = Rung.GATE
    slice_us: int = 500
    probed_driver: str = ""

    def refusal(self, driver: str) -> str:
        """Why the timeslice rung is not to be had on this node; empty: it may be, or it was not asked for."""
        if self.rung is Rung.GATE or self.probed_driver == driver:
            return ""
        probed = f"driver {self.probed_driver}" if self.probed_driver else "no driver"
        return f"timeslice refused: granted.probed_driver names {probed}, this is {driver or 'none'}"
