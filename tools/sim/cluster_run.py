"""One week of one fleet under one scheduler: queue, placement, progress, SLA monitor, completion."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from valve_scheduler.controller.monitor import MonitorSettings
from valve_scheduler.model import set_members
from valve_tools.sim.cluster_jobs import MODELS, Floats, Ints, JobTable, Truth
from valve_tools.sim.cluster_load import WINDOWS
from valve_tools.sim.cluster_schedulers import PRODUCT, Scheduler

WINDOW_H = 1 / 6
DAY_WINDOWS = 144
PRODUCT_RULE = MonitorSettings()


def _windows(seconds: float) -> int:
    return round(seconds / 600)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """How the cluster runs; windows are ten minutes."""

    violation_windows: int = 5
    """45 minutes below the SLA, in whole windows: what counts as a miss here."""
    move_windows: int = _windows(PRODUCT_RULE.window_s * PRODUCT_RULE.windows)
    """Windows below the SLA after which instances move."""
    warm_up_windows: int = 1
    backoff_windows: int = _windows(PRODUCT_RULE.backoff_s)
    """Between two evictions of one job."""
    moves_a_day: int = PRODUCT_RULE.max_rounds
    """Evictions of one job after which it stays where it is for the rest of the day."""
    moves_at_once: int = PRODUCT_RULE.at_once
    """Instances of a job that one eviction may move."""
    avoid_windows: int = _windows(PRODUCT_RULE.avoid_s)
    sla_margin: float = 1.0
    """The product asks for this multiple of the SLA, since a day's mean hides its busy hours."""
    searches_per_window: int = 60
    """Jobs for which the fleet is searched in one window, oldest first."""
    counted_from: int = 72
    """Figures leave out the first half day, in which the backlog is placed."""


@dataclass(slots=True)
class Instances:
    """Everything that runs, as parallel arrays."""

    job: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    model: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    members: Ints = field(default_factory=lambda: np.zeros((0, 4), dtype=np.int64))
    """GPU numbers, -1 beyond the model's ranks."""
    predicted: Floats = field(default_factory=lambda: np.zeros(0))
    achieved: Floats = field(default_factory=lambda: np.zeros(0))
    nowcast: Floats = field(default_factory=lambda: np.zeros(0))
    """Sum over windows of what the model says when it is told the hour itself."""
    windows: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))

    def add(self, job: int, model: int, members: Ints, predicted: Floats) -> None:
        count = len(members)
        padded = np.full((count, 4), -1, dtype=np.int64)
        padded[:, : members.shape[1]] = members
        self.job = np.concatenate([self.job, np.full(count, job)])
        self.model = np.concatenate([self.model, np.full(count, model)])
        self.members = np.concatenate([self.members, padded])
        self.predicted = np.concatenate([self.predicted, predicted])
        self.achieved = np.concatenate([self.achieved, np.zeros(count)])
        self.nowcast = np.concatenate([self.nowcast, np.zeros(count)])
        self.windows = np.concatenate([self.windows, np.zeros(count, dtype=np.int64)])

    def keep(self, kept: NDArray[np.bool_]) -> None:
        self.job, self.model, self.members = self.job[kept], self.model[kept], self.members[kept]
        self.predicted, self.achieved, self.nowcast = self.predicted[kept], self.achieved[kept], self.nowcast[kept]
        self.windows = self.windows[kept]


@dataclass(slots=True)
class Tally:
    """Sums over the counted windows."""

    windows: int = 0
    harvested_gpus: float = 0.0
    saved_gpus: float = 0.0
    saved_in_sla_gpus: float = 0.0
    occupied_gpus: float = 0.0
    job_hours: float = 0.0
    missed_job_hours: float = 0.0
    below_job_hours: float = 0.0
    violations: int = 0
    moved: int = 0
    finished: int = 0
    predictions: list[tuple[float, float, int, int, float, int]] = field(default_factory=list)
    """(predicted, achieved, windows, first GPU, nowcast, model) of each instance that ran an hour or longer."""


