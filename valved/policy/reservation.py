"""How much memory online keeps in reserve: what it used at most within the last tau, and a headroom H on top.

The rest goes back to offline at once. Two rules move H. BUDGET spends the reclaims that the operator accepts: each
reclaim raises H by a step, and time lowers it by the steps of `spend_share` of the target, so the two cancel when
reclaims come at that rate; tau stays as it is. It is a quantile tracker: H settles where that many bursts an hour are
larger than it. Time lowers H the faster, the fewer reclaims the window holds. Where use returns to its mean (usage.py),
H is kept on top of where it is heading, since what is used at a peak is soon free again. MIAD is the published rule: a
pressure event grows H by alpha, each quiet tau lowers it by one, and tau is steered by the target: a reclaim above it
doubles tau, a calm minute shortens it by delta.
Called by kv/reserve on every change of online memory and once per tick.

Both: while the window already holds `hold_share` of the target nothing is given back, since each further give could
only lead to a reclaim above the target. It turns the target from an average into a bound that is broken only while H is
still growing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from valved.model.memory import (
    OnlineMemory,
    ReservationAction,
    ReservationDecision,
    ReservationRule,
    ReservationState,
)
from valved.policy import usage

SECOND_NS = 1_000_000_000
HOUR_NS = 3600 * SECOND_NS
REMEMBERED_RECLAIMS = 1024
"""Bound on the state in a reclaim storm; a window this full is far above any target."""
FIRST_NS = 600 * SECOND_NS
"""What the first reclaims of all are set against, at least."""
SLICES = 16
"""Use is remembered as the peaks of slices of tau / 16: what goes back was idle for tau, or up to a slice longer."""
UNKNOWN_HANDLES = 1 << 31
"""What a node that has seen nothing takes for in use: everything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReservationSettings:
    """Every number of the policy. Times in ns, memory in handles."""

    rule: ReservationRule = ReservationRule.BUDGET
    """MIAD leaves offline 0.89 of a clairvoyant's memory on the bench's stationary load and 0.85 on long prompts, as it
    spends 4 to 16 of 30 reclaims. BUDGET leaves more on each load (docs/policies.md)."""
    step_handles: int = 16
    """BUDGET: 1 GiB in 64 MiB handles. 8 climb so slowly that the first hour's target is gone before H has followed the
    load: one of ten replayed pairs then kept 0.65 of its throughput (docs/policies.md)."""
    spend_share: float = 0.84
    """BUDGET: of the target; the rest is for the hours in which bursts come together."""
    keep_ns: int = 5 * SECOND_NS
    """BUDGET: its tau. Less leaves offline more memory, and what moves is computed again more often."""
    target_per_hour: float = 30.0
    """Reclaims an hour that the operator accepts. One costs online about 0.1 ms a handle and a batch job some
    recomputed suffixes; holding memory for an hour to avoid it costs the job far more (docs/results/replay)."""
    pressure_ratio: float = 1.0
    """Pressure when used >= this share of mapped. Lower takes memory while headroom could still serve, and doubles H
    for it: replayed, 0.9 costs up to half of the offline throughput and gains online less than 0.1 % of TTFT."""
    hold_share: float = 0.95
    """Nothing is given back while the window holds this share of the target. A burst after a quiet time costs several
    reclaims in a row (H doubles its way up from 2 to its bound in six), and they must fit into the rest."""
    alpha: float = 2.0
    """Growth of H at pressure: any burst is covered after log2(burst) reclaims."""
    beta: float = 2.0
    """Growth of tau at a reclaim above the target."""
    delta_ns: int = SECOND_NS
    """Shortening of tau per calm `adjust_every_ns`: undoes one doubling of a tau of one minute in an hour."""
    headroom_min_handles: int = 2
    """One handle for the next block of running requests and one for an admission."""
    headroom_max_handles: int = 256
    """16 GiB in 64 MiB handles. H is on top of where use is heading, so on a heavy load it must reach further than the
    largest burst: with half of it up to 33 reclaims came in an hour."""
    tau_start_ns: int = 60 * SECOND_NS
    """What was idle for a minute is seldom needed soon."""
    tau_min_ns: int = 20 * SECOND_NS
    """Below it each halving adds a third more reclaims for under 1 % of offline throughput [replayed]."""
    tau_max_ns: int = HOUR_NS
    """One window: longer would outlive the evidence that made it so long."""
    window_ns: int = HOUR_NS
    """Over which reclaims are counted."""
    adjust_every_ns: int = 60 * SECOND_NS
    """Pace of the additive step of tau."""

    def __post_init__(self) -> None:
        if self.alpha <= 1 or self.beta <= 1:
            raise ValueError(f"alpha and beta must be above 1, got {self.alpha} and {self.beta}")
        if not 1 <= self.headroom_min_handles <= self.headroom_max_handles:
            raise ValueError("headroom_min_handles must be at least 1 and at most headroom_max_handles")
        if not 0 < self.tau_min_ns <= self.tau_start_ns <= self.tau_max_ns:
            raise ValueError("need 0 < tau_min_ns <= tau_start_ns <= tau_max_ns")
        if not (self.step_handles >= 1 and 0 < self.spend_share <= 1 and self.keep_ns > 0):
            raise ValueError("step_handles and keep_ns must be positive, spend_share in (0, 1]")
        if not 0 < self.pressure_ratio <= 1:
            raise ValueError(f"pressure_ratio must be in (0, 1], got {self.pressure_ratio}")
        if min(self.target_per_hour, self.hold_share, self.delta_ns, self.window_ns, self.adjust_every_ns) <= 0:
            raise ValueError("target_per_hour, hold_share, delta_ns, window_ns and adjust_every_ns must be positive")


