"""What a service's reserve was, for one that comes back: in its present layout, and within its present settings.

Called by kv/reserve when a service attaches.
"""

from __future__ import annotations

import math
from dataclasses import replace

from valved.model.memory import ReservationRule, ReservationState, UseHistory
from valved.policy.reservation import UNKNOWN_HANDLES, ReservationSettings


def resume(state: ReservationState, handle_bytes: int, settings: ReservationSettings) -> ReservationState:
    factor = state.handle_bytes / handle_bytes if state.handle_bytes else 1.0
    exact = factor * (state.exact_handles or state.headroom_handles)
    exact = min(max(exact, float(settings.headroom_min_handles)), float(settings.headroom_max_handles))
    tau_ns = min(max(state.tau_ns, settings.tau_min_ns), settings.tau_max_ns)
    return replace(
        state,
        headroom_handles=math.floor(exact),
        exact_handles=exact,
        tau_ns=tau_ns if settings.rule is ReservationRule.MIAD else settings.keep_ns,
        used_handles=math.ceil(factor * state.used_handles),
        peaks=tuple((at, used if used == UNKNOWN_HANDLES else math.ceil(factor * used)) for at, used in state.peaks),
        history=_in_units(state.history, factor),
        handle_bytes=handle_bytes,
    )


def _in_units(history: UseHistory, factor: float) -> UseHistory:
    """The same use, counted in handles of which `factor` are one of before."""
    weight, now, peak, squares, products = history.sums
    sums = (weight, factor * now, factor * peak, factor**2 * squares, factor**2 * products)
    return replace(history, recent=tuple(math.ceil(factor * used) for used in history.recent), sums=sums)
