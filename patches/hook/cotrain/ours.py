"""Ours in the engine: of all ways the one that does most within what the readers' credit allows.

The target is one of requests and not of steps: credit saved in a fast step is spent in a slow one, and what a prompt
took is paid back before anything is trained. A reserve, learnt from missed targets, is kept for the next prompt. A plan
whose added time buys less than 60 % of what the whole card would do in it is left out: greedy planners pay a fixed cost
for nothing.
"""

from __future__ import annotations

from dataclasses import replace

from ..policy.credits import Credits
from ..policy.misses import MissSettings, TimeReserve
from .flexllm_greedy import plans_of
from .interface import ALONE, Direction, Goal, Lane, Plan, Planner, State
from .predictor import PlanPredictor
from .splits import SPLITS, TimeWorth

FLOOR = 0.6
WAITED = 0.5
"""Of the target for the first token; a request that has waited longer gets steps without training rows."""
STEADY, LESS = 0.7, 0.1
"""Of the target: a cycle no longer than that gives every reader credit, so the reserve does not hold it back. A missed
target takes LESS of it; what a kept one gives back is such that one in 200 may miss."""
RESERVE_FLOOR = 0.5
"""The least reserve, in prefill bursts. Granted time begins lower: it knows what requests needed."""
LEAST_MS = 2.0
"""A plan must be able to add so much; below it decode runs alone."""
REMEMBERED = 4096
PAUSED_MS = 500.0
"""Longer is no cycle: nobody was served."""


def _lengths(ms: float, limit_ms: float) -> tuple[float, ...]:
    """Of a cycle with a step of `ms`: without a pause, and with the longest."""
    if limit_ms - ms >= LEAST_MS:
        return ms, limit_ms
    return (ms,) if ms <= limit_ms else ()


