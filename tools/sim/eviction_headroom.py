"""Virtual hours of online memory demand against the reservation policy and against reservations that know the future.

The loads are seeded and their parameters are committed here: `stationary` is a queue with Poisson arrivals, log-normal
sizes and holding times; `bursty` switches between a calm and a busy rate; `long prompts` are few and eight times as
large; `heavy` fills half of the pool in the mean.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from valve_tools.sim.memory_policies import cheapest_steps

from valved.model.memory import OnlineMemory, ReservationAction
from valved.policy import reservation
from valved.policy.reservation import HOUR_NS, SECOND_NS, ReservationSettings

Series = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class DemandSettings:
    """A random online load on one GPU, in handles of 64 MiB."""

    hours: int = 8
    pool_handles: int = 576
    arrivals_per_s: float = 0.5
    handles_median: float = 2.0
    handles_sigma: float = 1.0
    hold_s_median: float = 15.0
    hold_s_sigma: float = 0.8
    busy_factor: float = 1.0
    """Rate in busy phases over the rate in calm ones; 1 makes the load stationary."""
    calm_s: float = 600.0
    busy_s: float = 60.0


STATIONARY = DemandSettings()
BURSTY = DemandSettings(arrivals_per_s=0.15, busy_factor=10.0)
LONG_PROMPTS = DemandSettings(arrivals_per_s=0.06, handles_median=16.0, handles_sigma=0.8)
HEAVY = DemandSettings(arrivals_per_s=3.0)  # half of the pool in the mean


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadroomResult:
    reclaims_per_hour: tuple[int, ...]
    worst_sliding_hour: int
    """Most reclaims in any 3,600 s after the first hour."""
    offline_share: float
    """Memory left to offline, time mean over the pool, after the first hour."""
    clairvoyant_share: float
    """The same for the best step function with as many reclaims an hour as the target, known future."""
    peak60_share: float
    """The same for a reservation of the peak of the next 60 s, whatever it reclaims."""


def demand(settings: DemandSettings, seed: int) -> Series:
    """Handles in use at each second."""
    rng = np.random.default_rng(seed)
    seconds = settings.hours * 3600
    rate = np.full(seconds, settings.arrivals_per_s)
    at = 0.0
    while settings.busy_factor > 1 and at < seconds:
        at += rng.exponential(settings.calm_s)
        end = at + rng.exponential(settings.busy_s)
        rate[int(at) : int(end)] *= settings.busy_factor
        at = end
    starts = np.repeat(np.arange(seconds), rng.poisson(rate))
    holds = rng.lognormal(np.log(settings.hold_s_median), settings.hold_s_sigma, len(starts))
    sizes = np.ceil(rng.lognormal(np.log(settings.handles_median), settings.handles_sigma, len(starts)))
    change = np.zeros(seconds + 1)
    np.add.at(change, starts, sizes)
    np.add.at(change, np.minimum(starts + np.ceil(holds).astype(int), seconds), -sizes)
    used: Series = np.cumsum(change[:seconds]).astype(np.int64)
    used = np.minimum(used, settings.pool_handles)
    return used


def run_headroom(used: Series, pool_handles: int, settings: ReservationSettings) -> HeadroomResult:
    """Second by second: the policy decides, the pool obeys at once; figures leave out the first hour."""
    state = reservation.start(0, settings)
    mapped = int(used[0]) + settings.headroom_min_handles
    left = np.zeros(len(used))
    reclaims: list[int] = []
    for second, now_used in enumerate(used.tolist()):
        memory = OnlineMemory(
            used_handles=min(now_used, mapped),
            mapped_handles=mapped,
            unmet_handles=max(0, now_used - mapped),
            pool_handles=pool_handles,
        )
        state, decision = reservation.decide(state, memory, second * SECOND_NS, settings)
        if decision.action is ReservationAction.TAKE:
            mapped += decision.handles
            reclaims.append(second)
        elif decision.action is ReservationAction.GIVE:
            mapped -= decision.handles
        left[second] = pool_handles - mapped
    at = np.array(reclaims, dtype=np.int64)
    hours = len(used) // 3600
    return HeadroomResult(
        reclaims_per_hour=tuple(int(n) for n in np.bincount(at // 3600, minlength=hours)[:hours]),
        worst_sliding_hour=_worst_hour(at[at >= 3600]),
        offline_share=float(left[3600:].mean()) / pool_handles,
        clairvoyant_share=1 - _clairvoyant_mapped(used[3600:], settings) / pool_handles,
        peak60_share=1 - float(_running_peak(used[3600:], 60).mean()) / pool_handles,
    )


def _worst_hour(at: Series) -> int:
    return int((np.searchsorted(at, at + 3600) - np.arange(len(at))).max(initial=0))


def _running_peak(used: Series, seconds: int) -> Series:
    padded = np.concatenate([used, np.repeat(used[-1:], seconds - 1)])
    peaks: Series = np.lib.stride_tricks.sliding_window_view(padded, seconds).max(axis=1)
    return peaks


def _clairvoyant_mapped(used: Series, settings: ReservationSettings, bucket_s: int = 20) -> float:
    """Mean of the cheapest mapping that covers the demand and grows at most `target` times in each clock hour."""
    per_window = settings.window_ns // SECOND_NS
    grows = int(settings.target_per_hour * settings.window_ns / HOUR_NS)
    windows = [used[i : i + per_window] for i in range(0, len(used), per_window)]
    return float(np.mean([cheapest_steps(_buckets(window, bucket_s), grows + 1).mean() for window in windows]))


def _buckets(used: Series, bucket_s: int) -> Series:
    peaks: Series = used[: len(used) // bucket_s * bucket_s].reshape(-1, bucket_s).max(axis=1)
    return peaks
