"""A predictor for a machine without known laws: a line through the measured steps, refitted as they come.

It takes the place of the laws' step without training; what training adds is still the laws' word, and what is left is
corrected as PlanPredictor does. Relative errors count, so that short steps are fitted as well as long ones, and a step
far off the line counts less: others use the machine, too.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields

import numpy as np
from numpy.typing import NDArray
from valve_hook.cotrain.interface import Lane, Plan, State
from valve_hook.cotrain.laws import Laws
from valve_hook.cotrain.predictor import PlanPredictor

FEW_ROWS = (4.0, 16.0)
"""Up to so many rows a product with the weights bends: first reading them costs most, then the work."""
LEAST = 20
"""Steps before the line is believed."""
KEPT = 0.998
"""Of what was known, at each new step."""
ODD = 0.1
"""A relative error beyond it counts in inverse proportion."""
RIDGE = 1e-6
SOLVE = 8
"""Steps from one solution to the next."""
LOWEST = 0.2
"""Of what the laws say: a line may dip below zero where nothing was measured."""


def features(state: State) -> NDArray[np.float64]:
    rows = float(state.running + state.prompt_tokens)
    return np.array(
        [
            1.0,
            min(rows, FEW_ROWS[0]),
            min(rows, FEW_ROWS[1]),
            rows,
            float(state.running),
            float(state.context),
            state.prompt_pairs,
            float(state.prompt_tokens > 0),
        ]
    )


class StepLine:
    """Weighted least squares that forgets."""

    def __init__(self) -> None:
        size = len(features(State()))
        self._products, self._sums = np.zeros((size, size)), np.zeros(size)
        self._line: NDArray[np.float64] | None = None
        self._steps = 0

    def ms(self, state: State, law_ms: float) -> float:
        if self._line is None:
            return law_ms
        return max(float(features(state) @ self._line), LOWEST * law_ms)

    def learn(self, state: State, ms: float) -> None:
        row = features(state) / ms
        far = abs(1.0 - float(row @ self._line)) if self._line is not None else 0.0
        weight = min(1.0, ODD / far) if far else 1.0
        self._products *= KEPT
        self._sums *= KEPT
        self._products += weight * np.outer(row, row)
        self._sums += weight * row
        self._steps += 1
        if self._steps >= LEAST and self._steps % SOLVE == 0:
            scale = np.sqrt(np.diag(self._products)) + 1e-12
            scaled = self._products / np.outer(scale, scale) + RIDGE * np.eye(len(scale))
            self._line = np.linalg.solve(scaled, self._sums / scale) / scale


@dataclass(frozen=True, kw_only=True)
class FittedLaws(Laws):
    """On all processors, without training, a step takes what the line says."""

    line: StepLine = field(default_factory=StepLine)

    def base_ms(self, state: State, share: float = 1.0) -> float:
        law_ms = super().base_ms(state, share)
        return self.line.ms(state, law_ms) if share == 1.0 else law_ms


class FittedPredictor(PlanPredictor):
    """Without shares of the processors: `splits_ms` knows nothing of the line."""

    def __init__(self, laws: Laws) -> None:
        self.line = StepLine()
        super().__init__(FittedLaws(**{each.name: getattr(laws, each.name) for each in fields(laws)}, line=self.line))

    def observe(self, state: State, plan: Plan, ms: float) -> None:
        super().observe(state, plan, ms)
        if plan.lane in (Lane.ALONE, Lane.PAUSE):
            self.line.learn(state, ms)
