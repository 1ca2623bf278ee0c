"""A sample in chunks of fixed length, each through all layers beside a decode step, forward and then backward.

The base is read twice for every chunk, and short chunks use a card badly; LLMStation's reading of FlexLLM.
"""

from __future__ import annotations

from .interface import ALONE, Goal, Lane, Plan, Planner, State
from .predictor import PlanPredictor


class Chunked(Planner):
    name = "chunked"
    needs_engine = True
    same_base = True
    copies = 1

    def __init__(self, goal: Goal, predictor: PlanPredictor, chunk: int = 128, margin: float = 0.0) -> None:
        self._goal_ms = goal.step_ms * (1.0 - margin)
        self._predictor = predictor
        self._chunk = chunk

    def plan(self, state: State) -> Plan:
        if state.prompt_tokens or not state.is_ready:
            return ALONE
        layers = self._predictor.laws.layers
        plan = Plan(Lane.STREAM, layers=layers, tokens=min(self._chunk, state.tokens))
        return plan if self._predictor.ms(state, plan) <= self._goal_ms else ALONE

    def stepped(self, state: State, plan: Plan, ms: float) -> None:
        self._predictor.observe(state, plan, ms)
