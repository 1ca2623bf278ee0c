"""The five schedulers of the cluster experiment behind one question: which GPU set on which node, expecting what.

`full` is the product's own `placement.rank`. The rivals see the same reports but ignore part of them; the oracle is
told the next three hours and knows the rule by which pods are moved. Each answers with a share per node and the set
that it means, -1 where it refuses.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from valve_scheduler.model import fits_share, memory_factor, memory_weights, set_members
from valve_scheduler.placement.rank import Fleet, GpuSets, Job, PlacementSettings, gpu_sets, rank
from valve_tools.sim.cluster_jobs import MODELS, Floats, Ints, Truth
from valve_tools.sim.cluster_load import WINDOWS
from valve_tools.sim.cluster_reports import ReportHistory, Rule, shipped

SCHEDULERS = ("random", "most-idle", "idle-x-memory", "full", "oracle")
PRODUCT = "full"
HORIZON = 18
"""Windows that the oracle is told: three hours."""
WORTH_IT = 3
"""Windows for which it wants a promise kept: with less it would itself miss more SLAs than it may."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeShares:
    """Per node: the predicted share of standalone throughput on the offered set."""

    share: Floats
    set_index: Ints
    score: Floats
    """What nodes are ordered by; the same as share but for the schedulers that cannot predict one."""


class Foresight:
    """True shares of the sets an oracle may use: single GPUs, neighbouring pairs, pairs of such pairs."""

    def __init__(self, truth: Truth, nodes: int) -> None:
        self.members = {
            ranks: np.array([row for row in set_members(ranks) if _is_neighbourly(row)]) for ranks in (1, 2, 4)
        }
        self.set_index = {
            ranks: np.array([i for i, row in enumerate(set_members(ranks)) if _is_neighbourly(row)])
            for ranks in (1, 2, 4)
        }
        self._nodes = nodes
        self._shares = [self._true_shares(truth, model) for model in range(len(MODELS))]

    def share(self, model: int, window: int, sla: float) -> Floats:
        """[nodes, sets]: mean of the windows that a pod of this SLA would stay there, -1 where it is not worth it.

        It stays until two windows in a row are below the SLA, and three hours at most: what comes later is not told.
        """
        ahead = self._shares[model][window : window + HORIZON]
        low = ahead < sla
        ends = np.zeros_like(low)
        ends[:-1] = low[1:] & low[:-1]
        is_moved = ends.any(axis=0)
        stays = np.where(is_moved, ends.argmax(axis=0) + 2, len(ahead))
        sums = np.cumsum(ahead, axis=0, dtype=np.float64)[stays - 1, np.arange(ahead.shape[1])]
        kept = np.where(is_moved, stays - 2, stays) >= min(WORTH_IT, len(ahead))
        worth: Floats = np.where(kept, sums / stays, -1.0).reshape(self._nodes, -1)
        return worth

    def _true_shares(self, truth: Truth, model: int) -> NDArray[np.float32]:
        members = self.members[MODELS[model].ranks]
        everywhere = (np.arange(self._nodes)[:, None, None] * 8 + members).reshape(-1, members.shape[1])
        shares = np.empty((WINDOWS, len(everywhere)), dtype=np.float32)
        for window in range(WINDOWS):
            shares[window] = truth.share(window, everywhere, model)[0]
        return shares


def _is_neighbourly(row: Ints) -> bool:
    return len(row) == 1 or all(row[i] % 2 == 0 and row[i + 1] == row[i] + 1 for i in range(0, len(row), 2))


