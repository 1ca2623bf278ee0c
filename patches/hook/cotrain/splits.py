"""Every split of the card at once, from tables: what laws.py says of each, to the bit, in a tenth of the time.

A decision looks at all eighteen. What depends on the split alone is worked out once, what depends on the batch once
for all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from .interface import Lane, Plan, State
from .laws import Laws

SPLITS = tuple(Plan(Lane.PARTITION, own=tenths / 20, other=1.0 - tenths / 20) for tenths in range(2, 20))


class SplitTable:
    """The steps of SPLITS without a prompt."""

    def __init__(self, laws: Laws) -> None:
        self._laws = laws
        self._rows = [
            (
                plan.own,
                plan.other,
                min(1.0, plan.own / laws.saturation),
                1.0 + laws.contention * plan.other,
                laws.demand * min(1.0, plan.own / laws.saturation),
            )
            for plan in SPLITS
        ]
        self._layer: dict[int, float] = {}

    def layer_ms(self, tokens: int) -> float:
        """One layer of the job on all processors."""
        found = self._layer.get(tokens)
        if found is None:
            found = self._layer[tokens] = self._laws.trained.layer_ms(tokens)
        return found

    def ms(self, state: State) -> list[float]:
        laws, trained = self._laws, self._laws.trained
        layer_ms, copy_ms = self.layer_ms(state.tokens), (1.0 - state.resident) * trained.copy_ms
        memory_ms = laws.memory_ms(state.running, state.context)
        work_ms = laws.layers * state.running * laws.layer_work / laws.speed * 1e3
        layer_bytes, bandwidth = trained.layer_bytes, laws.bandwidth
        found = []
        for own, other, reached, contended, demand in self._rows:
            alone_ms = layer_ms / other
            asked = layer_bytes / ((alone_ms if alone_ms > copy_ms else copy_ms) * 1e-3 * bandwidth)
            short = demand + asked
            base_ms, bound_ms = memory_ms / reached, work_ms / own
            # Not max(): a call for each would double the time.
            found.append((base_ms if base_ms > bound_ms else bound_ms) * (contended if contended > short else short))
        return found


@dataclass(frozen=True, slots=True)
class TimeWorth:
    """What time of the trainer is worth, in units a ms, where the frozen layers move with the KV cache."""

    tokens: int
    layer_ms: float
    copy_ms: float
    """Of one layer from the host."""
    resident: float
    cache_layers: float
    """Held by the cache at a cycle of `cycle_ms`: slower tokens keep more requests. 0 where there is one copy."""
    cycle_ms: float
    alone_ms: float
    floor: float

    def copies_ms(self, cycle_ms: float) -> float:
        resident = self.resident
        if self.cache_layers and self.cycle_ms:
            resident -= self.cache_layers * (cycle_ms / self.cycle_ms - 1.0)
            resident = 0.0 if resident < 0.0 else min(resident, 1.0)
        return (1.0 - resident) * self.copy_ms

    def split(self, cycle_ms: float, step_ms: float, other: float) -> float:
        """A step of `step_ms` beside training on `other`; the rest of the cycle is a pause."""
        copy_ms, alone_ms = self.copies_ms(cycle_ms), self.layer_ms / other
        unit_ms = alone_ms if alone_ms > copy_ms else copy_ms
        return self._of(cycle_ms, self.tokens / unit_ms * step_ms, cycle_ms - step_ms, copy_ms)

    def tiles(self, cycle_ms: float, step_ms: float, work: float) -> float:
        """A step with `work` units of tiles; the rest of the cycle is a pause."""
        return self._of(cycle_ms, work, cycle_ms - step_ms, self.copies_ms(cycle_ms))

    def _of(self, cycle_ms: float, work: float, pause_ms: float, copy_ms: float) -> float:
        full = self.tokens / (copy_ms if copy_ms > self.layer_ms else self.layer_ms)
        work += full * pause_ms
        return work / cycle_ms if work >= self.floor * full * (cycle_ms - self.alone_ms) else 0.0
