"""What the nodes of the simulated fleet would report every hour: the scheduler sees nothing else.

As the product's nodes do: idle share of the last hour and of the last 24, histogram of free memory and pairwise
alignment of the last hour. What is counted on comes from the product's own `forecast`. The week wraps around, so the
first day's reports rest on the last day.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from valve_scheduler.model import (
    HISTOGRAM_BINS,
    WorkloadProfile,
    forecast,
    memory_factor,
    memory_weights,
    runnable_share,
)
from valve_scheduler.placement.rank import Fleet, Standing
from valve_tools.sim.cluster_load import MINUTES, MINUTES_PER_WINDOW, STEPS, WINDOWS, FleetLoad

HOURS = WINDOWS // 6
DAY = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """One row an hour."""

    idle: NDArray[np.float32]
    """[hours, replicas]"""
    histogram: NDArray[np.float32]
    """[hours, replicas, bins]"""
    both: NDArray[np.float32]
    """[hours, nodes, gpus, gpus]: share of time in which both are busy."""


class Reports:
    """Hourly snapshots, computed once and shared by all schedulers."""

    def __init__(self, load: FleetLoad) -> None:
        self._load = load
        settings = load.settings
        self.nodes, self.gpus = settings.nodes, settings.gpus_per_node
        self.full_mib = settings.usable_gib * 1024
        windows = load.idle.reshape(len(load.ranks), WINDOWS, MINUTES_PER_WINDOW).mean(axis=2, dtype=np.float32)
        self._hourly = Rows(
            idle=windows.reshape(len(load.ranks), HOURS, 6).mean(axis=2).T / STEPS,
            histogram=self._hourly_histograms(),
            both=self._hourly_overlaps(windows / STEPS),
        )
        self._before = Rows(
            idle=np.roll(self._hourly.idle, 1, axis=0),
            histogram=np.roll(self._hourly.histogram, 1, axis=0),
            both=np.roll(self._hourly.both, 1, axis=0),
        )
        """The hour before each."""
        self._daily = _last_day(self._hourly.idle)
        self._names = [f"node-{node:04d}" for node in range(self.nodes)]

    def fleet(self, hour: int, open_gpus: NDArray[np.bool_]) -> Fleet:
        """The snapshot that the scheduler of the product ranks; `open_gpus` is shared, not copied."""
        shape = (self.nodes, self.gpus)
        replicas = self._load.replica_of_gpu
        before = self._before
        last_hour, last_day = (
            shares[hour][replicas].reshape(shape).astype(np.float64) for shares in (before.idle, self._daily)
        )
        return Fleet(
            names=self._names,
            standing=np.full(self.nodes, Standing.HARVESTING, dtype=np.int8),
            gpu_model=np.full(self.nodes, "H100"),
            full_mib=np.full(self.nodes, self.full_mib),
            idle=forecast(last_hour, last_day),
            histogram=before.histogram[hour][replicas].reshape(*shape, HISTOGRAM_BINS).astype(np.float64),
            alignment=self._alignment(before.both[hour], last_hour),
            open_gpus=open_gpus,
        )

    def nowcast(self, hour: int, members: NDArray[np.int64], profile: WorkloadProfile) -> NDArray[np.float64]:
        """What the model says of sets of GPUs [sets, ranks] when it is told this very hour: its own error shows."""
        ranks, hourly = members.shape[1], self._hourly
        replicas = self._load.replica_of_gpu
        everywhere = hourly.idle[hour][replicas].reshape(self.nodes, self.gpus).astype(np.float64)
        nodes, places = members[:, 0] // self.gpus, members % self.gpus
        alignment = self._alignment(hourly.both[hour], everywhere)[nodes]
        rows = np.arange(len(members))[:, None, None]
        inside = alignment[rows, places[:, :, None], places[:, None, :]]
        runnable = runnable_share(everywhere[nodes[:, None], places], inside, np.arange(ranks)[None, :])[:, 0]
        histogram = hourly.histogram[hour][replicas[members]].astype(np.float64)
        memory = memory_factor(histogram, memory_weights(profile, self.full_mib))
        share: NDArray[np.float64] = runnable * memory.min(axis=1)
        return share

    def _alignment(self, overlap: NDArray[np.float32], idle: NDArray[np.float64]) -> NDArray[np.float64]:
        busy = 1 - idle
        both = overlap.astype(np.float64)
        either = busy[:, :, None] + busy[:, None, :] - both
        aligned = np.divide(both, either, out=np.ones_like(both), where=either > 1e-9)
        replicas = self._load.replica_of_gpu.reshape(self.nodes, self.gpus)
        same = replicas[:, :, None] == replicas[:, None, :]
        own = np.broadcast_to(self._load.rank_alignment[replicas][:, :, None], same.shape)
        diagonal = np.eye(self.gpus, dtype=np.bool_)
        return np.where(diagonal, 1.0, np.where(same, own, np.clip(aligned, 0.0, 1.0)))

    def _hourly_histograms(self) -> NDArray[np.float32]:
        """Memory in each bin, weighted by how much offline could have used the minute."""
        replicas = len(self._load.ranks)
        rows = np.arange(replicas)[:, None] * HISTOGRAM_BINS
        out = np.empty((HOURS, replicas, HISTOGRAM_BINS), dtype=np.float32)
        to_bin = (np.arange(STEPS + 1) * HISTOGRAM_BINS // (STEPS + 1)).astype(np.int64)
        for hour in range(HOURS):
            minutes = slice(hour * MINUTES // HOURS, (hour + 1) * MINUTES // HOURS)
            bins = rows + to_bin[self._load.free[:, minutes]]
            weights = self._load.idle[:, minutes].ravel() + 1e-3
            counted = np.bincount(bins.ravel(), weights=weights, minlength=replicas * HISTOGRAM_BINS)
            shaped = counted.reshape(replicas, HISTOGRAM_BINS)
            out[hour] = shaped / shaped.sum(axis=1, keepdims=True)
        return out

    def _hourly_overlaps(self, idle: NDArray[np.float32]) -> NDArray[np.float32]:
        busy = (1 - idle)[self._load.replica_of_gpu].reshape(self.nodes, self.gpus, HOURS, 6)
        busy = busy.transpose(2, 0, 1, 3)
        return np.asarray(busy @ busy.transpose(0, 1, 3, 2) / 6, dtype=np.float32)


def _last_day(hourly: NDArray[np.float32]) -> NDArray[np.float32]:
    """Mean over the 24 hours before each hour, the week taken as a circle."""
    total = np.cumsum(np.concatenate([hourly[-DAY:], hourly]), axis=0, dtype=np.float64)
    total = np.concatenate([np.zeros_like(total[:1]), total])
    return ((total[DAY : DAY + len(hourly)] - total[: len(hourly)]) / DAY).astype(np.float32)
