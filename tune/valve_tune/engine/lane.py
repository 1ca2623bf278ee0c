"""Around each step of an engine's worker: what it will do is told to the planner, and the plan is carried out.

Whatever fails in here parks the job; the step is made all the same. The engine waits for the pause that was planned,
and for nothing else of the trainer's.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from valve_hook.cotrain.interface import ALONE, Lane, Plan, Planner, State

from valve_tune.engine.planners import LANES
from valve_tune.engine.tenant import Tenant
from valve_tune.engine.watched import TileProgress

log = logging.getLogger("valve")
ANY = 1 << 30
"""Tiles: as many as fit beside a step. Two are in flight, so the step's end bounds them."""


class StepView:
    """A planner's state from what vLLM's scheduler sends to its worker. Requests get numbers of their own."""

    def __init__(self) -> None:
        self.state = State()
        self._prompts: dict[str, int] = {}
        """Prompt tokens of each request that lives."""
        self._numbers: dict[str, int] = {}
        self._next = 0
        self._reading: set[str] = set()

    def scheduled(self, output: Any, now_ms: float, planner: Planner) -> None:
        for name in output.finished_req_ids:
            self._prompts.pop(name, None)
            self._reading.discard(name)
            if (number := self._numbers.pop(name, None)) is not None:
                planner.finished(number, now_ms)
        computed = {}
        for new in output.scheduled_new_reqs:
            self._prompts[new.req_id] = len(new.prompt_token_ids or ())
            self._numbers[new.req_id] = self._next
            planner.arrived(self._next, now_ms)
            self._next += 1
            computed[new.req_id] = new.num_computed_tokens
        cached = output.scheduled_cached_reqs
        computed |= zip(cached.req_ids, cached.num_computed_tokens, strict=True)
        state = self.state
        state.now_ms, state.running, state.context = now_ms, 0, 0
        state.prompt_tokens, state.prompt_pairs = 0, 0.0
        self._to_read = []
        for name, tokens in output.num_scheduled_tokens.items():
            there = computed[name]
            if there + tokens >= self._prompts[name]:
                self._to_read.append(name)
            if tokens == 1 and there >= self._prompts[name]:
                state.running += 1
                state.context += there
            else:
                state.prompt_tokens += tokens
                state.prompt_pairs += tokens * (there + tokens / 2)

    def delivered(self, now_ms: float, planner: Planner) -> None:
        if self._reading:
            planner.delivered(now_ms)
        for name in self._to_read:
            if name not in self._reading and name in self._numbers:
                self._reading.add(name)
                planner.first_token(self._numbers[name], now_ms)


class TrainingLane:
    """`before` and `after` each step of the worker, in its thread."""

    def __init__(
        self,
        tenant: Tenant,
        planner: Planner,
        *,
        lanes: frozenset[Lane] = LANES,
        clock: Callable[[], float] = time.monotonic,
        hear: Callable[[State, Plan, float], None] = lambda state, plan, ms: None,
    ) -> None:
        self.tenant, self.planner, self.view = tenant, planner, StepView()
        self._lanes, self._clock, self._hear = lanes, clock, hear
        self._plan = ALONE
        self._began = 0.0
        self._is_open = False

    def before(self, output: Any) -> None:
        self._guard(lambda: self._before(output))

    def after(self) -> None:
        self._guard(self._after)

    def _guard(self, action: Callable[[], None]) -> None:
        if self.tenant.is_over:
            return
        try:
            action()
        except Exception as error:
            log.exception("valve: the lane of a trainer failed")
            self.tenant.park(f"the lane failed: {type(error).__name__}: {error}")

    def _before(self, output: Any) -> None:
        self.view.scheduled(output, self._clock() * 1e3, self.planner)
        self._is_open = output.total_num_scheduled_tokens > 0
        if not self._is_open:
            return
        turns, progress, state = self.tenant.turns, self.tenant.progress, self.view.state
        state.direction, state.left, state.tokens = progress.direction, progress.left, progress.tokens
        state.is_ready = progress.tokens > 0 and turns.wants()
        plan = self.planner.plan(state) if state.is_ready else ALONE
        if plan.lane not in self._lanes:
            raise ValueError(f"there is no lane {plan.lane.value} here")
        if plan.pause_ms > 0:
            turns.pause(plan.pause_ms / 1e3)
        turns.step(*_beside(plan, progress))
        self._plan, self._began = plan, self._clock()

    def _after(self) -> None:
        if not self._is_open:
            return
        self._is_open = False
        self.tenant.turns.stepped()
        now = self._clock()
        state, ms = self.view.state, (now - self._began) * 1e3
        if ms > 0:
            self.planner.stepped(state, self._plan, ms)
            self._hear(state, self._plan, ms)
        self.view.delivered(now * 1e3, self.planner)


def _beside(plan: Plan, progress: TileProgress) -> tuple[int, float]:
    """(tiles beside the step, the share of a card they run on)"""
    if plan.lane is Lane.PARTITION:
        return ANY, plan.other
    return (progress.tiles(plan.layers, plan.tokens) if plan.lane is Lane.STREAM else 0), 1.0
