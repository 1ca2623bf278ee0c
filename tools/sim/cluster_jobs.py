"""Offline jobs of the cluster experiment: what they ask for, and what they truly achieve on a set of GPUs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from valve_scheduler.model import ThroughputCurve, WorkloadProfile
from valve_tools.sim.cluster_load import MINUTES_PER_WINDOW, STEPS, FleetLoad

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
REQUEST_TOKENS, OUTPUT_TOKENS = 2900, 295
"""A summarising job: 2,600 in, 295 out."""
MIN_KV_GIB = 4.0


@dataclass(frozen=True)
class OfflineModel:
    """An offline engine on `ranks` GPUs; memory per GPU, timings of the whole engine (facts: Vidur tables)."""

    name: str
    ranks: int
    weights_gib: float
    kv_gib_per_token: float
    decode_base_s: float
    prefill_s_per_token: float
    overhead_gib: float = 3.0
    decode_s_per_sequence: float = 12e-6
    hbm_gib_per_s: float = 0.75 * 3.35e12 / 2**30
    max_sequences: int = 256

    @property
    def fit_gib(self) -> float:
        return self.weights_gib + self.overhead_gib + MIN_KV_GIB

    def requests_per_s(self, free_gib: Floats) -> Floats:
        """Continuous batching with as many sequences as their KV fits; nothing below the smallest cache."""
        kv = np.maximum(free_gib - self.weights_gib - self.overhead_gib, 0.0)
        batch = np.clip(kv / (self.kv_gib_per_token * REQUEST_TOKENS), 1.0, self.max_sequences)
        read_s = batch * REQUEST_TOKENS * self.kv_gib_per_token / self.hbm_gib_per_s
        step_s = self.decode_base_s + self.decode_s_per_sequence * batch + read_s
        each_s = (REQUEST_TOKENS - OUTPUT_TOKENS) * self.prefill_s_per_token + OUTPUT_TOKENS * step_s / batch
        return np.where(kv >= MIN_KV_GIB, 1.0 / each_s, 0.0)

    def profile(self, full_gib: float) -> WorkloadProfile:
        """What a profiling run at submission finds: the curve at nine sizes."""
        points = np.linspace(self.fit_gib, full_gib, 9)
        rates = self.requests_per_s(points.astype(np.float64))
        return WorkloadProfile(
            standalone_tokens_per_s=float(rates[-1]) * REQUEST_TOKENS,
            curve=ThroughputCurve(
                free_mib=tuple((points * 1024).tolist()), tokens_per_s=tuple((rates * REQUEST_TOKENS).tolist())
            ),
            fit_mib=self.fit_gib * 1024,
        )


MODELS = (
    OfflineModel("8B", 1, 15.0, 128 / 2**20, 6.0e-3, 22e-6),
    OfflineModel("14B", 1, 27.5, 192 / 2**20, 10.9e-3, 40e-6),
    OfflineModel("14B TP2", 2, 13.75, 96 / 2**20, 7.3e-3, 22e-6),
    OfflineModel("32B TP2", 2, 30.5, 128 / 2**20, 13.9e-3, 53e-6),
    OfflineModel("32B TP4", 4, 15.25, 64 / 2**20, 8.6e-3, 30e-6),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSettings:
    """Jobs of 1 to 64 GPUs' worth and 2 to 24 h of standalone work; the arrival rate follows from the demand."""

    gpus: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    hours: tuple[float, float] = (2.0, 24.0)
    sla: tuple[float, ...] = (0.2, 0.4, 0.6)
    model_weights: tuple[float, ...] = (1 / 3, 1 / 6, 1 / 6, 1 / 6, 1 / 6)
    """Of MODELS: 8B, 14B and 32B equally often, each on the GPU counts it is run on."""
    backlog_h: float = 24.0
    """Work in progress when the week starts, so that it starts loaded: arrivals of this long, half done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobTable:
    """All jobs of a run, by arrival; a job runs as gpus / ranks equal instances that share its work."""

    arrival: Ints
    """Window."""
    model: Ints
    gpus: Ints
    sla: Floats
    work: Floats
    """GPU-hours of standalone work."""


def draw_jobs(settings: JobSettings, demand_gpus: float, windows: int, seed: int) -> JobTable:
    """Poisson arrivals that bring `demand_gpus` GPUs' worth of standalone work an hour, and the backlog."""
    rng = np.random.default_rng(seed)
    per_hour = demand_gpus / (float(np.mean(settings.gpus)) * sum(settings.hours) / 2)
    begun = int(rng.poisson(per_hour * settings.backlog_h))
    counts = rng.poisson(per_hour / 6, windows)
    arrival = np.concatenate([np.zeros(begun, dtype=np.int64), np.repeat(np.arange(windows), counts)])
    total = len(arrival)
    model = rng.choice(len(MODELS), total, p=settings.model_weights)
    ranks = np.array([one.ranks for one in MODELS])[model]
    gpus = np.maximum(rng.choice(settings.gpus, total), ranks)
    left = np.where(np.arange(total) < begun, rng.random(total), 1.0)
    return JobTable(
        arrival=arrival,
        model=model,
        gpus=gpus,
        sla=rng.choice(settings.sla, total),
        work=gpus * rng.uniform(*settings.hours, total) * left,
    )


