"""One engine with a trainer beside it, in virtual time: before every step a planner says what is trained, and how.

Continuous batching, decodes first, prompts in chunks; a step's time comes from the machine's laws with 2 % noise, and a
log-normal host gap. With prompts made elsewhere (HARLI) a request arrives with its context. Times are in ms.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray
from valve_hook.cotrain.interface import Direction, Lane, Plan, Planner, State, WhenIdle
from valve_tools.lab.cotrain.machines import USABLE, Machine
from valve_tools.lab.granted.engine import Load

Floats = NDArray[np.float64]
DRAWS = 1 << 14
GAP_MEDIAN_MS, GAP_SIGMA, GAP_MOST_MS = 0.5, 0.9898, 20.0
NOISE, NOISE_MOST = 0.02, 0.08
STOP_MS, WAKE_MS, AFTER_MS = 0.25, 0.25, 0.5
"""Of a stop from outside: C = 1 ms in all."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What does not depend on who plans."""

    micro_tokens: int = 1024
    update_ms: float = 10.0
    """The optimizer's step after each micro-batch's backward, divided by accumulation."""
    prompt_budget: int = 2048
    max_seqs: int = 256
    prompts_elsewhere: bool = False
    memory_share: float = 1.0
    """Of the card, where it is split for good; else all of it is shared."""


@dataclass(slots=True)
class Outcome:
    first_ms: Floats
    end_ms: Floats
    duration_ms: float = 0.0
    units: float = 0.0
    """Token-layers trained."""
    tokens_s: float = 0.0
    steps_ms: list[float] = field(default_factory=list)
    """Decode steps without a prompt."""
    busy_ms: float = 0.0
    refused: int = 0
    least_resident: float = 1.0
    lanes: dict[Lane, float] = field(default_factory=dict)
    """Units by lane."""


class Memory:
    """The card's memory: what is always there, the KV cache, and the frozen layers in what is left."""

    def __init__(self, machine: Machine, planner: Planner, setting: Setting) -> None:
        job, share = machine.job_base, setting.memory_share
        whole = USABLE * machine.card.memory * machine.cards
        training = machine.training_bytes(setting.micro_tokens)
        self._has_window = planner.copies > 1 and planner.gpus == 1
        self._layers_bytes = 2 * job.layer_params * job.layers
        self._kv_bytes = machine.base.kv_bytes
        if planner.copies > 1:
            training += job.other_bytes
        usable = whole * share - machine.base.weights
        self._fixed = whole * (1.0 - share) - training if share < 1.0 else None
        if planner.gpus == 1 and share == 1.0:
            usable -= training
        self.pool = max(usable, 0.0) / machine.base.kv_bytes
        """KV tokens."""
        self.per_token = machine.base.kv_bytes / self._layers_bytes

    def resident(self, held: int) -> float:
        """The share of frozen layers on the card beside `held` KV tokens."""
        if not self._has_window:
            return 1.0
        free = self._fixed if self._fixed is not None else (self.pool - held) * self._kv_bytes
        return min(1.0, max(0.0, free / self._layers_bytes))