def start(now_ns: int, settings: ReservationSettings) -> ReservationState:
    """The state of a node that has seen nothing yet."""
    return ReservationState(
        headroom_handles=settings.headroom_min_handles,
        tau_ns=settings.keep_ns if settings.rule is ReservationRule.BUDGET else settings.tau_start_ns,
        exact_handles=float(settings.headroom_min_handles),
        looked_ns=now_ns,
        quiet_since_ns=now_ns,
        adjusted_ns=now_ns,
        peaks=((now_ns, UNKNOWN_HANDLES),),
        began_ns=now_ns,
    )


def decide(
    state: ReservationState, memory: OnlineMemory, now_ns: int, settings: ReservationSettings
) -> tuple[ReservationState, ReservationDecision]:
    """One step: grow at pressure, else give back what was idle for tau.

    A take is large enough to end its own pressure, so one event is one reclaim however many handles it needs.
    """
    spends = settings.rule is ReservationRule.BUDGET
    state = _look(state, memory, now_ns, settings)
    state = _spend(state, now_ns, settings) if spends else state
    if is_pressure(memory, settings):
        return _grow(state, memory, now_ns, settings)
    state = state if spends else _lower(_shorten_tau(state, now_ns, settings), now_ns, settings)
    return _give_back(state, memory, now_ns, settings)


def is_pressure(memory: OnlineMemory, settings: ReservationSettings) -> bool:
    """An allocation that headroom cannot serve, or headroom down to its last tenth. Nothing used is never pressure."""
    if memory.unmet_handles > 0:
        return True
    return memory.used_handles > 0 and memory.used_handles >= settings.pressure_ratio * memory.mapped_handles


def reclaims_per_hour(state: ReservationState, settings: ReservationSettings) -> float:
    return len(state.reclaims_ns) * HOUR_NS / settings.window_ns


def next_wake_ns(state: ReservationState, settings: ReservationSettings) -> int:
    """When `decide` could next give or adjust without a change of memory: what the service sleeps until."""
    if settings.rule is ReservationRule.BUDGET:
        rate = _lowered_per_ns(state, state.looked_ns, settings)
        fraction = state.exact_handles - math.floor(state.exact_handles) + 1e-9
        lowers_ns = state.looked_ns + math.ceil(fraction / rate) if rate else state.reclaims_ns[0] + settings.window_ns
        forgotten_ns = [_forgotten_ns(since_ns, state.tau_ns) for since_ns, _ in state.peaks[:-1]]
        calm_ns = state.quiet_since_ns + state.tau_ns
        learns_ns = [state.looked_ns + SECOND_NS] if is_heading_down(state) else []
        return min([lowers_ns, *forgotten_ns, *([calm_ns] if calm_ns > state.looked_ns else []), *learns_ns])
    lowers_ns, adjusts_ns = state.quiet_since_ns + state.tau_ns, state.adjusted_ns + settings.adjust_every_ns
    return min(lowers_ns, adjusts_ns, *(_forgotten_ns(since_ns, state.tau_ns) for since_ns, _ in state.peaks[:-1]))


