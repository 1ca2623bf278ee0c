"""How long a step takes with training beside it, by the machine's shape: what a planner assumes before it has measured.

    alone on share p   max(memory time / min(1, p / saturation), work / (p * speed))
    partition          that, times max(1 + contention * other, decode's demand of bandwidth + the trainer's)
    fused              layers with training rows read their weights once for all rows
    stream             decode is stretched by `stretch`; the trainer has what decode leaves of the processors
    unit (one layer)   work / (share * speed), or the copy of a layer that is not on the card

LoRA's backward makes no gradients of frozen weights, so it costs what forward costs.
"""

from __future__ import annotations

from dataclasses import dataclass

from .interface import Direction, Lane, Plan, State


@dataclass(frozen=True, kw_only=True)
class Laws:
    """One model on one machine (with tensor parallelism: one rank)."""

    layers: int
    layer_bytes: float
    layer_work: float
    """FLOP of one token in one layer."""
    bandwidth: float
    """Bytes per second."""
    speed: float
    """FLOP per second that matrix products reach."""
    kv_bytes: float
    """Per token, all layers."""
    hidden: int
    fixed_ms: float = 0.4
    """Head, sampling, all-reduce."""
    seq_ms: float = 0.011
    saturation: float = 0.45
    """The share of processors at which decode reaches its bandwidth (HARLI: 40 to 50 %)."""
    demand: float = 0.85
    """The share of bandwidth that decode uses."""
    contention: float = 0.0
    """By how much training on all processors would slow decode, linear in its share: a second law, beside bandwidth."""
    stretch: float = 1.4
    """Of decode, where kernels run beside it without a bound (HARLI measured up to 40 %)."""
    beside: float = 0.6
    """Of its speed that the trainer keeps there: decode holds 40 % of the processors."""
    fused_ms: float = 1.0
    """What any training row in the batch costs at once: no CUDA graph."""
    stream_ms: float = 0.5
    depth: float = 1.0
    """The cost of a training row's attention over that of a prompt."""
    copy_ms: float = 18.2
    """One layer from the host."""
    job: Laws | None = None
    """The trained base, where it is not the served one."""

    @property
    def trained(self) -> Laws:
        return self.job or self

    def layer_ms(self, rows: float) -> float:
        return max(self.layer_bytes / self.bandwidth, rows * self.layer_work / self.speed) * 1e3

    def pairs_ms(self, pairs: float) -> float:
        """Attention of prompts."""
        return 4e3 * self.layers * self.hidden * pairs / (0.8 * self.speed)

    def memory_ms(self, running: float, context: float) -> float:
        """A decode step that has all processors."""
        kv = context * self.kv_bytes / (0.88 * self.bandwidth) * 1e3
        return self.layers * self.layer_ms(running) + kv + self.fixed_ms + self.seq_ms * running

    def alone_ms(self, running: float, context: float, share: float = 1.0) -> float:
        work = self.layers * running * self.layer_work / self.speed * 1e3
        return max(self.memory_ms(running, context) / min(1.0, share / self.saturation), work / share)

    def prompt_ms(self, state: State, share: float = 1.0) -> float:
        rows = state.running + state.prompt_tokens
        kv = state.context * self.kv_bytes / (0.88 * self.bandwidth) * 1e3
        linear = self.layers * self.layer_ms(rows) + self.pairs_ms(state.prompt_pairs)
        return linear / share + kv + self.fixed_ms + self.seq_ms * state.running

    def unit_ms(self, tokens: int, share: float = 1.0, resident: float = 1.0) -> float:
        """One layer over `tokens` tokens. Copies overlap with the work of other layers."""
        if self.job is not None:
            return self.job.unit_ms(tokens, share, resident)
        return max(self.layer_ms(tokens) / share, (1.0 - resident) * self.copy_ms)

    def slowdown(self, own: float, other: float, tokens: int, resident: float = 1.0) -> float:
        """Of a decode step on `own` beside training on `other`."""
        unit_ms = self.unit_ms(tokens, other, resident)
        asked = self.trained.layer_bytes / (unit_ms * 1e-3 * self.bandwidth)
        return max(1.0 + self.contention * other, self.demand * min(1.0, own / self.saturation) + asked)

    def base_ms(self, state: State, share: float = 1.0) -> float:
        if state.prompt_tokens:
            return self.prompt_ms(state, share)
        return self.alone_ms(state.running, state.context, share)

    def step(self, state: State, plan: Plan) -> tuple[float, float]:
        """(ms, units of work done) of the step that `plan` makes; a pause is not part of it."""
        if plan.lane is Lane.PARTITION:
            ms = self.base_ms(state, plan.own)
            if not plan.other:
                return ms, 0.0
            ms *= self.slowdown(plan.own, plan.other, state.tokens, state.resident)
            return ms, ms / self.unit_ms(state.tokens, plan.other, state.resident) * state.tokens
        if plan.lane is Lane.FUSED:
            return self._fused(state, plan)
        if plan.lane is Lane.STREAM:
            return self._stream(state, plan)
        return self.base_ms(state), 0.0

    def _fused(self, state: State, plan: Plan) -> tuple[float, float]:
        rows = state.running + state.prompt_tokens
        more_ms = plan.layers * (self.layer_ms(rows + plan.tokens) - self.layer_ms(rows))
        done = state.tokens - state.left / self.layers if state.direction is Direction.FORWARD else 0.0
        pairs = plan.tokens * (done + plan.tokens / 2) * plan.layers / self.layers
        ms = self.base_ms(state) + more_ms + self.depth * self.pairs_ms(pairs) + self.fused_ms
        return ms, float(plan.layers * plan.tokens)

    def _stream(self, state: State, plan: Plan) -> tuple[float, float]:
        base_ms = self.base_ms(state)
        tiles_ms = plan.layers * self.unit_ms(plan.tokens, self.beside, state.resident)
        stretched_ms = self.stretch * base_ms
        if tiles_ms <= stretched_ms:
            ms = base_ms + tiles_ms * (1.0 - 1.0 / self.stretch)
        else:
            ms = stretched_ms + (tiles_ms - stretched_ms) * self.beside
        return ms + self.stream_ms, float(plan.layers * plan.tokens)
