"""How the engines of one GPU share its target of reclaims. A lone engine keeps its settings, and takes what it took.

Called by kv/reserve before and after each decision of valved/policy/reservation.py. That rule knows one engine and the
count of its GPU. With k engines the count settles where all k lower their headroom as fast as one of them reclaims, at
2k / (k + 1) of what the operator accepts. And bursts that come in one instant add k before anyone sees the first.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from valved.model.ids import GpuIndex
from valved.model.memory import OnlineMemory, ReservationDecision
from valved.policy.reservation import HOUR_NS, ReservationSettings

LEAST_SHARE = 1e-9
"""Above 0: where the window holds no reclaim, idle memory goes back whatever the target is."""
LAST_SHARE = 0.25
"""Of the largest headroom, at least; more where an engine has few reclaims an hour, as each must last longer. Where 30
are accepted, two engines had 32 with an eighth, and four and eight had 34 with half of what they take now."""


def sharers(gpus: Collection[GpuIndex], online: Collection[Collection[GpuIndex]]) -> int:
    """`online`: the GPUs of each online engine, with those of this one. How many are on the fullest GPU of this one."""
    return max((sum(gpu in others for others in online) for gpu in gpus), default=1)


def shared(settings: ReservationSettings, engines: int) -> ReservationSettings:
    """All lower their headroom so that together they spend what one would, and give nothing back while one reclaim of
    each other engine does not fit any more."""
    if engines < 2:
        return settings
    room = (engines - 1) / _accepted(settings)
    return replace(
        settings,
        spend_share=settings.spend_share * (engines + 1) / (2 * engines),
        hold_share=max(LEAST_SHARE, settings.hold_share - room),
    )


def last(
    decision: ReservationDecision, memory: OnlineMemory, before: int, engines: int, settings: ReservationSettings
) -> ReservationDecision:
    """`before`: reclaims in the window. Where no more is left than one for each engine, a reclaim takes enough for as
    long as nothing is given back: its engine should have no second one."""
    if engines < 2 or not decision.is_reclaim or before + engines < _accepted(settings):
        return decision
    share = min(1.0, max(LAST_SHARE, 4 * engines / _accepted(settings)))
    more = round(share * settings.headroom_max_handles)
    return replace(decision, handles=min(memory.pool_handles - memory.mapped_handles, decision.handles + more))


def _accepted(settings: ReservationSettings) -> float:
    """Reclaims in a window."""
    return settings.target_per_hour * settings.window_ns / HOUR_NS
