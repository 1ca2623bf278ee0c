"""LLMStation: so many layers of forward fused into a decode step, or of backward beside it, as keep the target.

    N_d = layers of decode with training beside them <= slack / (l_d - l_d0), clamped to the model's layers
    N_p = N_d * l_d / l_p

Without the clamp the printed rule grows without bound where training does not slow decode.
"""

from __future__ import annotations

from .interface import ALONE, Direction, Goal, Lane, Plan, Planner, State
from .predictor import PlanPredictor


def planned(slack_ms: float, layers: int, alone_ms: float, beside_ms: float, unit_ms: float) -> int:
    """N_p for times of one layer: `alone_ms` (l_d0), `beside_ms` (l_d), `unit_ms` (l_p)."""
    room_ms = slack_ms - layers * alone_ms
    if room_ms <= 0:
        return 0
    decode = layers if beside_ms <= alone_ms else min(layers, int(room_ms / (beside_ms - alone_ms)))
    return int(decode * beside_ms / unit_ms)


class LlmStation(Planner):
    name = "llmstation"
    needs_engine = True
    same_base = True
    copies = 1

    def __init__(self, goal: Goal, predictor: PlanPredictor, margin: float = 0.0, *, fuses: bool = True) -> None:
        self._goal_ms = goal.step_ms * (1.0 - margin)
        self._predictor = predictor
        self._fuses = fuses

    def plan(self, state: State) -> Plan:
        if state.prompt_tokens or not state.is_ready or not state.running:
            return ALONE
        laws, layers = self._predictor.laws, self._predictor.laws.layers
        remaining = max(1, round(state.left / state.tokens))
        alone_ms = self._predictor.ms(state, ALONE)
        if state.direction is Direction.FORWARD and self._fuses:
            all_layers = Plan(Lane.FUSED, layers=layers, tokens=state.tokens)
            fused_ms = self._predictor.ms(state, all_layers) / layers
            count = planned(self._goal_ms, layers, alone_ms / layers, fused_ms, fused_ms)
            lane = Lane.FUSED
        else:
            unit_ms = laws.unit_ms(state.tokens, laws.beside)
            beside_ms = laws.stretch * alone_ms / layers
            count = planned(self._goal_ms - laws.stream_ms, layers, alone_ms / layers, beside_ms, unit_ms)
            lane = Lane.STREAM
        count = min(count, remaining)
        return Plan(lane, layers=count, tokens=state.tokens) if count > 0 else ALONE

    def stepped(self, state: State, plan: Plan, ms: float) -> None:
        self._predictor.observe(state, plan, ms)
