"""One week of one fleet under one scheduler: queue, placement, progress, SLA monitor, completion."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, fields

import numpy as np
from numpy.typing import NDArray
from valve_scheduler.controller.monitor import MonitorSettings, Owner, Sample, Track, Verdict, choose_evictions, evicted
from valve_scheduler.model import set_members
from valve_tools.sim.cluster_jobs import MODELS, Floats, Ints, JobTable, Truth
from valve_tools.sim.cluster_load import WINDOWS
from valve_tools.sim.cluster_schedulers import PRODUCT, Scheduler

WINDOW_H, WINDOW_S = 1 / 6, 600.0
PROMISE_WINDOWS = 18
"""A promise is judged over the three hours after the placement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """How the cluster runs; windows are ten minutes."""

    violation_windows: int = 5
    """45 minutes of a job's mean below the SLA, in whole windows: what counts as a miss here."""
    monitor: MonitorSettings = field(default_factory=MonitorSettings)
    """By which pods move: judged one by one in windows of ten minutes, chosen by the product's own function."""
    start_s: float = 120.0
    """Of a pod's first window, in which its engine loads and does nothing: what a move costs."""
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
    misses: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """Windows below the SLA in a row, up to now."""
    early: Floats = field(default_factory=lambda: np.zeros(0))
    """As achieved, of the windows in which the promise is judged."""
    broken: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, dtype=np.bool_))
    """It missed its SLA persistently while its promise was judged."""

    def add(self, job: int, model: int, members: Ints, predicted: Floats) -> None:
        count = len(members)
        padded = np.full((count, 4), -1, dtype=np.int64)
        padded[:, : members.shape[1]] = members
        came = {"job": np.full(count, job), "model": np.full(count, model), "members": padded, "predicted": predicted}
        for one in fields(self):
            column = getattr(self, one.name)
            new = came.get(one.name, np.zeros(count, dtype=column.dtype))
            setattr(self, one.name, np.concatenate([column, new]))

    def keep(self, kept: NDArray[np.bool_]) -> None:
        for one in fields(self):
            setattr(self, one.name, getattr(self, one.name)[kept])


@dataclass(slots=True)
class WeekTally:
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
    promises: list[tuple[float, float, float, bool]] = field(default_factory=list)
    """(predicted, achieved in the first three hours, SLA, kept) of each placement that was judged at all."""


