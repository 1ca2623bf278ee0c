"""A predictor for a machine whose laws nobody wrote down: a line through the measured steps, refitted at each one.

It takes the place of the laws' step without training; by what share training stretches it stays the laws' word, and
what is left is corrected as PlanPredictor does. Relative errors count, so that short steps are fitted as well as long ones, and a step far off the line counts less: others use the machine, too.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .interface import Lane, Plan, State
from .laws import Laws
from .predictor import PlanPredictor

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


class FittedPredictor(PlanPredictor):
    """Without shares of the processors: `splits_ms` knows nothing of the line."""

    def __init__(self, laws: Laws) -> None:
        super().__init__(laws)
        size = len(features(State()))
        self._products, self._sums = np.zeros((size, size)), np.zeros(size)
        self._line: NDArray[np.float64] | None = None
        self._steps = 0

    def base_ms(self, state: State) -> float:
        """The step without training."""
        law_ms = self.laws.base_ms(state)
        if self._line is None or self._steps < LEAST:
            return law_ms
        return max(float(features(state) @ self._line), LOWEST * law_ms)

    def _said(self, state: State, plan: Plan) -> tuple[float, float]:
        ms, units = self.laws.step(state, plan)
        return ms * self.base_ms(state) / self.laws.base_ms(state), units

    def observe(self, state: State, plan: Plan, ms: float) -> None:
        super().observe(state, plan, ms)
        if plan.lane in (Lane.ALONE, Lane.PAUSE):
            self._learn(state, ms, self.base_ms(state))

    def _learn(self, state: State, ms: float, before_ms: float) -> None:
        far = abs(ms / before_ms - 1.0) if self._line is not None else 0.0
        weight = min(1.0, ODD / far) if far else 1.0
        row = features(state) / ms
        self._products *= KEPT
        self._sums *= KEPT
        self._products += weight * np.outer(row, row)
        self._sums += weight * row
        self._steps += 1
        if self._steps >= LEAST and self._steps % SOLVE == 0:
            scale = np.sqrt(np.diag(self._products)) + 1e-12
            scaled = self._products / np.outer(scale, scale) + RIDGE * np.eye(len(scale))
            self._line = np.linalg.solve(scaled, self._sums / scale) / scale
