"""The trainer is an offline process: it runs while no request is there, and is stopped from outside."""

from __future__ import annotations

from .interface import ALONE, Plan, Planner, State, WhenIdle


class Idle(Planner):
    name = "idle"
    idle = WhenIdle.STOPPED

    def plan(self, state: State) -> Plan:
        return ALONE