class ClusterRun:
    """The books: every GPU holds at most one offline instance; a job's instances share its work."""

    def __init__(self, scheduler: Scheduler, truth: Truth, jobs: JobTable, nodes: int, settings: RunSettings) -> None:
        self.tally = Tally()
        self._scheduler, self._truth, self._jobs, self._settings = scheduler, truth, jobs, settings
        self._open = np.ones((nodes, 8), dtype=np.bool_)
        self._running = Instances()
        count = len(jobs.work)
        self._ranks = np.array([one.ranks for one in MODELS])
        self._unplaced = jobs.gpus // self._ranks[jobs.model]
        self._done = np.zeros(count)
        self._age = np.zeros(count, dtype=np.int64)
        self._below = np.zeros(count, dtype=np.int64)
        self._moves: dict[int, list[int]] = {}  # windows of a job's evictions within a day
        self._avoid: dict[int, dict[str, int]] = {}
        self._queue: deque[int] = deque()
        self._arrived = 0
        self._to_move: list[int] = []

    def step(self, window: int) -> None:
        self._place(window)
        share, ran = self._progress(window)
        if window >= self._settings.counted_from:
            ranks = self._ranks[self._running.model]
            self.tally.windows += 1
            self.tally.harvested_gpus += float((ran * ranks).sum())
            self.tally.saved_gpus += float((share * ranks).sum())
            self.tally.occupied_gpus += float(ranks.sum())
        self._watch(window, share)
        if window >= self._settings.counted_from:
            met = self._below[self._running.job] < self._settings.violation_windows
            self.tally.saved_in_sla_gpus += float((share * ranks)[met].sum())
        self._finish()

    def close(self) -> None:
        self._record(np.ones(len(self._running.job), dtype=np.bool_))

    def check_integrity(self) -> None:
        used = self._running.members[self._running.members >= 0]
        if len(used) != len(np.unique(used)):
            raise AssertionError("a GPU runs two offline instances")
        if self._open.ravel()[used].any() or int((~self._open).sum()) != len(used):
            raise AssertionError("open GPUs and running instances disagree")

    @property
    def waiting(self) -> int:
        return len(self._queue)

    def _place(self, window: int) -> None:
        while self._arrived < len(self._jobs.arrival) and self._jobs.arrival[self._arrived] <= window:
            self._queue.append(self._arrived)
            self._arrived += 1
        refused: dict[int, float] = {}
        searches = len(self._queue) if window == 0 else self._settings.searches_per_window
        for _ in range(len(self._queue)):
            job = self._queue.popleft()
            model, sla = int(self._jobs.model[job]), float(self._jobs.sla[job])
            if searches > 0 and sla < refused.get(model, 2.0):
                searches -= 1
                self._place_job(window, job, model, sla)
                if self._unplaced[job] > 0:
                    refused[model] = sla  # nothing is left for it, nor for a stricter job
            if self._unplaced[job] > 0:
                self._queue.append(job)

    def _place_job(self, window: int, job: int, model: int, sla: float) -> None:
        """As many instances as find a place, best node first, one per node and round."""
        table = set_members(MODELS[model].ranks)
        avoid = self._avoided(job, window)
        asked = sla * self._settings.sla_margin if self._scheduler.name == PRODUCT else sla
        while self._unplaced[job] > 0:
            offer = self._scheduler.offer(window, model, asked, avoid, self._open)
            nodes = np.flatnonzero(offer.set_index >= 0)
            if len(nodes) == 0:
                break
            order = nodes[np.argsort(-offer.score[nodes], kind="stable")][: int(self._unplaced[job])]
            chosen = table[offer.set_index[order]]
            self._open[order[:, None], chosen] = False
            self._running.add(job, model, order[:, None] * 8 + chosen, offer.share[order])
            self._unplaced[job] -= len(order)

    def _avoided(self, job: int, window: int) -> frozenset[str]:
        return frozenset(name for name, until in self._avoid.get(job, {}).items() if until > window)

    def _progress(self, window: int) -> tuple[Floats, Floats]:
        running = self._running
        share, ran = np.zeros(len(running.job)), np.zeros(len(running.job))
        for model in np.unique(running.model):
            rows = running.model == model
            members = running.members[rows, : MODELS[model].ranks]
            share[rows], ran[rows] = self._truth.share(window, members, int(model))
            running.nowcast[rows] += self._scheduler.nowcast(window, int(model), members)
        running.achieved += share
        running.windows += 1
        np.add.at(self._done, running.job, share * self._ranks[running.model] * WINDOW_H)
        return share, ran

    def _watch(self, window: int, share: Floats) -> None:
        """The product's SLA rule, per job: persistently below, after warm-up, then its worst instances move."""
        count = len(self._done)
        instances = np.bincount(self._running.job, minlength=count)
        active = instances > 0
        mean = np.bincount(self._running.job, weights=share, minlength=count) / np.maximum(instances, 1)
        self._age[active] += 1
        judged = active & (self._age > self._settings.warm_up_windows)
        is_below = judged & (mean < self._jobs.sla)
        self._below = np.where(is_below, self._below + 1, 0)
        violating = self._below >= self._settings.violation_windows
        if window >= self._settings.counted_from:
            self.tally.job_hours += float(active.sum()) * WINDOW_H
            self.tally.below_job_hours += float(is_below.sum()) * WINDOW_H
            self.tally.missed_job_hours += float(violating.sum()) * WINDOW_H
            self.tally.violations += int((self._below == self._settings.violation_windows).sum())
        leaving = self._below >= self._settings.move_windows
        for job in np.flatnonzero(leaving).tolist():
            if self._may_move(window, job):
                self._move(window, job, share)

    def _may_move(self, window: int, job: int) -> bool:
        settings = self._settings
        moves = self._moves[job] = [at for at in self._moves.get(job, []) if window - at < DAY_WINDOWS]
        is_worn = len(moves) >= settings.moves_a_day
        return not is_worn and (not moves or window - moves[-1] >= settings.backoff_windows)

    def _move(self, window: int, job: int, share: Floats) -> None:
        """Evict the instances that are themselves below the SLA, worst first, and avoid their nodes for a while."""
        rows = np.flatnonzero((self._running.job == job) & (share < self._jobs.sla[job]))
        rows = rows[np.argsort(share[rows])][: self._settings.moves_at_once]
        nodes = self._running.members[rows, 0] // 8
        until = window + self._settings.avoid_windows
        self._avoid.setdefault(job, {}).update((f"node-{node:04d}", until) for node in nodes)
        self._moves[job].append(window)
        self._to_move += rows.tolist()
        self._unplaced[job] += len(rows)
        if job not in self._queue:
            self._queue.appendleft(job)
        if window >= self._settings.counted_from:
            self.tally.moved += len(rows)

    def _finish(self) -> None:
        done = self._done >= self._jobs.work
        over = done[self._running.job]
        self.tally.finished += len(np.unique(self._running.job[over]))
        over[self._to_move] = True
        self._to_move.clear()
        if over.any():
            self._record(over)
            gone = self._running.members[over]
            self._open.ravel()[gone[gone >= 0]] = True
            self._running.keep(~over)
            if done.any():
                self._unplaced[done] = 0
                self._queue = deque(job for job in self._queue if not done[job])

    def _record(self, rows: NDArray[np.bool_]) -> None:
        one = self._running
        rows = rows & (one.windows >= 6)
        windows = one.windows[rows]
        columns = (
            one.predicted[rows],
            one.achieved[rows] / windows,
            windows,
            one.members[rows, 0],
            one.nowcast[rows] / windows,
            one.model[rows],
        )
        self.tally.predictions += list(zip(*(column.tolist() for column in columns), strict=True))


def run_week(run: ClusterRun) -> Tally:
    for window in range(WINDOWS):
        run.step(window)
        if window % 144 == 0:
            run.check_integrity()
    run.close()
    return run.tally
