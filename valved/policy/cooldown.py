"""How long an online service must stay quiet before offline work may run again.

A service without lifecycle hints shows only its GPU work. Between two decode steps of one request the GPU falls
idle for a moment; waking offline in such a gap would preempt it again inside the same request. So the cooldown is a
multiple (2) of the largest gap seen lately.

The memory is a maximum that decays by a fixed ratio per unit of time, fast enough that a gap as large as the ceiling
has sunk to the floor after one window. Two properties follow, and the property tests hold them:

* a gap of up to ceiling/factor stays covered (cooldown >= gap) for `covered_ns(settings)` after it was seen, about
  110 s with the defaults, because it takes that long to use up the factor;
* one stall does not end the harvest: its mark halves every 110 s instead of staying for the whole window.

An exponentially decaying maximum needs no list of gaps: whichever of two marks is larger now is larger for ever.

Only time during which the service held its GPUs ages the mark. A quiet night teaches nothing about decode gaps, and the
first request of the morning deserves the same cooldown as the last one of the evening.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

MS = 1_000_000
SECOND = 1_000_000_000


LONGEST_NS = 3600 * SECOND  # beyond any use, and far from where numbers stop being exact
LARGEST_FACTOR = 100.0
LONGEST_WINDOW_NS = 30 * 24 * 3600 * SECOND


@dataclass(frozen=True, slots=True, kw_only=True)
class CooldownSettings:
    """Every number of the policy, with its reason."""

    start_ns: int = 20 * MS  # before a gap was seen: async engines show gaps to 20 ms at most
    floor_ns: int = 5 * MS  # a wake costs the offline side 0.2 ms and the watcher proves idle in about 1 ms
    ceiling_ns: int = 200 * MS  # covers gaps to 100 ms; dearer ones cost harvest and spare no preemption [replayed]
    factor: float = 2.0  # the paper's margin; it must exceed 1, or a growing gap could never be learnt
    window_ns: int = 600 * SECOND  # held time after which a gap as large as the ceiling is forgotten

    def __post_init__(self) -> None:
        if not 0 < self.floor_ns <= self.start_ns <= self.ceiling_ns <= LONGEST_NS:
            raise ValueError("cooldown needs 0 < floor_ns <= start_ns <= ceiling_ns <= one hour")
        if not 1.0 < self.factor <= LARGEST_FACTOR:  # false for nan, too
            raise ValueError(f"cooldown factor must be greater than 1 and at most {LARGEST_FACTOR:g}")
        if not 0 < self.window_ns <= LONGEST_WINDOW_NS:
            raise ValueError("cooldown window_ns must be positive and at most thirty days")


@dataclass(frozen=True, slots=True, kw_only=True)
class CooldownState:
    """The mark and how far it has decayed."""

    mark_ns: int  # the gap that set the mark
    age_ns: int  # held time since
    seen_ns: int  # when the state was last brought up to date
    gaps: int  # counted in all


@dataclass(frozen=True, slots=True, kw_only=True)
class CooldownObservation:
    """What happened since the last step."""

    gaps_ns: tuple[int, ...] = ()  # gaps inside a request, or such as cannot be told from them
    held: bool = True  # the service held its GPUs meanwhile: the mark ages


@dataclass(frozen=True, slots=True, kw_only=True)
class Cooldown:
    """The decision: how long to wait, and the gap it rests on."""

    cooldown_ns: int
    gap_ns: int
    reason: str


def first_cooldown(now_ns: int, settings: CooldownSettings) -> CooldownState:
    """The state of a service never seen before: as if a gap of start/factor had just been seen."""
    return CooldownState(mark_ns=int(settings.start_ns / settings.factor), age_ns=0, seen_ns=now_ns, gaps=0)


def step_cooldown(
    state: CooldownState, observation: CooldownObservation, now_ns: int, settings: CooldownSettings
) -> tuple[CooldownState, Cooldown]:
    """Age the mark, let larger gaps replace it, and say what the cooldown is now."""
    elapsed_ns = max(0, now_ns - state.seen_ns) if observation.held else 0
    mark_ns, age_ns = state.mark_ns, state.age_ns + elapsed_ns
    remembered_ns = math.ceil(settings.ceiling_ns / settings.factor)
    largest_ns = min(max(observation.gaps_ns, default=0), remembered_ns)
    if largest_ns >= _decayed(mark_ns, age_ns, settings):
        mark_ns, age_ns = largest_ns, 0
    state = CooldownState(
        mark_ns=mark_ns,
        age_ns=age_ns,
        seen_ns=max(now_ns, state.seen_ns),
        gaps=state.gaps + len(observation.gaps_ns),
    )
    return state, read_cooldown(state, settings)


def read_cooldown(state: CooldownState, settings: CooldownSettings) -> Cooldown:
    """The cooldown that a state stands for."""
    gap_ns = _decayed(state.mark_ns, state.age_ns, settings)
    wanted_ns = math.ceil(settings.factor * gap_ns)
    cooldown_ns = min(max(wanted_ns, settings.floor_ns), settings.ceiling_ns)
    if cooldown_ns != wanted_ns:
        reason = "floor" if wanted_ns < cooldown_ns else "ceiling"
    else:
        reason = "start" if state.gaps == 0 else "largest-gap"
    return Cooldown(cooldown_ns=cooldown_ns, gap_ns=math.ceil(gap_ns), reason=reason)


def covered_ns(settings: CooldownSettings) -> int:
    """Held time for which a gap stays covered by the cooldown that it caused."""
    ratio = settings.ceiling_ns / settings.floor_ns
    return settings.window_ns if ratio <= 1.0 else int(settings.window_ns * math.log(settings.factor) / math.log(ratio))


def gaps_inside_hold(gaps: Iterable[tuple[int, int]], held_since_ns: int, held_until_ns: int) -> tuple[int, ...]:
    """Of (end_ns, gap_ns) pairs, the gaps that began and ended during one hold.

    A gap that outlasted the hold is not a decode gap as far as anyone can tell: offline ran in it. Counting it would
    teach the idle time between requests.
    """
    return tuple(
        gap_ns for end_ns, gap_ns in gaps if held_since_ns <= end_ns - gap_ns and end_ns <= held_until_ns and gap_ns > 0
    )


def _decayed(mark_ns: int, age_ns: int, settings: CooldownSettings) -> float:
    ratio = settings.floor_ns / settings.ceiling_ns
    return mark_ns * float(ratio ** (age_ns / settings.window_ns))
