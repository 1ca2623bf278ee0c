"""What HARLI's two planners share: the two-stage predictor, and a plan that holds until it would miss the target."""

from __future__ import annotations

from abc import abstractmethod

from ..policy.step_model import StepModel
from .interface import ALONE, Goal, Lane, Plan, Planner, State

SHARES = tuple(tenths / 10 for tenths in range(1, 11))
PAIRS = tuple((own, other) for own in SHARES for other in SHARES if own + other <= 1.0 + 1e-9)
"""45: what HARLI profiles and chooses from."""


class Harli(Planner):
    """Two copies of any two bases, a window over the frozen layers, one process."""

    needs_engine = True

    def __init__(self, goal: Goal, model: StepModel, margin: float = 0.0) -> None:
        self._goal_ms = goal.step_ms * (1.0 - margin)
        self._model = model
        self._held: Plan | None = None

    def plan(self, state: State) -> Plan:
        if state.prompt_tokens or not state.is_ready or not state.running:
            return ALONE
        held = self._held
        if held is None or not self._keeps(state, held.own, held.other):
            self._held = held = self._best(state)
        return held or ALONE

    def _ms(self, state: State, own: float, other: float) -> float:
        return self._model.predict(state.running, state.context, own, other).ms

    def _keeps(self, state: State, own: float, other: float) -> bool:
        return self._ms(state, own, other) <= self._goal_ms

    def _best(self, state: State) -> Plan | None:
        said = [(self._ms(state, own, other), own, other) for own, other in PAIRS]
        kept = [one for one in said if one[0] <= self._goal_ms]
        if not kept:
            return None
        _, own, other = max(kept, key=lambda one: self.rank(*one))
        return Plan(Lane.PARTITION, own=own, other=other)

    @abstractmethod
    def rank(self, ms: float, own: float, other: float) -> tuple[float, float]:
        """The larger, the better."""

    def stepped(self, state: State, plan: Plan, ms: float) -> None:
        if not state.prompt_tokens and plan.lane is Lane.PARTITION:
            self._model.observe(state.running, state.context, ms, plan.own, plan.other)
