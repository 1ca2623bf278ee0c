"""A fixed split of the card, whatever the load: two processes under fixed shares."""

from __future__ import annotations

from .interface import Lane, Plan, Planner, State


class StaticShare(Planner):
    name = "static_share"

    def __init__(self, own: float = 0.6) -> None:
        self._plan = Plan(Lane.PARTITION, own=own, other=1.0 - own)
        self._stalled = Plan(Lane.PARTITION, own=own)
        self.share = self._plan.other

    def plan(self, state: State) -> Plan:
        return self._plan if state.is_ready else self._stalled
