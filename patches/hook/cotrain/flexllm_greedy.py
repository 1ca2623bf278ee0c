"""FlexLLM: as many training tokens in the batch as keep the step within target; backward by layers on a second stream.

Greedy, as published: the largest size that fits, whatever the first token costs.
"""

from __future__ import annotations

from .interface import ALONE, Direction, Goal, Lane, Plan, Planner, State
from .predictor import PlanPredictor

SPANS = (8, 16, 24, 40, 56, 88, 120, 184, 248, 376, 504, 760, 1016)
LAYERS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 80)


def largest(predictor: PlanPredictor, state: State, plans: list[Plan], limit_ms: float) -> Plan:
    """The last of `plans`, in order of size, that is predicted to keep the limit."""
    found, low, high = ALONE, 0, len(plans)
    while low < high:
        middle = (low + high) // 2
        if predictor.ms(state, plans[middle]) <= limit_ms:
            found, low = plans[middle], middle + 1
        else:
            high = middle
    return found


def plans_of(state: State, layers: int) -> list[Plan]:
    """What FlexLLM chooses from: spans through all layers, or layers over the whole sequence."""
    if state.direction is Direction.FORWARD:
        left = max(1, round(state.left / layers))
        spans = [span for span in SPANS if span < left] + ([left] if left <= SPANS[-1] else [])
        return [Plan(Lane.FUSED, layers=layers, tokens=span) for span in spans]
    left = max(1, round(state.left / state.tokens))
    counts = [count for count in LAYERS if count < left] + [left]
    return [Plan(Lane.STREAM, layers=count, tokens=state.tokens) for count in counts]


class FlexllmGreedy(Planner):
    name = "flexllm_greedy"
    needs_engine = True
    same_base = True
    copies = 1

    def __init__(self, goal: Goal, predictor: PlanPredictor, margin: float = 0.0) -> None:
        self._goal_ms = goal.step_ms * (1.0 - margin)
        self._predictor = predictor

    def plan(self, state: State) -> Plan:
        if not state.is_ready:
            return ALONE
        return largest(self._predictor, state, plans_of(state, self._predictor.laws.layers), self._goal_ms)

    def stepped(self, state: State, plan: Plan, ms: float) -> None:
        self._predictor.observe(state, plan, ms)
