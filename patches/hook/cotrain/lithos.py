"""LithOS-like: an unmodified trainer on processors that the service does not need, taken back between short kernels.

From its description, not its code. No target: the service keeps the fewest processors on which a step takes at most
`slip` times as long (1.1, its own), and has all of them while a prompt is computed.
"""

from __future__ import annotations

from .interface import ALONE, Plan, Planner, State, WhenIdle
from .predictor import PlanPredictor
from .splits import SPLITS


class Lithos(Planner):
    name = "lithos"
    idle = WhenIdle.STOPPED

    def __init__(self, predictor: PlanPredictor, slip: float = 1.1) -> None:
        self._predictor = predictor
        self._slip = slip

    def plan(self, state: State) -> Plan:
        if state.prompt_tokens or not state.is_ready or not state.running:
            return ALONE
        most_ms = self._slip * self._predictor.ms(state, ALONE)
        said = zip(SPLITS, self._predictor.splits_ms(state), strict=True)
        return next((plan for plan, ms in said if ms <= most_ms), ALONE)

    def stepped(self, state: State, plan: Plan, ms: float) -> None:
        self._predictor.observe(state, plan, ms)
