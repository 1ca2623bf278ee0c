"""One figure of one benchmark, and the JSON line it is printed as."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

Better = Literal["lower", "higher"]


def percentile(ordered: Sequence[float], q: float) -> float:
    """The nearest-rank percentile of an ordered sequence: a value that was really measured."""
    if not ordered:
        return float("nan")
    rank = max(0, min(len(ordered) - 1, round(q * (len(ordered) - 1))))
    return ordered[rank]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A measured distribution against its budget, if it has one. `judged` says which figure the budget bounds."""

    name: str
    metric: str
    unit: str
    p50: float
    p99: float
    max: float
    n: int
    budget: float | None
    better: Better = "lower"
    judged: Literal["p50", "p99", "max"] = "p99"
    baseline: float | None = None
    note: str = ""
    is_void: bool = False  # too uncertain to be judged: run it again; never a pass

    @property
    def ok(self) -> bool:
        if self.budget is None:
            return True
        if self.is_void:
            return False
        value = {"p50": self.p50, "p99": self.p99, "max": self.max}[self.judged]
        return value <= self.budget if self.better == "lower" else value >= self.budget

    def as_json(self, *, commit: str, machine: str) -> str:
        record = {**asdict(self), "ok": self.ok, "commit": commit, "machine": machine}
        del record["is_void"]
        return json.dumps(record)


def row_of(name: str, metric: str, unit: str, samples: Sequence[float], budget: float | None, **more: object) -> Row:
    """A row from raw samples."""
    ordered = sorted(samples)
    return Row(
        name=name,
        metric=metric,
        unit=unit,
        p50=percentile(ordered, 0.50),
        p99=percentile(ordered, 0.99),
        max=ordered[-1] if ordered else float("nan"),
        n=len(ordered),
        budget=budget,
        **more,  # type: ignore[arg-type]
    )
