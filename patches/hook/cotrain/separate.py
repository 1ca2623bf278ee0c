"""The trainer has a card of its own: what sharing is measured against."""

from __future__ import annotations

from .interface import ALONE, Plan, Planner, State, WhenIdle


class Separate(Planner):
    name = "separate"
    gpus = 2
    idle = WhenIdle.NOTHING

    def plan(self, state: State) -> Plan:
        return ALONE