def is_heading_down(state: ReservationState) -> bool:
    """A handle or more is kept beyond what is used now, until the mean has followed: time alone moves that."""
    return usage.expected(state.history, state.used_handles) >= state.used_handles + 1


def _look(
    state: ReservationState, memory: OnlineMemory, now_ns: int, settings: ReservationSettings
) -> ReservationState:
    """Take in what is used now. What was used at the last look was so until now: the caller tells every change."""
    used = memory.used_handles + memory.unmet_handles
    peak = max(used, memory.peak_handles, state.used_handles)
    peaks = [(since_ns, most) for since_ns, most in state.peaks if _forgotten_ns(since_ns, state.tau_ns) > now_ns]
    if peaks and now_ns - peaks[-1][0] < state.tau_ns // SLICES:
        peaks[-1] = (peaks[-1][0], max(peaks[-1][1], peak))
    else:
        peaks.append((now_ns, peak))
    reclaims_ns = _recent(state.reclaims_ns, now_ns, settings)
    history = usage.note(state.history, max(memory.peak_handles, state.used_handles), now_ns)
    return replace(state, reclaims_ns=reclaims_ns, used_handles=used, peaks=tuple(peaks), history=history)


def _forgotten_ns(since_ns: int, tau_ns: int) -> int:
    """When a slice that began at `since_ns` lies a tau back with all of it."""
    return since_ns + tau_ns // SLICES + tau_ns


def _recent(reclaims_ns: tuple[int, ...], now_ns: int, settings: ReservationSettings) -> tuple[int, ...]:
    oldest = now_ns - settings.window_ns
    if reclaims_ns and reclaims_ns[0] <= oldest:
        reclaims_ns = tuple(at for at in reclaims_ns if at > oldest)
    return reclaims_ns[-REMEMBERED_RECLAIMS:]


def _spend(state: ReservationState, now_ns: int, settings: ReservationSettings) -> ReservationState:
    """BUDGET: time lowers the headroom by the steps of the reclaims that should have come in it."""
    tau_ns = settings.keep_ns  # a state of the other rule may have come from a predecessor
    exact = state.exact_handles or float(state.headroom_handles)
    exact -= _lowered_per_ns(state, now_ns, settings) * max(0, now_ns - (state.looked_ns or now_ns))
    exact = min(max(exact, float(settings.headroom_min_handles)), float(settings.headroom_max_handles))
    return replace(state, exact_handles=exact, headroom_handles=math.floor(exact), tau_ns=tau_ns, looked_ns=now_ns)


def _lowered_per_ns(state: ReservationState, now_ns: int, settings: ReservationSettings) -> float:
    """BUDGET: handles. Up to twice the steps of the accepted reclaims where none came, none where twice as many did."""
    an_hour = settings.spend_share * settings.target_per_hour
    counted_ns = min(max(now_ns - state.began_ns, FIRST_NS), settings.window_ns)
    pace = max(0.0, 2 - len(state.reclaims_ns) * HOUR_NS / (an_hour * counted_ns))
    return settings.step_handles * an_hour / HOUR_NS * pace


def _raised(state: ReservationState, memory: OnlineMemory, settings: ReservationSettings) -> tuple[int, float]:
    """The headroom after a pressure event, and with its fraction."""
    if settings.rule is ReservationRule.MIAD:
        headroom = min(math.ceil(settings.alpha * state.headroom_handles), settings.headroom_max_handles)
        return headroom, float(headroom)
    needed = memory.used_handles + memory.unmet_handles
    wanted = _mapping(state, needed, state.headroom_handles, settings)
    if min(wanted, memory.pool_handles) - memory.mapped_handles <= memory.free_handles:
        return state.headroom_handles, state.exact_handles  # free memory serves it, and costs nobody anything
    exact = min(state.exact_handles + settings.step_handles, float(settings.headroom_max_handles))
    return math.floor(exact), exact


