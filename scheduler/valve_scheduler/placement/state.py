"""The whole cluster in numpy arrays: a row of figures for each node that reports, and which of its GPUs are taken.

One asyncio loop owns it; events and requests come one at a time. A report recomputes its own row only. `holdings.py`
knows the holders of GPUs, `asked.py` what a pod asks for."""

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import replace
from itertools import repeat

import numpy as np
from numpy.typing import NDArray
from valve_kube.objects import NodeReport
from valve_kube.policies import Policies

from valve_scheduler.model import HISTOGRAM_BINS, MAX_GPUS, belief, set_members
from valve_scheduler.model.curve import FloatArray
from valve_scheduler.placement.asked import Asked
from valve_scheduler.placement.holdings import HeldGpus
from valve_scheduler.placement.rank import Fleet, GpuSets, PlacementSettings, Standing, gpu_sets

# A report is written every 30 s, so three in a row were lost.
STALE_AFTER_S = 90.0

_Windows = tuple[float | None, float | None, float | None]
"""Idle share of a node in the last ten minutes, hour and day."""
_NOTHING_SEEN = (np.zeros(0),) * 4


class ClusterState:
    """Rows grow by doubling and are reused. `generation` counts changes of rows; profiles and avoid lists are
    part of a `Job`, not of the rows."""

    def __init__(
        self, settings: PlacementSettings, capacity: int = 64, doubted: Callable[[], None] | None = None
    ) -> None:
        self.settings = settings
        self.generation = 0
        self._row_of: dict[str, int] = {}
        self._free_rows: list[int] = list(range(capacity))[::-1]
        self._names: list[str] = [""] * capacity
        self._uuids: list[tuple[str, ...]] = [()] * capacity
        self._seen: dict[str, tuple[FloatArray, FloatArray, FloatArray, FloatArray]] = {}
        self._marks: dict[str, tuple[int, float]] = {}  # of each node's last report
        self._skew_s: dict[str, float] = {}  # a node's clock less ours
        self._off = np.ones(capacity, dtype=np.bool_)
        self._observed_at_s = np.full(capacity, -np.inf)
        self._gpu_model = np.full(capacity, "", dtype="<U64")
        self._full_mib = np.zeros(capacity)
        self._idle = np.zeros((capacity, MAX_GPUS), dtype=np.float32)
        self.belief = np.zeros((capacity, MAX_GPUS), dtype=np.float32)  # share of `idle` that may be promised
        self._histogram = np.zeros((capacity, MAX_GPUS, HISTOGRAM_BINS), dtype=np.float32)
        self._online_peak = np.zeros((capacity, MAX_GPUS), dtype=np.float32)
        self._alignment = np.zeros((capacity, MAX_GPUS, MAX_GPUS), dtype=np.float32)
        self._harvestable = np.zeros((capacity, MAX_GPUS), dtype=np.bool_)
        self._taken = np.zeros((capacity, MAX_GPUS), dtype=np.bool_)
        self._theta = np.full(capacity, settings.theta)
        self._changed_at = np.zeros(capacity, dtype=np.int64)  # generation of the last change of a row
        self._standing: NDArray[np.int8] | None = None  # the last judgement; None: a report may have changed it
        self._judged_at_s = self._stale_from_s = 0.0  # when it was made, and when time alone changes it
        self._sets: dict[int, GpuSets] = {}
        self.policies = Policies()
        self.held = HeldGpus(self._recount, doubted)
        self.asked = Asked(self._row_of)

    # Nodes

    def put_report(self, report: NodeReport, received_at_s: float, *, is_live: bool = True) -> None:
        """`is_live`: the watch delivered the report when it was written; else it was found in a list."""
        row = self._row_of.get(report.node)
        if row is None:
            row = self._new_row(report.node)
        self._uuids[row] = report.uuids
        self._seen[report.node] = report.recent, report.hour, report.day, report.history_s[: len(report.uuids)]
        is_off, fresh_at_s = report.phase != "Harvesting", self._fresh_at_s(row, report, received_at_s, is_live)
        if self._standing is not None:
            as_before = self._standing[row] == (Standing.OFF if is_off else Standing.HARVESTING)
            if not as_before or fresh_at_s < self._observed_at_s[row]:
                self._standing = None
        self._off[row] = is_off
        self._observed_at_s[row] = fresh_at_s
        self._gpu_model[row] = report.gpu_model
        self._full_mib[row] = report.full_mib
        self._idle[row] = report.idle
        self.belief[row] = belief(report.history_s)
        self._histogram[row] = report.histogram
        self._online_peak[row] = report.online_peak
        self._alignment[row] = report.alignment
        self._harvestable[row] = False
        self._harvestable[row, : len(report.harvestable)] = report.harvestable
        self._theta[row] = self.settings.theta if report.theta is None else report.theta
        for gpu_count, sets in self._sets.items():
            theta = float(self._theta[row])
            fresh = gpu_sets(self._idle[row], self._alignment[row], gpu_count, self.settings, theta)
            sets.runnable[row] = fresh.runnable
            sets.aligned[row] = fresh.aligned
        self._recount(report.node)

    def _fresh_at_s(self, row: int, report: NodeReport, received_at_s: float, is_live: bool) -> float:
        """When the report was new, by our own clock: a node whose clock is wrong is neither stale nor fresh for ever.

        A report that follows another one is as old as its arrival. For one from a list, the API server's time of
        writing counts; if there is none, the node's own time.
        """
        mark, before = (report.epoch, report.observed_at_s), self._marks.get(report.node)
        self._marks[report.node] = mark
        if mark == before:
            return float(self._observed_at_s[row])
        if is_live and before is not None:
            self._skew_s[report.node] = report.observed_at_s - received_at_s
            return received_at_s
        written_at_s = report.observed_at_s if report.written_at_s is None else report.written_at_s

        return min(written_at_s, received_at_s)

    def worst_skew_s(self) -> float:
        """How far the worst clock of all nodes is off. The delay of a report on its way counts, too."""
        return max(map(abs, self._skew_s.values()), default=0.0)

    def drop_report(self, node: str) -> None:
        row = self._row_of.pop(node, None)
        if row is None:
            return
        self.asked.nodes_changed()
        self._names[row] = ""
        self._seen.pop(node, None)
        self._marks.pop(node, None)
        self._skew_s.pop(node, None)
        self._uuids[row] = ()
        self._harvestable[row] = False
        self._observed_at_s[row] = -np.inf
        self._standing = None
        self._free_rows.append(row)
        self._touch(row)

    def row(self, node: str) -> int | None:
        return self._row_of.get(node)

    def rows(self, nodes: Sequence[str]) -> NDArray[np.intp]:
        """The row of each node, -1 for those that never reported."""
        return np.fromiter(map(self._row_of.get, nodes, repeat(-1)), dtype=np.intp, count=len(nodes))

    def changed_since(self, generation: int) -> NDArray[np.bool_]:
        """Rows whose place in a ranking may have changed."""
        return self._changed_at > generation

    def uuids(self, node: str, gpus: Iterable[int]) -> tuple[str, ...]:
        known = self._uuids[self._row_of[node]]
        return tuple(known[gpu] for gpu in gpus)

    def idle_windows(self, node: str) -> _Windows:
        """Mean idle share of its GPUs in each window of the forecast, for people."""
        recent, hour, day = map(_mean, self._seen.get(node, _NOTHING_SEEN)[:3])
        return recent, hour, day

    def history_s(self, node: str, gpus: Iterable[int]) -> float:
        """Observed time behind the forecast, of the GPU among these that was observed least."""
        return float(min(self._seen[node][3][list(gpus)]))

    def fresh_gpus(self, now_s: float) -> dict[str, frozenset[str]]:
        """The GPUs of each node that has reported lately."""
        ages = now_s - self._observed_at_s
        return {node: frozenset(self._uuids[row]) for node, row in self._row_of.items() if ages[row] <= STALE_AFTER_S}

    def row_names(self) -> Sequence[str]:
        """The node of each row, empty for an unused row."""
        return self._names

    def node_names(self) -> list[str]:
        return list(self._row_of)

    def report_ages_s(self, now_s: float) -> FloatArray:
        """Of the nodes that should report. A daemon is away from its node during a driver upgrade."""
        rows = [row for row in self._row_of.values() if not self._off[row]]
        return now_s - self._observed_at_s[rows]

    # Views for a decision

    def fleet(self, now_s: float) -> Fleet:
        """Views of the arrays, not copies: valid until the next event is handled."""
        return Fleet(
            names=self._names,
            standing=self._stand(now_s),
            gpu_model=self._gpu_model,
            full_mib=self._full_mib,
            idle=self._idle,
            histogram=self._histogram,
            online_peak=self._online_peak,
            alignment=self._alignment,
            open_gpus=self._harvestable & ~self._taken,
        )

    def _stand(self, now_s: float) -> NDArray[np.int8]:
        """A new array each time: rankings compare it with the array that they were made from."""
        kept = self._standing
        if kept is None or not self._judged_at_s <= now_s < self._stale_from_s:
            late = now_s - self._observed_at_s > STALE_AFTER_S
            present = np.where(self._off, np.int8(Standing.OFF), np.int8(Standing.HARVESTING))
            kept = self._standing = np.where(late, np.int8(Standing.STALE), present)
            self._judged_at_s = now_s
            self._stale_from_s = float(self._observed_at_s[~late].min(initial=np.inf)) + STALE_AFTER_S
        return kept

    def open_fleet(self, now_s: float) -> Fleet:
        """The fleet as if every node harvested and no offline job ran."""
        counts = np.fromiter(map(len, self._uuids), dtype=np.intp, count=len(self._uuids))
        return replace(
            self.fleet(now_s),
            standing=np.full(len(self._names), Standing.HARVESTING, dtype=np.int8),
            open_gpus=np.arange(MAX_GPUS) < counts[:, None],
        )

    def sets(self, gpu_count: int) -> GpuSets:
        """Set figures of every node for jobs of this size.

        Computed once, then row by row with each report.
        """
        if gpu_count not in self._sets:
            self._sets[gpu_count] = gpu_sets(self._idle, self._alignment, gpu_count, self.settings, self._theta)
        return self._sets[gpu_count]

    def check_integrity(self) -> None:
        """Every taken bit belongs to a holding or a reservation, and no GPU belongs to two pods."""
        self.held.check_integrity()
        for node, row in self._row_of.items():
            if not np.array_equal(self._bits(row, self.held.of_node(node)), self._taken[row]):
                raise AssertionError(f"taken GPUs of {node} differ from the sum of holdings")

    def _touch(self, row: int) -> None:
        self.generation += 1
        self._changed_at[row] = self.generation

    def _recount(self, node: str) -> None:
        row = self._row_of.get(node)
        if row is not None:
            self._touch(row)
            self._taken[row] = self._bits(row, self.held.of_node(node))

    def _bits(self, row: int, uuids: Container[str]) -> NDArray[np.bool_]:
        known = self._uuids[row]
        bits = np.zeros(MAX_GPUS, dtype=np.bool_)
        bits[: len(known)] = [uuid in uuids for uuid in known]

        return bits

    def _new_row(self, node: str) -> int:
        if not self._free_rows:
            self._grow()
        row = self._free_rows.pop()
        self._row_of[node] = row
        self.asked.nodes_changed()
        self._names[row] = node

        return row

    def _grow(self) -> None:
        old = len(self._names)
        self._free_rows = list(range(old, 2 * old))[::-1]
        self._names += [""] * old
        self._uuids += [()] * old
        self._standing = None
        for name, array in list(vars(self).items()):
            if isinstance(array, np.ndarray):  # each has a row for each node
                setattr(self, name, np.concatenate([array, np.zeros_like(array)]))
        self._observed_at_s[old:] = -np.inf
        self._off[old:] = True
        for gpu_count, sets in self._sets.items():
            pad = ((0, old), (0, 0))
            self._sets[gpu_count] = GpuSets(
                members=set_members(gpu_count),
                runnable=np.pad(sets.runnable, pad),
                aligned=np.pad(sets.aligned, pad),
            )


def _mean(shares: FloatArray) -> float | None:
    known = shares[~np.isnan(shares)]
    return float(known.mean()) if len(known) else None
