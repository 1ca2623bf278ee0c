"""GPreempt with pacing: an unmodified trainer, preempted by its time slice, in a pause before every step.

GPreempt brings the stop, and knows no target. The pacing beside it is the plain one: what a step leaves of the target
is the trainer's. It saves no credit, and keeps no reserve for prompts.
"""

from __future__ import annotations

from .interface import ALONE, Goal, Lane, Plan, Planner, State, WhenIdle
from .predictor import PlanPredictor


class GpreemptPaced(Planner):
    name = "gpreempt_paced"
    idle = WhenIdle.STOPPED

    def __init__(self, goal: Goal, predictor: PlanPredictor, margin: float = 0.0) -> None:
        self._goal_ms = goal.step_ms * (1.0 - margin)
        self._predictor = predictor

    def plan(self, state: State) -> Plan:
        if state.prompt_tokens or state.waiting or not state.is_ready or not state.running:
            return ALONE
        pause_ms = self._goal_ms - self._predictor.ms(state, ALONE)
        return Plan(Lane.PAUSE, pause_ms=pause_ms) if pause_ms > 0 else ALONE

    def stepped(self, state: State, plan: Plan, ms: float) -> None:
        self._predictor.observe(state, plan, ms)