def _grow(
    state: ReservationState, memory: OnlineMemory, now_ns: int, settings: ReservationSettings
) -> tuple[ReservationState, ReservationDecision]:
    headroom, exact = _raised(state, memory, settings)
    needed = memory.used_handles + memory.unmet_handles
    wanted = _mapping(state, needed, headroom, settings)
    take = max(0, min(wanted, memory.pool_handles) - memory.mapped_handles)
    is_reclaim = take > memory.free_handles
    if not take:  # everything is mapped: each look sees the same pressure, and a larger reserve would bring nothing
        headroom, exact = state.headroom_handles, state.exact_handles
    reclaims = (*state.reclaims_ns, now_ns) if is_reclaim else state.reclaims_ns
    grown = replace(state, headroom_handles=headroom, exact_handles=exact, quiet_since_ns=now_ns, reclaims_ns=reclaims)
    is_above = is_reclaim and reclaims_per_hour(grown, settings) > settings.target_per_hour
    if is_above and settings.rule is ReservationRule.MIAD:
        longer = min(math.ceil(settings.beta * state.tau_ns), settings.tau_max_ns)
        grown = replace(grown, tau_ns=longer, adjusted_ns=now_ns)
    cause = "allocation beyond headroom" if memory.unmet_handles else "headroom nearly used up"
    action = ReservationAction.TAKE if take else ReservationAction.HOLD
    reason = cause if take else f"{cause}, but everything is mapped already"
    return grown, _decision(grown, memory, settings, action, take, reason, is_reclaim)


def _shorten_tau(state: ReservationState, now_ns: int, settings: ReservationSettings) -> ReservationState:
    if now_ns - state.adjusted_ns < settings.adjust_every_ns:
        return state
    if reclaims_per_hour(state, settings) > settings.target_per_hour:
        return replace(state, adjusted_ns=now_ns)
    return replace(state, tau_ns=max(state.tau_ns - settings.delta_ns, settings.tau_min_ns), adjusted_ns=now_ns)


def _is_spent(state: ReservationState, settings: ReservationSettings) -> bool:
    return reclaims_per_hour(state, settings) >= settings.hold_share * settings.target_per_hour


def _lower(state: ReservationState, now_ns: int, settings: ReservationSettings) -> ReservationState:
    """MIAD: a quiet tau takes one handle off the headroom."""
    if _is_spent(state, settings) or now_ns - state.quiet_since_ns < state.tau_ns:
        return state
    headroom = max(state.headroom_handles - 1, settings.headroom_min_handles)
    return replace(state, headroom_handles=headroom, exact_handles=float(headroom), quiet_since_ns=now_ns)


def _give_back(
    state: ReservationState, memory: OnlineMemory, now_ns: int, settings: ReservationSettings
) -> tuple[ReservationState, ReservationDecision]:
    hold = ReservationAction.HOLD
    if settings.rule is ReservationRule.BUDGET and now_ns - state.quiet_since_ns < state.tau_ns:
        return state, _decision(state, memory, settings, hold, 0, "memory was taken within tau")
    if _is_spent(state, settings):
        return state, _decision(state, memory, settings, hold, 0, "reclaims in the window use up the target")
    peak = max(most for _, most in state.peaks)
    surplus = memory.mapped_handles - _mapping(state, peak, state.headroom_handles, settings)
    if surplus <= 0:
        return state, _decision(state, memory, settings, hold, 0, "all but the headroom was in use within tau")
    return state, _decision(state, memory, settings, ReservationAction.GIVE, surplus, "idle for tau")


def _mapping(state: ReservationState, used: int, headroom: int, settings: ReservationSettings) -> int:
    """The handles to keep where so many are used."""
    if settings.rule is ReservationRule.MIAD:
        return max(used + headroom, _calm_mapping(used, settings))
    heading = math.floor(usage.expected(state.history, used) + headroom)
    return max(heading, used + settings.headroom_min_handles, _calm_mapping(used, settings))


def _calm_mapping(used: int, settings: ReservationSettings) -> int:
    """The least mapping at which `used` is no pressure."""
    return math.floor(used / settings.pressure_ratio) + 1 if used else 0


def _decision(
    state: ReservationState,
    memory: OnlineMemory,
    settings: ReservationSettings,
    action: ReservationAction,
    handles: int,
    reason: str,
    is_reclaim: bool = False,
) -> ReservationDecision:
    return ReservationDecision(
        action=action,
        handles=handles,
        is_reclaim=is_reclaim,
        headroom_handles=state.headroom_handles,
        tau_ns=state.tau_ns,
        reclaims_per_hour=reclaims_per_hour(state, settings),
        memory=memory,
        reason=reason,
    )
