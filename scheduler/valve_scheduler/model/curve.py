"""What is known of a workload: standalone throughput and how it falls when memory is short."""

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

FloatArray: TypeAlias = NDArray[np.floating[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputCurve:
    """phi_w: tokens per second against free memory per GPU, monotone, straight between its points."""

    free_mib: tuple[float, ...]
    tokens_per_s: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.free_mib) != len(self.tokens_per_s) or not self.free_mib:
            raise ValueError(
                f"curve has {len(self.free_mib)} memory and {len(self.tokens_per_s)} throughput points; "
                "give the same number of both, at least one"
            )
        finite = np.isfinite(self.free_mib).all() and np.isfinite(self.tokens_per_s).all()
        if not finite or min(self.free_mib) < 0 or min(self.tokens_per_s) < 0 or self.tokens_per_s[-1] <= 0:
            raise ValueError("curve values must be finite and >= 0, the last throughput > 0")
        if np.any(np.diff(self.free_mib) <= 0) or np.any(np.diff(self.tokens_per_s) < 0):
            raise ValueError("curve must rise: free_mib strictly, tokens_per_s never falling")

    def at(self, free_mib: FloatArray) -> FloatArray:
        """Tokens per second at each amount of memory; 0 below the first point, flat after the last."""
        return np.interp(free_mib, self.free_mib, self.tokens_per_s, left=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadProfile:
    """Measured once per (model, engine arguments, GPU model): everything the model needs to know of a job.

    `fit_mib` per GPU holds weights and the smallest cache it can run with; `need_mib` is its working set, and
    every share of it that is missing costs `deficit_cost` of throughput (lost tokens, recompute) on top of
    the curve."""

    standalone_tokens_per_s: float
    curve: ThroughputCurve
    fit_mib: float = 0.0
    need_mib: float = 0.0
    deficit_cost: float = 0.0
    gpu_model: str = ""  # empty: any

    def __post_init__(self) -> None:
        for name in ("standalone_tokens_per_s", "fit_mib", "need_mib", "deficit_cost"):
            value = getattr(self, name)
            if not np.isfinite(value) or value < 0:
                raise ValueError(f"{name} is {value}, must be a finite number >= 0")
        if self.standalone_tokens_per_s <= 0:
            raise ValueError("standalone_tokens_per_s is 0, the profile must have measured something")


def prior_profile(full_mib: float) -> WorkloadProfile:
    """For a job without a measurement yet: most of the speed of batch inference comes with the first half of the
    memory.

    The knee (80 % of the speed at half of the memory) is a guess between a compute-bound small model, flat
    from 30 %, and a large one that needs it all; only best-effort jobs are ever placed by it, and it
    refuses none; what such a job is taken to hold beside online's peaks is in `peaks.py`."""
    curve = ThroughputCurve(
        free_mib=(0.0, 0.5 * full_mib, full_mib),
        tokens_per_s=(0.0, 0.8, 1.0),
    )
    return WorkloadProfile(standalone_tokens_per_s=1.0, curve=curve)
