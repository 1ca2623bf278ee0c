"""What the nodes of the simulated fleet would report at each moment: the scheduler sees nothing else.

As the product's nodes do: idle share of the last ten minutes, the last hour and the last 24, histogram of free memory
and pairwise alignment of the last hour. What is counted on comes from the product's own `forecast`, unless another rule
takes its place to be compared. What online uses at its peaks is not reported, so no job is refused for it. The week
wraps around, so the first day's reports rest on the last day.
"""

from __future__ import annotations

from collections.abc import Callable
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

HOUR, DAY = 6, 144
"""Windows of what a node keeps."""
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptIdle:
    """What a node has kept of its GPUs, [nodes, gpus]."""

    hour: Floats
    day: Floats
    buckets: NDArray[np.float32]
    """[144, nodes, gpus]: the day in its ten-minute buckets."""


Rule = Callable[[KeptIdle], Floats]
"""From what was kept to the idle share that is counted on."""


def shipped(seen: KeptIdle) -> Floats:
    """The product's own."""
    counted: Floats = forecast(seen.buckets[-1].astype(np.float64), seen.hour, seen.day).astype(np.float64)
    return counted


@dataclass(frozen=True, slots=True, kw_only=True)
class HourRows:
    """The hour that ended at one window."""

    idle: NDArray[np.float32]
    """[replicas]"""
    histogram: NDArray[np.float32]
    """[replicas, bins]"""
    both: NDArray[np.float32]
    """[nodes, gpus, gpus]: share of time in which both are busy."""


class ReportHistory:
    """Snapshots of ten minutes, shared by all schedulers; only the last few are kept."""

    def __init__(self, load: FleetLoad) -> None:
        self._load = load
        settings = load.settings
        self.nodes, self.gpus = settings.nodes, settings.gpus_per_node
        self.full_mib = settings.usable_gib * 1024
        means = load.idle.reshape(len(load.ranks), WINDOWS, MINUTES_PER_WINDOW).mean(axis=2, dtype=np.float32)
        self._idle = np.ascontiguousarray(means.T / STEPS)  # [windows, replicas]
        self._sums = np.concatenate([np.zeros((1, len(load.ranks))), np.cumsum(self._idle, axis=0, dtype=np.float64)])
        self._kept: dict[int, HourRows] = {}
        self._names = [f"node-{node:04d}" for node in range(self.nodes)]

    def fleet(self, window: int, open_gpus: NDArray[np.bool_], rule: Rule = shipped) -> Fleet:
        """The snapshot that the scheduler of the product ranks; `open_gpus` is shared, not copied."""
        shape = (self.nodes, self.gpus)
        replicas = self._load.replica_of_gpu
        rows = self._rows(window)
        hour, day = (self._mean(window, windows)[replicas].reshape(shape) for windows in (HOUR, DAY))
        earlier = np.arange(window - DAY, window) % WINDOWS
        return Fleet(
            names=self._names,
            standing=np.full(self.nodes, Standing.HARVESTING, dtype=np.int8),
            gpu_model=np.full(self.nodes, "H100"),
            full_mib=np.full(self.nodes, self.full_mib),
            idle=rule(
                KeptIdle(hour=hour, day=day, buckets=self._idle[earlier[:, None], replicas].reshape(DAY, *shape))
            ),
            histogram=rows.histogram[replicas].reshape(*shape, HISTOGRAM_BINS).astype(np.float64),
            online_peak=np.zeros(shape),
            alignment=self._alignment(rows.both, hour),
            open_gpus=open_gpus,
        )

    def nowcast(self, window: int, members: NDArray[np.int64], profile: WorkloadProfile) -> NDArray[np.float64]:
        """What the model says of sets of GPUs [sets, ranks] when it is told this very hour: its own error shows."""
        ranks, told = members.shape[1], self._rows((window // HOUR + 1) * HOUR)
        replicas = self._load.replica_of_gpu
        everywhere = told.idle[replicas].reshape(self.nodes, self.gpus).astype(np.float64)
        nodes, places = members[:, 0] // self.gpus, members % self.gpus
        alignment = self._alignment(told.both, everywhere)[nodes]
        rows = np.arange(len(members))[:, None, None]
        inside = alignment[rows, places[:, :, None], places[:, None, :]]
        runnable = runnable_share(everywhere[nodes[:, None], places], inside, np.arange(ranks)[None, :])[:, 0]
        histogram = told.histogram[replicas[members]].astype(np.float64)
        memory = memory_factor(histogram, memory_weights(profile, self.full_mib))
        share: NDArray[np.float64] = runnable * memory.min(axis=1)
        return share

    def _mean(self, window: int, windows: int) -> Floats:
        """Per replica over the windows before `window`, the week taken as a circle."""
        first = window - windows
        round_week = self._sums[WINDOWS] if first < 0 else 0.0
        mean: Floats = (self._sums[window] - self._sums[first % WINDOWS] + round_week) / windows
        return mean

    def _rows(self, window: int) -> HourRows:
        found = self._kept.get(window)
        if found is None:
            found = HourRows(
                idle=self._mean(window, HOUR).astype(np.float32),
                histogram=self._histogram(window),
                both=self._overlap(window),
            )
            self._kept[window] = found
            while len(self._kept) > 4:
                del self._kept[next(iter(self._kept))]
        return found

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

    def _histogram(self, window: int) -> NDArray[np.float32]:
        """Memory in each bin, weighted by how much offline could have used the minute."""
        replicas = len(self._load.ranks)
        rows = np.arange(replicas)[:, None] * HISTOGRAM_BINS
        to_bin = (np.arange(STEPS + 1) * HISTOGRAM_BINS // (STEPS + 1)).astype(np.int64)
        stop = window * MINUTES_PER_WINDOW
        minutes = np.arange(stop - HOUR * MINUTES_PER_WINDOW, stop) % MINUTES
        bins = rows + to_bin[self._load.free[:, minutes]]
        weights = self._load.idle[:, minutes].ravel() + 1e-3
        counted = np.bincount(bins.ravel(), weights=weights, minlength=replicas * HISTOGRAM_BINS)
        shaped = counted.reshape(replicas, HISTOGRAM_BINS)
        return np.asarray(shaped / shaped.sum(axis=1, keepdims=True), dtype=np.float32)

    def _overlap(self, window: int) -> NDArray[np.float32]:
        earlier = np.arange(window - HOUR, window) % WINDOWS
        busy = 1 - self._idle[earlier[:, None], self._load.replica_of_gpu]
        busy = busy.reshape(HOUR, self.nodes, self.gpus).transpose(1, 2, 0)
        return np.asarray(busy @ busy.transpose(0, 2, 1) / HOUR, dtype=np.float32)
