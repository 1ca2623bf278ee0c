"""One fixed partition while decode runs, all processors in the pause that credit pays for: HARLI's gain, one split."""

from __future__ import annotations

from ..policy.step_model import Source
from .interface import ALONE, Goal, Lane, Plan, Planner, State
from .predictor import PlanPredictor


class Race(Planner):
    name = "race"
    needs_engine = True

    def __init__(self, goal: Goal, predictor: PlanPredictor, own: float = 0.5, margin: float = 0.0) -> None:
        self._goal_ms = goal.step_ms * (1.0 - margin)
        self._predictor = predictor
        self._split = Plan(Lane.PARTITION, own=own, other=1.0 - own)

    def plan(self, state: State) -> Plan:
        if state.prompt_tokens or not state.is_ready or not state.running:
            return ALONE
        said = self._predictor.predict(state, self._split)
        pause_ms = self._goal_ms - said.ms if said.source is not Source.UNKNOWN else 0.0
        if pause_ms < 0:
            return ALONE
        split = self._split
        return Plan(Lane.PARTITION, own=split.own, other=split.other, pause_ms=pause_ms)

    def stepped(self, state: State, plan: Plan, ms: float) -> None:
        self._predictor.observe(state, plan, ms)