class Engine:
    """A run of one load under one planner. `job_base` is the size of the trained base where it is another one."""

    def __init__(
        self, load: Load, machine: Machine, planner: Planner, setting: Setting, seed: int = 1, start_ms: float = 0.0
    ) -> None:
        self._start_ms = start_ms
        self._load, self._machine, self._planner, self._setting = load, machine, planner, setting
        rng = np.random.default_rng(seed)
        drawn = GAP_MEDIAN_MS * np.exp(GAP_SIGMA * rng.standard_normal(DRAWS))
        self._gaps = np.minimum(drawn, GAP_MOST_MS).tolist()
        self._noise = (1.0 + np.clip(NOISE * rng.standard_normal(DRAWS), -NOISE_MOST, NOISE_MOST)).tolist()
        count = len(load.arrive_ms)
        self.outcome = Outcome(first_ms=np.full(count, np.nan), end_ms=np.full(count, np.nan))
        self._arrives = (*(start_ms + at for at in load.arrive_ms), float("inf"))
        self._state = State(
            now_ms=start_ms, tokens=setting.micro_tokens, left=float(setting.micro_tokens * machine.trained.layers)
        )
        self._next = 0
        self._steps = 0
        self._queue: deque[int] = deque()
        self._prompts: dict[int, int] = {}
        self._ends: list[tuple[int, int]] = []
        self._held = 0
        self._memory = Memory(machine, planner, setting)
        self._last_split = Plan(Lane.ALONE)

    def run(self) -> Outcome:
        out, arrives, state = self.outcome, self._arrives, self._state
        while True:
            while arrives[self._next] <= state.now_ms:
                self._arrive(self._next)
                self._next += 1
            if not (self._ends or self._queue or self._prompts):
                if arrives[self._next] == float("inf"):
                    break
                self._idle(arrives[self._next])
                continue
            self._step()
        ended_ms = max(self._start_ms + self._load.duration_ms, state.now_ms)
        if ended_ms > state.now_ms and self._trains_idle:
            self._train(ended_ms - state.now_ms, Lane.PAUSE)
        ended_ms -= self._start_ms
        out.duration_ms = ended_ms
        out.tokens_s = out.units / (2 * self._machine.trained.layers) / (ended_ms / 1e3)
        return out

    @property
    def _trains_idle(self) -> bool:
        return self._planner.idle is not WhenIdle.NOTHING

    def _arrive(self, request: int) -> None:
        if self._load.prompt[request] + self._load.answer[request] > self._memory.pool:
            self.outcome.refused += 1
            return
        self._queue.append(request)
        self._planner.arrived(request, self._arrives[request])

    def _unit_ms(self, share: float) -> float:
        """One layer of the job."""
        return self._machine.unit_ms(self._setting.micro_tokens, share, self._memory.resident(self._held))

    def _train(self, ms: float, lane: Lane, share: float = 1.0) -> None:
        self._advance(ms / self._unit_ms(share) * self._setting.micro_tokens, lane)

    def _advance(self, units: float, lane: Lane) -> None:
        """Moves the job on by so many units. Backward ends with the optimizer's step, which trains nothing itself."""
        out, state = self.outcome, self._state
        whole = float(self._setting.micro_tokens * self._machine.trained.layers)
        update = self._setting.update_ms / self._unit_ms(1.0) * self._setting.micro_tokens
        trained = units * 2 * whole / (2 * whole + update)
        out.units += trained
        out.lanes[lane] = out.lanes.get(lane, 0.0) + trained
        left = units
        while left >= state.left:
            left -= state.left
            state.direction = Direction.BACKWARD if state.direction is Direction.FORWARD else Direction.FORWARD
            state.left = whole + update if state.direction is Direction.BACKWARD else whole
        state.left -= left

    def _idle(self, until_ms: float) -> None:
        state, planner = self._state, self._planner
        ms, late_ms = until_ms - state.now_ms, 0.0
        share = planner.share
        if planner.idle is WhenIdle.STOPPED:
            used = ms - WAKE_MS
            if used > 0:
                self._train(used, Lane.PAUSE)
                late_ms = STOP_MS + AFTER_MS
        elif planner.idle is WhenIdle.LAYER:
            unit_ms = self._unit_ms(share)
            late_ms = 0.0 if share < 1.0 else -ms % unit_ms
            self._train(ms + late_ms, Lane.PAUSE, share)
        elif planner.idle is WhenIdle.STEP:
            whole_ms = 2 * self._machine.trained.layers * self._unit_ms(share) + self._setting.update_ms
            late_ms = -ms % whole_ms
            self._train(ms + late_ms, Lane.PAUSE)
        state.now_ms = until_ms + late_ms

    def _step(self) -> None:
        state, machine, out = self._state, self._machine, self.outcome
        done = self._fill()
        state.running, state.waiting = len(self._ends), len(self._queue)
        state.resident = self._memory.resident(self._held)
        state.cache_layers = self._held * self._memory.per_token
        state.is_ready = state.resident > 0.0
        out.least_resident = min(out.least_resident, state.resident)
        plan = self._planner.plan(state)
        if plan.pause_ms > 0 and self._pause(plan.pause_ms):
            return  # planned again, with the request that came; chunks are taken off by a step alone
        said_ms, units = machine.step(state, plan)
        noise = self._noise[self._steps & (DRAWS - 1)]
        ms = said_ms * noise
        ms += self._switched(plan)
        if units:
            if plan.lane is not Lane.PARTITION:
                units = min(units, state.left)
            else:
                units *= noise
        gap_ms = self._gaps[self._steps & (DRAWS - 1)]
        prompt_tokens = state.prompt_tokens
        state.now_ms += ms
        self._planner.stepped(state, plan, ms)
        if units:
            self._advance(units, plan.lane)
        self._steps += 1
        out.busy_ms += ms + gap_ms
        if not prompt_tokens and state.running:
            out.steps_ms.append(ms)
        self._deliver(done)
        state.now_ms += gap_ms

    def _switched(self, plan: Plan) -> float:
        """A layer in flight ends on its old processors: on average half of it holds what the engine takes back."""
        before, self._last_split = self._last_split, plan
        if before.lane is not Lane.PARTITION or not before.other:
            return 0.0
        own = plan.own if plan.lane is Lane.PARTITION else 1.0
        if own <= before.own:
            return 0.0
        return 0.5 * self._unit_ms(before.other) * (own - before.own)

    def _pause(self, length_ms: float) -> bool:
        """The card is the trainer's; True if a request ended it."""
        state, planner = self._state, self._planner
        comes_ms = self._arrives[self._next]
        ends_ms = state.now_ms + length_ms
        is_stopped = planner.idle is WhenIdle.STOPPED
        cut = comes_ms < ends_ms
        if is_stopped:
            closes_ms = max(min(comes_ms, ends_ms - STOP_MS), state.now_ms)
            self._train(max(0.0, closes_ms - state.now_ms - WAKE_MS), Lane.PAUSE)
            state.now_ms = closes_ms + STOP_MS + AFTER_MS
        else:
            unit_ms = self._unit_ms(1.0)
            if cut:
                ran = comes_ms - state.now_ms
                ran += -ran % unit_ms
            else:
                # Only whole layers are begun, so that the step is not late.
                ran = length_ms
            self._train(ran, Lane.PAUSE)
            state.now_ms += ran
        return cut

    def _fill(self) -> list[int]:
        """Chunks of prompts for the step; returns the prompts that end with it."""
        state, load, setting = self._state, self._load, self._setting
        state.prompt_tokens, state.prompt_pairs = 0, 0.0
        done: list[int] = []
        room = setting.prompt_budget - len(self._ends)
        while self._queue and len(self._ends) + len(self._prompts) < setting.max_seqs:
            request = self._queue[0]
            whole = load.prompt[request] + load.answer[request]
            if self._held + whole > self._memory.pool:
                break
            self._queue.popleft()
            self._held += whole
            self._prompts[request] = load.prompt[request]
        if setting.prompts_elsewhere:
            for request in list(self._prompts):
                del self._prompts[request]
                self._begin(request)
            return done
        for request, left in list(self._prompts.items()):
            if room <= 0:
                break
            chunk = min(room, left)
            before = load.prompt[request] - left
            state.prompt_pairs += chunk * (before + 0.5 * chunk)
            state.prompt_tokens += chunk
            room -= chunk
            if chunk == left:
                done.append(request)
        return done

    def _begin(self, request: int) -> None:
        """The request has its first token and decodes from the next step on."""
        load, state = self._load, self._state
        self.outcome.first_ms[request] = state.now_ms - self._start_ms
        self._planner.first_token(request, state.now_ms)
        left = load.answer[request] - 1
        state.context += load.prompt[request] + 1
        if left <= 0:
            self._finish(request)
        else:
            heappush(self._ends, (self._steps + left, request))

    def _finish(self, request: int) -> None:
        load, state = self._load, self._state
        self.outcome.end_ms[request] = state.now_ms - self._start_ms
        state.context -= load.prompt[request] + load.answer[request]
        self._held -= load.prompt[request] + load.answer[request]
        self._planner.finished(request, state.now_ms)

    def _deliver(self, done: list[int]) -> None:
        state = self._state
        if state.running:
            state.context += state.running
            self._planner.delivered(state.now_ms)
            while self._ends and self._ends[0][0] <= self._steps:
                self._finish(heappop(self._ends)[1])
        if not state.prompt_tokens:
            return
        room = state.prompt_tokens
        for request in list(self._prompts):
            chunk = min(room, self._prompts[request])
            self._prompts[request] -= chunk
            room -= chunk
            if room <= 0:
                break
        for request in done:
            del self._prompts[request]
            self._begin(request)