class Scheduler:
    """One of SCHEDULERS over one run; remembers what it derived from the current hour's reports."""

    def __init__(
        self,
        name: str,
        reports: ReportHistory,
        foresight: Foresight | None,
        settings: PlacementSettings,
        seed: int,
        rule: Rule = shipped,
    ) -> None:
        self.name = name
        self.decision_ms: list[float] = []
        """CPU time of each ranking: the experiment shares its machine, a scheduler in production does not."""
        self._reports = reports
        self._foresight = foresight
        self._settings = settings
        self._rule = rule
        self._rng = np.random.default_rng(seed)
        self._window = -1
        self._fleet: Fleet | None = None
        self._sets: dict[int, GpuSets] = {}
        self._judged: dict[int, tuple[Floats, NDArray[np.bool_]]] = {}
        self._profiles = [model.profile(reports.full_mib / 1024) for model in MODELS]

    def offer(
        self, window: int, model: int, sla: float, avoid: frozenset[str], open_gpus: NDArray[np.bool_]
    ) -> NodeShares:
        if self._foresight is not None and self.name == "oracle":
            return self._foreseen(window, model, sla, open_gpus)
        fleet = self._view(window, open_gpus)
        if self.name == PRODUCT:
            sets = self._sets_of(fleet, MODELS[model].ranks)
            job = Job(gpus=MODELS[model].ranks, sla=sla, profile=self._profiles[model], avoid=avoid)
            began = time.thread_time()
            ranking = rank(fleet, sets, job, self._settings)
            self.decision_ms.append((time.thread_time() - began) * 1e3)
            share = np.where(ranking.set_index >= 0, ranking.share, 0.0)
            return NodeShares(share=share, set_index=ranking.set_index.astype(np.int64), score=share)
        return self._blind(fleet, model, sla)

    def nowcast(self, window: int, model: int, members: Ints) -> Floats:
        """The model's answer for running sets, told the hour they run in; nothing where the model does not place."""
        if self.name != PRODUCT:
            return np.zeros(len(members))
        return self._reports.nowcast(window, members, self._profiles[model])

    def _view(self, window: int, open_gpus: NDArray[np.bool_]) -> Fleet:
        if self._fleet is None or window != self._window:
            self._window, self._sets, self._judged = window, {}, {}
            self._fleet = self._reports.fleet(window, open_gpus, self._rule)
        if self._fleet.open_gpus is not open_gpus:
            self._fleet = replace(self._fleet, open_gpus=open_gpus)
        return self._fleet

    def _sets_of(self, fleet: Fleet, ranks: int) -> GpuSets:
        if ranks not in self._sets:
            self._sets[ranks] = gpu_sets(fleet.idle, fleet.alignment, ranks, self._settings)
        return self._sets[ranks]

    def _blind(self, fleet: Fleet, model: int, sla: float) -> NodeShares:
        """Feasible sets by chance, by idle time, or by idle time and memory; alignment is not looked at."""
        if model not in self._judged:
            self._judged[model] = self._judge(fleet, model)
        share, fits = self._judged[model]
        usable = fits & _all_open(fleet.open_gpus, set_members(MODELS[model].ranks))
        if self.name == "random":
            return _best(np.where(usable, self._rng.random(share.shape), -1.0), share)
        return _best(np.where(usable & (share >= sla), share, -1.0), share)

    def _judge(self, fleet: Fleet, model: int) -> tuple[Floats, NDArray[np.bool_]]:
        """What the reports say of every set: its share, and whether the job fits."""
        members = set_members(MODELS[model].ranks)
        profile, full_mib = self._profiles[model], self._reports.full_mib
        fits = np.asarray(fits_share(fleet.histogram, profile.fit_mib, full_mib) >= self._settings.fit_time)
        share = fleet.idle[:, members].min(axis=2)
        if self.name == "idle-x-memory":
            memory = memory_factor(fleet.histogram, memory_weights(profile, full_mib))
            share = share * memory[:, members].min(axis=2)
        all_fit: NDArray[np.bool_] = np.all(fits[:, members], axis=2)
        return share, all_fit

    def _foreseen(self, window: int, model: int, sla: float, open_gpus: NDArray[np.bool_]) -> NodeShares:
        assert self._foresight is not None
        ranks = MODELS[model].ranks
        share = self._foresight.share(model, window, sla)
        usable = _all_open(open_gpus, self._foresight.members[ranks]) & (share > 0)
        offer = _best(np.where(usable, share, -1.0), share)
        return replace(
            offer, set_index=np.where(offer.set_index >= 0, self._foresight.set_index[ranks][offer.set_index], -1)
        )


def _all_open(open_gpus: NDArray[np.bool_], members: Ints) -> NDArray[np.bool_]:
    """[nodes, sets]: a node's open GPUs as bits of one byte, compared with each set at once."""
    have = np.packbits(open_gpus, axis=1, bitorder="little")
    wanted = (1 << members).sum(axis=1).astype(np.uint8)
    is_open: NDArray[np.bool_] = (have & wanted) == wanted
    return is_open


def _best(score: Floats, share: Floats) -> NodeShares:
    index = score.argmax(axis=1)
    rows = np.arange(len(index))
    best = score[rows, index]
    found = best >= 0
    return NodeShares(
        share=np.where(found, share[rows, index], 0.0),
        set_index=np.where(found, index, -1),
        score=np.where(found, best, 0.0),
    )
