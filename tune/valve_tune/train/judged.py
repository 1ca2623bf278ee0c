"""What the evaluations of a job have said so far, saved with every checkpoint. Pure."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """`at` is the step of the last evaluation, `misses` how many in a row were no better than the best."""

    at: int = 0
    best: float = math.inf
    best_step: int = 0
    misses: int = 0

    def after(self, step: int, loss: float) -> Judged:
        """A loss that is no number is no better than any."""
        if loss < self.best:
            return Judged(at=step, best=loss, best_step=step)
        return dataclasses.replace(self, at=step, misses=self.misses + 1)

    def is_due(self, step: int, every: int, last: int) -> bool:
        return step > self.at and (step % every == 0 or step == last)

    def is_over(self, patience: int) -> bool:
        return 0 < patience <= self.misses

    def said(self, loss: float) -> str:
        """`loss` is that of the last evaluation."""
        if not self.misses:
            return f"loss {loss:.4f}, the best so far"
        return f"loss {loss:.4f}, the best is {self.best:.4f} at step {self.best_step}"

    def text(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=1, sort_keys=True)

    @classmethod
    def parse(cls, text: str) -> Judged:
        values: dict[str, Any] = json.loads(text)
        return cls(**values)
