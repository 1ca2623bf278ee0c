"""Predicts how long a plan will take: by the laws of the machine, corrected at every step by what was measured.

A correction is a running mean of measured / said, kept for each kind of plan and size of batch. Until a kind has three
measurements, the correction of its lane is used. Until a lane has any, the laws alone are used.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log2

from ..policy.recent import Recent
from ..policy.step_model import ErrorQuantiles, Prediction, Source
from .interface import Lane, Plan, State
from .laws import Laws
from .splits import SPLITS, SplitTable

TRUSTED = 3
WEIGHT = 0.05
"""The weight of a new measurement in a running mean that is full."""
SHARES = tuple(round(20 * plan.own) for plan in SPLITS)
Key = tuple[Lane, int, int, int, int, int]


@dataclass(slots=True)
class _Ratio:
    samples: int = 0
    value: float = 1.0

    def add(self, ratio: float) -> None:
        self.samples += 1
        self.value += max(WEIGHT, 1.0 / self.samples) * (ratio - self.value)


def _level(value: float) -> int:
    """Two levels per doubling."""
    return int(2.0 * log2(value)) if value > 1 else 0


def _key(state: State, plan: Plan) -> Key:
    prompt = 100 + _level(state.prompt_tokens) if state.prompt_tokens else 0
    share = round(20 * plan.own)
    return plan.lane, share, _level(plan.layers * plan.tokens), _level(state.running), _level(state.context), prompt


class PlanPredictor:
    """Predicts steps with training beside them, and learns from each one."""

    def __init__(self, laws: Laws) -> None:
        self.laws = laws
        self.table = SplitTable(laws)
        self._kinds: dict[Key, _Ratio] = {}
        self._lanes: dict[Lane, _Ratio] = {lane: _Ratio() for lane in Lane}
        self._errors = Recent(0.95)
        self._late = Recent(0.95)

    def predict(self, state: State, plan: Plan) -> Prediction:
        said, _ = self.laws.step(state, plan)
        return self._corrected(said, state, plan)

    def _corrected(self, said: float, state: State, plan: Plan) -> Prediction:
        kind = self._kinds.get(_key(state, plan))
        if kind is not None and kind.samples >= TRUSTED:
            return Prediction(ms=said * kind.value, source=Source.MEASURED)
        lane = self._lanes[plan.lane]
        if not lane.samples:
            # A kernel beside decode costs what the laws add to what decode alone was found to take.
            return Prediction(ms=said * self._lanes[Lane.ALONE].value, source=Source.ROOFLINE)
        return Prediction(ms=said * lane.value, source=Source.FITTED)

    def ms(self, state: State, plan: Plan) -> float:
        return self.predict(state, plan).ms

    def splits_ms(self, state: State) -> list[float]:
        """What `ms` says of each of SPLITS, without a prompt."""
        lane, kinds = self._lanes[Lane.PARTITION], self._kinds
        other = lane.value if lane.samples else self._lanes[Lane.ALONE].value
        running, context = _level(state.running), _level(state.context)
        found = []
        for said, share in zip(self.table.ms(state), SHARES, strict=True):
            kind = kinds.get((Lane.PARTITION, share, 0, running, context, 0))
            found.append(said * (kind.value if kind is not None and kind.samples >= TRUSTED else other))
        return found

    def tiles(self, state: State, plan: Plan) -> tuple[float, float]:
        """(ms, units done) of a step with rows or tiles; they end with their phase."""
        said, units = self.laws.step(state, plan)
        return self._corrected(said, state, plan).ms, min(units, state.left)

    def observe(self, state: State, plan: Plan, ms: float) -> None:
        """The step took `ms`."""
        said, _ = self.laws.step(state, plan)
        before = self._corrected(said, state, plan).ms
        self._errors.add(abs(ms / before - 1.0))
        self._late.add(ms / before - 1.0)
        ratio = ms / said
        self._lanes[plan.lane].add(ratio)
        self._kinds.setdefault(_key(state, plan), _Ratio()).add(ratio)

    @property
    def late(self) -> float:
        """The share by which 95 of 100 steps are late at most."""
        return max(0.0, self._late.value)

    def errors(self) -> ErrorQuantiles:
        """Relative errors of the latest predictions."""
        kept = self._errors
        return ErrorQuantiles(
            p50=kept.quantile(0.5), p95=kept.quantile(0.95), p99=kept.quantile(0.99), samples=kept.count
        )
