"""What a run of one pair is made of: settings, what was learned of the pair alone, a compute and a memory policy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from valve_tools.sim.machine import Settings
from valve_tools.sim.ours import OurMemory
from valve_tools.sim.pairs import Bound
from valve_tools.sim.world import CHANNEL_STOP, Compute, MemoryPolicy, Result, StopTimes

from valved.policy.cooldown import CooldownSettings
from valved.policy.reservation import ReservationSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """What a sensitivity run varies; the defaults are the product's."""

    reservation: ReservationSettings = field(default_factory=ReservationSettings)
    cooldown: CooldownSettings = field(default_factory=CooldownSettings)
    by_arrivals: bool = False
    """Without a hint, how gaps are spread shortens the cooldown."""
    settings: Settings = field(default_factory=Settings)
    stop: StopTimes = CHANNEL_STOP
    serial_gate: bool = True
    gate_on_hint: bool = True
    offline_step_ns: int = 0
    """Memory is taken between two offline steps so long; 0: under the gate."""
    offline_step_tokens: int = 0
    """Offline steps are cut to so many tokens; 0: as the job has them."""
    let_ns: int = 0
    """So much of a step that is waited for is let run at a time; 0: all of it."""
    world: Mapping[str, object] = field(default_factory=dict)
    """Other fields of `World`."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Context:
    """One pair under one seed, with its solo run, from which the clairvoyant and charitable policies learn."""

    bound: Bound
    seed: int
    solo: Result
    tuning: Tuning = field(default_factory=Tuning)

    @property
    def first_hour_peak(self) -> int:
        usage = self.solo.usage
        return int(usage[usage[:, 0] < 3600, 1].max(initial=0))


Memory = Callable[[Context], MemoryPolicy]


@dataclass(frozen=True, slots=True, kw_only=True)
class Combination:
    name: str
    compute: Compute
    memory: Memory
    hinted: bool = True
    is_baseline: bool = True
    same_model_only: bool = False
    tuned: Callable[[Bound, Tuning], Tuning] = lambda _, tuning: tuning


def ours(context: Context) -> MemoryPolicy:
    tuning = context.tuning
    return OurMemory(settings=tuning.reservation, step_ns=tuning.offline_step_ns, let_ns=tuning.let_ns)
