"""Granted time: the same offline process as `idle`, also in pauses that the service's credit pays for.

The policy is the node's own (policy/granting.py); a pause lies before the step that is planned.
"""

from __future__ import annotations

from ..policy.granting import EngineFacts, GrantPolicy
from .interface import ALONE, Lane, Plan, Planner, State, WhenIdle


class Granted(Planner):
    name = "granted"
    idle = WhenIdle.STOPPED

    def __init__(self, policy: GrantPolicy, facts: EngineFacts) -> None:
        self._policy = policy
        self._facts = facts

    def plan(self, state: State) -> Plan:
        facts = self._facts
        facts.running, facts.waiting = state.running, state.waiting
        facts.prefilling = int(state.prompt_tokens > 0)
        facts.context_tokens = facts.kv_used = state.context
        if not state.running:
            return ALONE
        decision = self._policy.decide(state.now_ms, facts)
        return Plan(Lane.PAUSE, pause_ms=decision.grant_ms) if decision.grant_ms > 0 else ALONE

    def arrived(self, request: int, now_ms: float) -> None:
        self._policy.arrived(request, now_ms)

    def first_token(self, request: int, now_ms: float) -> None:
        self._policy.first_token(request, now_ms)

    def delivered(self, now_ms: float) -> None:
        self._policy.delivered(now_ms)

    def finished(self, request: int, now_ms: float) -> None:
        self._policy.finished(request, now_ms)

    def stepped(self, state: State, plan: Plan, ms: float) -> None:
        self._policy.stepped(state.running, state.context, ms, 0.0, prefill=state.prompt_tokens > 0)