class Truth:
    """What really happens: minute by minute, with the true overlap of ranks and the true cost of lost memory."""

    def __init__(self, load: FleetLoad, recompute_s: float) -> None:
        """`recompute_s`: time lost when the whole cache is taken (eviction experiment, selective)."""
        self._load = load
        self._recompute_s = recompute_s
        gib = (np.arange(STEPS + 1) * (load.settings.usable_gib / STEPS)).astype(np.float64)
        alone = [float(one.requests_per_s(np.array([load.settings.usable_gib]))[0]) for one in MODELS]
        self._relative = [one.requests_per_s(gib) / full for one, full in zip(MODELS, alone, strict=True)]

    def share(self, window: int, members: Ints, model: int) -> tuple[Floats, Floats]:
        """(share of standalone throughput, share of time the set ran) of each set [sets, ranks] in one window."""
        first = window * MINUTES_PER_WINDOW
        minutes = slice(first, first + MINUTES_PER_WINDOW)
        replicas = self._load.replica_of_gpu[members]
        idle = self._load.idle[replicas, minutes] / STEPS
        free = self._load.free[replicas, minutes]
        together = self._joint_idle(idle, replicas)
        memory = self._relative[model][free].min(axis=1)
        return np.maximum((together * memory).mean(axis=1) - self._lost(window, replicas, model), 0.0), together.mean(
            axis=1
        )

    def supply(self, first: int, last: int) -> float:
        """Share of the fleet that jobs could have used in these windows, minute by minute, each GPU by a job of the
        model that gets most on it alone, at no cost. Whatever a policy knows, it saves no more."""
        minutes = slice(first * MINUTES_PER_WINDOW, last * MINUTES_PER_WINDOW)
        free = self._load.free[:, minutes]
        memory = np.max([relative[free] for relative in self._relative], axis=0)
        held = (self._load.idle[:, minutes] / STEPS * memory).mean(axis=1)
        return float(held[self._load.replica_of_gpu].mean())

    def _joint_idle(self, idle: Floats, replicas: Ints) -> Floats:
        """Different services are independent within the minute; ranks of one service overlap as its alignment says."""
        together = np.ones(idle[:, 0].shape)
        paired = replicas[:, 1:] == replicas[:, :-1]
        for rank in range(replicas.shape[1]):
            with_next = paired[:, rank] if rank < paired.shape[1] else np.zeros(len(replicas), dtype=np.bool_)
            with_last = paired[:, rank - 1] if rank else np.zeros(len(replicas), dtype=np.bool_)
            aligned = self._load.rank_alignment[replicas[:, rank]]
            union = np.minimum((1 - idle[:, rank]) * (2 / (1 + aligned))[:, None], 1.0)
            own = np.where(with_next[:, None], 1 - union, idle[:, rank])
            together *= np.where(with_last[:, None], 1.0, own)
        return together

    def _lost(self, window: int, replicas: Ints, model: int) -> Floats:
        """Memory that online took back during the window costs recomputation in proportion to the cache."""
        first = window * MINUTES_PER_WINDOW
        minutes = np.arange(first - 1, first + MINUTES_PER_WINDOW)
        free = self._load.free[replicas[:, :, None], minutes].astype(np.float64)
        taken = np.maximum(free[:, :, :-1] - free[:, :, 1:], 0.0).sum(axis=2).max(axis=1)
        cache = np.maximum(free[:, :, 0].min(axis=1) * (self._gib_per_step), 1.0) - MODELS[model].weights_gib
        share = taken * self._gib_per_step / np.maximum(cache - MODELS[model].overhead_gib, MIN_KV_GIB)
        lost: Floats = self._recompute_s / 600.0 * np.minimum(share, 1.0)
        return lost

    @cached_property
    def _gib_per_step(self) -> float:
        return self._load.settings.usable_gib / STEPS