class ClusterRun:
    """The books: every GPU holds at most one offline instance; a job's instances share its work."""

    def __init__(self, scheduler: Scheduler, truth: Truth, jobs: JobTable, nodes: int, settings: RunSettings) -> None:
        self.tally = WeekTally()
        self._scheduler, self._truth, self._jobs, self._settings = scheduler, truth, jobs, settings
        self._open = np.ones((nodes, 8), dtype=np.bool_)
        self._running = Instances()
        count = len(jobs.work)
        self._ranks = np.array([one.ranks for one in MODELS])
        self._unplaced = jobs.gpus // self._ranks[jobs.model]
        self._done = np.zeros(count)
        self._age = np.zeros(count, dtype=np.int64)
        self._below = np.zeros(count, dtype=np.int64)
        self._owners: dict[str, Owner] = {}
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
        self._judge_jobs(window, share)
        self._move(window, self._judge_pods(share))
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
        owner = self._owners.get(str(job), Owner())
        return frozenset(name for name, until_s in owner.avoid_until_s.items() if until_s > window * WINDOW_S)

    def _progress(self, window: int) -> tuple[Floats, Floats]:
        running = self._running
        share, ran = np.zeros(len(running.job)), np.zeros(len(running.job))
        for model in np.unique(running.model):
            rows = running.model == model
            members = running.members[rows, : MODELS[model].ranks]
            share[rows], ran[rows] = self._truth.share(window, members, int(model))
            running.nowcast[rows] += self._scheduler.nowcast(window, int(model), members)
        share *= np.where(running.windows == 0, 1 - self._settings.start_s / WINDOW_S, 1.0)
        running.achieved += share
        running.windows += 1
        np.add.at(self._done, running.job, share * self._ranks[running.model] * WINDOW_H)
        return share, ran

    def _judge_jobs(self, window: int, share: Floats) -> None:
        """What an owner sees: the mean over the job's pods, below the SLA for a while."""
        count = len(self._done)
        instances = np.bincount(self._running.job, minlength=count)
        active = instances > 0
        mean = np.bincount(self._running.job, weights=share, minlength=count) / np.maximum(instances, 1)
        self._age[active] += 1
        is_below = active & (self._age > 1) & (mean < self._jobs.sla)
        self._below = np.where(is_below, self._below + 1, 0)
        if window >= self._settings.counted_from:
            violating = self._below >= self._settings.violation_windows
            self.tally.job_hours += float(active.sum()) * WINDOW_H
            self.tally.below_job_hours += float(is_below.sum()) * WINDOW_H
            self.tally.missed_job_hours += float(violating.sum()) * WINDOW_H
            self.tally.violations += int((self._below == self._settings.violation_windows).sum())

    def _judge_pods(self, share: Floats) -> list[tuple[int, Track]]:
        """The monitor's rule: several windows in a row below the SLA, the one in which the engine starts left out."""
        one, rule = self._running, self._settings.monitor
        judged = one.windows > 1
        sla = self._jobs.sla[one.job]
        one.misses = np.where(judged & (share < sla), one.misses + 1, 0)
        missed = (one.misses >= rule.windows) & (one.windows * WINDOW_S >= rule.min_runtime_s)
        is_early = one.windows <= PROMISE_WINDOWS
        one.early = one.early + np.where(judged & is_early, share, 0.0)
        one.broken = one.broken | (missed & is_early)
        return [(row, self._track(row, float(share[row]))) for row in np.flatnonzero(missed).tolist()]

    def _track(self, row: int, achieved: float) -> Track:
        job = int(self._running.job[row])
        sample = Sample(
            pod_uid=f"{row:06d}",
            owner_uid=str(job),
            node=f"node-{self._running.members[row, 0] // 8:04d}",
            sla=float(self._jobs.sla[job]),
            standalone_tokens_per_s=1.0,
            runtime_s=0.0,
            demand_s=0.0,
            tokens=0.0,
        )
        return Track(sample=sample, verdict=Verdict.PERSISTENTLY_MISSED, achieved=achieved)

    def _move(self, window: int, missed: list[tuple[int, Track]]) -> None:
        """Moves the pods that the product's budget and back-off let go; the owner keeps off the node for a while."""
        if not missed:
            return
        rule, now_s = self._settings.monitor, window * WINDOW_S
        for track in choose_evictions([one for _, one in missed], self._owners, len(self._running.job), now_s, rule):
            row, uid = int(track.sample.pod_uid), track.sample.owner_uid
            self._owners[uid] = evicted(self._owners.get(uid, Owner()), track.sample.node, now_s, rule)
            self._to_move.append(row)
            self._unplaced[int(uid)] += 1
            if int(uid) not in self._queue:
                self._queue.appendleft(int(uid))
            if window >= self._settings.counted_from:
                self.tally.moved += 1

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
        judged = rows & (one.windows > self._settings.monitor.windows)
        early = one.early[judged] / (np.minimum(one.windows[judged], PROMISE_WINDOWS) - 1)
        promised = (one.predicted[judged], early, self._jobs.sla[one.job[judged]], ~one.broken[judged])
        self.tally.promises += list(zip(*(column.tolist() for column in promised), strict=True))
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


def run_week(run: ClusterRun) -> WeekTally:
    for window in range(WINDOWS):
        run.step(window)
        if window % 144 == 0:
            run.check_integrity()
    run.close()
    return run.tally