class Ours(Planner):
    name = "ours"
    needs_engine = True

    def __init__(
        self,
        goal: Goal,
        predictor: PlanPredictor,
        *,
        lanes: frozenset[Lane] = frozenset({Lane.PARTITION}),
        same_base: bool = False,
    ) -> None:
        self._goal = goal
        self._predictor = predictor
        self._credits = Credits(goal.step_ms)
        self._misses = MissSettings(floor=RESERVE_FLOOR)
        self._reserve = TimeReserve(self._misses)
        self._steady = STEADY
        self._burst_ms = 0.0
        self._cycle_ms = 0.0
        self._last_ms = 0.0
        self._waits: dict[int, float] = {}
        """Since when, by request without a token, the oldest first."""
        self._chosen: dict[tuple[int, ...], Plan] = {}
        self._lanes = lanes
        self._tiles = bool(lanes & {Lane.FUSED, Lane.STREAM})
        self.same_base = same_base
        self.copies = 1 if same_base else 2

    def plan(self, state: State) -> Plan:
        if not state.is_ready:
            return ALONE
        credit_ms = self._credits.least_due_ms() - state.now_ms
        free_ms = max(credit_ms - self._reserve.ms, min(credit_ms, self._steady * self._goal.step_ms))
        limit_ms = min(free_ms, self._goal.gap_ms) / (1.0 + self._predictor.late)
        if state.prompt_tokens or state.waiting or not state.running:
            return self._beside_prompt(state, limit_ms)
        key = (
            int(limit_ms),
            state.running.bit_length() * 16 + (state.running >> max(0, state.running.bit_length() - 3)),
            state.context >> 10,
            int(16 * state.resident),
            int(self._tiles and state.direction is Direction.FORWARD),
            int(8 * state.left / (state.tokens * self._predictor.laws.layers)) if self._tiles else 0,
        )
        found = self._chosen.get(key)
        if found is None:
            if len(self._chosen) >= REMEMBERED:
                self._chosen.clear()
            found = self._chosen[key] = self._choose(state, limit_ms)
        return found

    def _beside_prompt(self, state: State, limit_ms: float) -> Plan:
        """Rows and tiles beside a prompt, while whoever waits for it has time; it is never paused for."""
        waited_ms = state.now_ms - next(iter(self._waits.values()), state.now_ms)
        if not self._tiles or waited_ms > WAITED * self._goal.ttft_ms or self._goal.ttft_ms == float("inf"):
            return ALONE
        alone_ms = self._predictor.ms(state, ALONE)
        full = state.tokens / self._predictor.table.layer_ms(state.tokens)
        most, found = 0.0, ALONE
        for plan in self._tile_plans(state):
            ms, work = self._predictor.tiles(state, plan)
            if ms <= limit_ms and work > most and work >= FLOOR * full * (ms - alone_ms):
                most, found = work, plan
        return found

    def _choose(self, state: State, limit_ms: float) -> Plan:
        predictor = self._predictor
        alone_ms = predictor.ms(state, ALONE)
        if limit_ms < alone_ms + LEAST_MS:
            return self._free(state, limit_ms)
        worth = self._worth(state, alone_ms)
        most, cycle_ms, step_ms, found = worth.tiles(limit_ms, alone_ms, 0.0), limit_ms, alone_ms, Plan(Lane.PAUSE)
        if Lane.PARTITION in self._lanes:
            for plan, ms in zip(SPLITS, predictor.splits_ms(state), strict=True):
                for length_ms in _lengths(ms, limit_ms):
                    gain = worth.split(length_ms, ms, plan.other)
                    if gain > most:
                        most, cycle_ms, step_ms, found = gain, length_ms, ms, plan
        for plan in self._tile_plans(state):
            ms, work = predictor.tiles(state, plan)
            for length_ms in _lengths(ms, limit_ms):
                gain = worth.tiles(length_ms, ms, work)
                if gain > most:
                    most, cycle_ms, step_ms, found = gain, length_ms, ms, plan
        return replace(found, pause_ms=cycle_ms - step_ms)

    def _tile_plans(self, state: State) -> list[Plan]:
        if not self._tiles:
            return []
        return [one for one in plans_of(state, self._predictor.laws.layers) if one.lane in self._lanes]

    def _worth(self, state: State, alone_ms: float) -> TimeWorth:
        laws = self._predictor.laws
        return TimeWorth(
            tokens=state.tokens,
            layer_ms=self._predictor.table.layer_ms(state.tokens),
            copy_ms=laws.trained.copy_ms,
            resident=state.resident,
            cache_layers=state.cache_layers if self.copies > 1 else 0.0,
            cycle_ms=self._cycle_ms,
            alone_ms=alone_ms,
            floor=FLOOR,
        )

    def _free(self, state: State, limit_ms: float) -> Plan:
        """No time to give: the split that leaves decode most processors, if it keeps the limit."""
        if Lane.PARTITION not in self._lanes:
            return ALONE
        kept = [plan for plan, ms in zip(SPLITS, self._predictor.splits_ms(state), strict=True) if ms <= limit_ms]
        return min(kept, key=lambda plan: plan.own) if kept else ALONE

    def arrived(self, request: int, now_ms: float) -> None:
        self._waits[request] = now_ms

    def first_token(self, request: int, now_ms: float) -> None:
        self._waits.pop(request, None)
        self._credits.begin(request, now_ms)

    def delivered(self, now_ms: float) -> None:
        self._credits.delivered(now_ms)
        passed_ms, self._last_ms = now_ms - self._last_ms, now_ms
        if passed_ms < PAUSED_MS:
            self._cycle_ms += 0.05 * (passed_ms - self._cycle_ms)

    def finished(self, request: int, now_ms: float) -> None:
        self._waits.pop(request, None)
        served = self._credits.end(request, now_ms)
        if served is not None:
            self._reserve.finished(served.missed)
            share = self._misses.share
            back = -LESS if served.missed else LESS * share / (1.0 - share)
            self._steady = min(STEADY, max(0.0, self._steady + back))

    def stepped(self, state: State, plan: Plan, ms: float) -> None:
        self._predictor.observe(state, plan, ms)
        if state.prompt_tokens:
            alone = (
                1.0
                if plan is ALONE
                else self._predictor.laws.base_ms(state) / self._predictor.laws.step(state, plan)[0]
            )
            self._burst_ms += ms * alone if state.running else 0.0
        elif self._burst_ms:
            self._reserve.burst(self._burst_ms)
            self._burst_ms = 0.0
