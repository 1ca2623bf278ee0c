"""Machines from FlexLLM's published step tables: what a step takes with training rows in it, or layers beside it.

The tables are medians over the depth of the rows, of 8 decodes and sequences of 1,024 tokens; their hardware is unnamed
(the scripts that go with them name A100 80 GB). They are the truth for fused rows and for layers on a second stream;
how a step grows with its batch and its prompts, and a split of processors, are rooflines.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace

from valve_hook.cotrain.interface import Direction, Plan, State
from valve_tools.lab.cotrain.machines import A100, Base, Machine, roofline

DECODES, CONTEXT, SEQUENCE = 8, 512, 1024
MEDIAN_DEPTH = 500
"""Where in the sequence the medians lie: with it and DEPTH_MS the table's own rows by depth are met within 3 %."""
DEPTH_MS = 0.04
"""Of a row's step, for each token before it; the same at 56, 120 and 248 rows."""
Row = tuple[float, float]


def between(table: tuple[Row, ...], size: float) -> float:
    """A line between two rows; beyond the last as between the last two."""
    at = min(max(bisect_left(table, (size, 0.0)), 1), len(table) - 1)
    (few, low), (many, high) = table[at - 1], table[at]
    return low + (high - low) * max(size - few, 0.0) / (many - few)


@dataclass(frozen=True, kw_only=True)
class StepTable:
    """One model's: ms of a step."""

    alone_ms: float
    forward: tuple[Row, ...]
    """By training tokens in the batch."""
    backward: tuple[Row, ...]
    """By layers over the whole sequence."""
    depth_ms: float = DEPTH_MS

    @property
    def layer_ms(self) -> float:
        """What one more layer of a sequence takes, forward and backward on average, where nothing else is to be had."""
        (few, low), (many, high) = self.backward[-2:]
        return (high - low) / (many - few)


LLAMA70B = Base(
    name="Llama-3.1-70B",
    layers=80,
    hidden=8192,
    layer_params=855.6e6,
    kv_bytes=327680,
    other_bytes=4.2e9,
    kept_bytes=167936,
)
YI34B = Base(
    name="Yi-1.5-34B",
    layers=60,
    hidden=7168,
    layer_params=557.8e6,
    kv_bytes=245760,
    other_bytes=1.83e9,
    kept_bytes=129024,
)
LLAMA70B_STEPS = StepTable(
    alone_ms=46.6,
    forward=((8, 58), (24, 58), (56, 66), (120, 87), (248, 118), (504, 202)),
    backward=((1, 58), (2, 63), (4, 74), (8, 95), (16, 139), (32, 220), (64, 387)),
)
YI34B_STEPS = StepTable(
    alone_ms=38.0,
    forward=((24, 50), (120, 73), (248, 100)),
    backward=((1, 50), (4, 71), (8, 99), (16, 155), (32, 268), (60, 471)),
)


@dataclass(frozen=True, kw_only=True)
class Measured(Machine):
    """A base on cards, by a step table."""

    steps: StepTable

    def assumed(self) -> Measured:
        """Everybody is told the published table."""
        return self

    def without_depth(self) -> Measured:
        """As FlexLLM sees it: its latency is a function of the number of tokens alone."""
        return replace(self, steps=replace(self.steps, depth_ms=0.0))

    def _fused(self, state: State, plan: Plan) -> tuple[float, float]:
        steps = self.steps
        done = state.tokens - state.left / self.layers if state.direction is Direction.FORWARD else 0.0
        more_ms = between(steps.forward, plan.tokens) - steps.alone_ms
        more_ms += steps.depth_ms * (done + plan.tokens - MEDIAN_DEPTH)
        ms = self.base_ms(state) + max(more_ms, 0.0) * plan.layers / self.layers
        return ms, float(plan.layers * plan.tokens)

    def _stream(self, state: State, plan: Plan) -> tuple[float, float]:
        steps = self.steps
        more_ms = between(steps.backward, plan.layers) - steps.alone_ms
        return self.base_ms(state) + more_ms * plan.tokens / SEQUENCE, float(plan.layers * plan.tokens)


def measured(base: Base, steps: StepTable, cards: int) -> Machine:
    """The fixed time of a step is such that the table's own batch takes what it says."""
    plain = roofline(A100, base, cards)
    speed = SEQUENCE * plain.layer_work / (steps.layer_ms * 1e-3)
    short_ms = steps.alone_ms - replace(plain, speed=speed).alone_ms(DECODES, DECODES * CONTEXT)
    known = {name: getattr(plain, name) for name in plain.__dataclass_fields__}
    known |= {"speed": speed, "fixed_ms": plain.fixed_ms + short_ms, "source": "FlexLLM's step table"}
    return Measured(**known, steps=steps)
