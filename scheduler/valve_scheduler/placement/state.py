"""The whole cluster in numpy arrays: node reports, who holds which GPU, what was promised a moment ago.

One asyncio loop owns it; events and requests come one at a time. A report recomputes its own row only. A GPU
is taken while a pod that is not finished names it in its annotation (truth, from the API server), while a
bind for it is under way (assumed: ours, for a bounded time), or for the moment between the choice of a node and its
bind (reserved). What the watch stops to vouch for is doubted and settled by a GET (`doubts.py`)."""

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import repeat

import numpy as np
from numpy.typing import NDArray
from valve_kube.objects import NodeReport, OfflinePod, PodPlace
from valve_kube.policies import Policies

from valve_scheduler.model import HISTOGRAM_BINS, MAX_GPUS, WorkloadProfile, set_members
from valve_scheduler.model.curve import FloatArray
from valve_scheduler.placement.grounds import Grounds
from valve_scheduler.placement.rank import Fleet, GpuSets, Job, PlacementSettings, Standing, gpu_sets

# A report is written every 30 s; three in a row were lost.
STALE_AFTER_S = 90.0
# Longer than the API server's own request time-out of 60 s: after it a lost Binding can no longer appear.
ASSUMED_FOR_S = 70.0
# Between the answer to prioritize and the call of bind lie milliseconds; what is not bound by then went elsewhere.
RESERVED_FOR_S = 2.0


# What has a row for each node.
_ARRAYS = (
    "_off",
    "_observed_at_s",
    "_gpu_model",
    "_full_mib",
    "_idle",
    "_histogram",
    "_online_peak",
    "_alignment",
    "_harvestable",
    "_taken",
    "_changed_at",
    "_theta",
)
_Windows = tuple[float | None, float | None, float | None]
"""Idle share of a node in the last ten minutes, hour and day."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """GPUs of a node that belong to one pod, and what was promised. assumed_until_s 0: the API server says so."""

    pod_uid: str
    node: str
    gpu_uuids: tuple[str, ...]
    assumed_until_s: float = 0.0
    namespace: str = ""
    name: str = field(default="", compare=False)
    share: float = field(default=0.0, compare=False)  # known only to the extender that chose, until it is bound


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """GPUs that one pod will be bound to in a moment; other pods are offered others."""

    node: str
    gpu_uuids: tuple[str, ...]
    until_s: float


class ClusterState:
    """Rows grow by doubling and are reused. `generation` counts changes of rows; profiles and avoid lists are
    part of a `Job`, not of the rows."""

    def __init__(self, settings: PlacementSettings, capacity: int = 64) -> None:
        self.settings = settings
        self.generation = self._row_changes = 0
        self._row_of: dict[str, int] = {}
        self._free_rows: list[int] = list(range(capacity))[::-1]
        self._names: list[str] = [""] * capacity
        self._uuids: list[tuple[str, ...]] = [()] * capacity
        self._seen: dict[str, _Windows] = {}
        self._marks: dict[str, tuple[int, float]] = {}  # of each node's last report
        self._skew_s: dict[str, float] = {}  # a node's clock less ours
        self._off = np.ones(capacity, dtype=np.bool_)
        self._observed_at_s = np.full(capacity, -np.inf)
        self._gpu_model = np.full(capacity, "", dtype="<U64")
        self._full_mib = np.zeros(capacity)
        self._idle = np.zeros((capacity, MAX_GPUS), dtype=np.float32)
        self._histogram = np.zeros((capacity, MAX_GPUS, HISTOGRAM_BINS), dtype=np.float32)
        self._online_peak = np.zeros((capacity, MAX_GPUS), dtype=np.float32)
        self._alignment = np.zeros((capacity, MAX_GPUS, MAX_GPUS), dtype=np.float32)
        self._harvestable = np.zeros((capacity, MAX_GPUS), dtype=np.bool_)
        self._taken = np.zeros((capacity, MAX_GPUS), dtype=np.bool_)
        self._theta = np.full(capacity, settings.theta)
        self._changed_at = np.zeros(capacity, dtype=np.int64)  # generation of the last change of a row
        self._sets: dict[int, GpuSets] = {}
        self._holdings: dict[str, Holding] = {}
        self._holders: defaultdict[str, set[str]] = defaultdict(set)  # node -> pod uids
        self._in_use: Counter[str] = Counter()  # namespace -> GPUs its offline pods hold
        self._reserved: OrderedDict[str, Reservation] = OrderedDict()  # pod uid, the oldest first
        self._doubts: dict[str, float] = {}  # pod uid -> when its holding must be verified
        self.on_doubt: Callable[[], None] | None = None  # None: nobody verifies, the watch alone is believed
        self.policies = Policies()
        self.grounds = Grounds()
        self._profiles: dict[tuple[str, str], WorkloadProfile] = {}
        self._avoid: dict[str, dict[str, float]] = {}  # owner uid -> node -> until

    # Nodes

    def put_report(self, report: NodeReport, received_at_s: float, *, is_live: bool = True) -> None:
        """`is_live`: told by the watch as it was written, not found in a list."""
        row = self._row_of.get(report.node)
        if row is None:
            row = self._new_row(report.node)
        self._uuids[row] = report.uuids
        self._seen[report.node] = _mean(report.recent), _mean(report.hour), _mean(report.day)
        self._off[row] = report.phase != "Harvesting"
        self._observed_at_s[row] = self._fresh_at_s(row, report, received_at_s, is_live)
        self._gpu_model[row] = report.gpu_model
        self._full_mib[row] = report.full_mib
        self._idle[row] = report.idle
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

        A report that another one went before is as old as its arrival. Of one found in a list the API server knows
        when it was written; only where it does not, the node's own word is taken.
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
        """How far the clock of a node is off, whichever is off most; delays of a report on its way count, too."""
        return max(map(abs, self._skew_s.values()), default=0.0)

    def drop_report(self, node: str) -> None:
        row = self._row_of.pop(node, None)
        if row is None:
            return
        self._row_changes += 1
        self._names[row] = ""
        self._seen.pop(node, None)
        self._marks.pop(node, None)
        self._skew_s.pop(node, None)
        self._uuids[row] = ()
        self._harvestable[row] = False
        self._observed_at_s[row] = -np.inf
        self._free_rows.append(row)
        self._touch(row)

    def row(self, node: str) -> int | None:
        return self._row_of.get(node)

    def rows(self, nodes: Sequence[str]) -> NDArray[np.intp]:
        """The row of each node, -1 for those that never reported."""
        return np.fromiter(map(self._row_of.get, nodes, repeat(-1)), dtype=np.intp, count=len(nodes))

    def changed_since(self, generation: int) -> NDArray[np.bool_]:
        """Rows that an event may have given another place in a ranking."""
        return self._changed_at > generation

    def uuids(self, node: str, gpus: Iterable[int]) -> tuple[str, ...]:
        known = self._uuids[self._row_of[node]]
        return tuple(known[gpu] for gpu in gpus)

    def idle_windows(self, node: str) -> _Windows:
        """Mean idle share of its GPUs in each window of the forecast, for people."""
        return self._seen.get(node, (None, None, None))

    def fresh_gpus(self, now_s: float) -> dict[str, frozenset[str]]:
        """The GPUs of each node that has reported lately."""
        ages = now_s - self._observed_at_s
        return {node: frozenset(self._uuids[row]) for node, row in self._row_of.items() if ages[row] <= STALE_AFTER_S}

    def row_names(self) -> Sequence[str]:
        """The node of each row, empty for a row of nobody."""
        return self._names

    def node_names(self) -> list[str]:
        return list(self._row_of)

    def report_ages_s(self, now_s: float) -> FloatArray:
        """Of the nodes that should report: a daemon leaves its node for the time of a driver upgrade."""
        rows = [row for row in self._row_of.values() if not self._off[row]]
        return now_s - self._observed_at_s[rows]

    # Pods

    def put_pod(self, pod: PodPlace) -> None:
        """What the API server says about an offline pod; it overrules anything assumed."""
        if pod.node and pod.gpu_uuids and not pod.finished:
            held = Holding(
                pod_uid=pod.uid, node=pod.node, gpu_uuids=pod.gpu_uuids, namespace=pod.namespace, name=pod.name
            )
            self._hold(held)
            self._doubts.pop(pod.uid, None)
        elif pod.node or pod.finished:
            self.release(pod.uid)
        # An unbound pod says nothing about a bind under way: the assumption stands until it is settled.

    def replace_pods(self, pods: Iterable[PodPlace]) -> None:
        """A whole consistent list: confirmed holdings not in it are doubted, assumed ones stay."""
        listed = {pod.uid: pod for pod in pods}
        for uid in list(self._holdings.keys() - listed.keys()):
            self.drop_pod(uid, is_deleted=False)
        for pod in listed.values():
            self.put_pod(pod)

    def drop_pod(self, uid: str, *, is_deleted: bool) -> None:
        """The watch shows the pod no more. Unless it was deleted it may have lost its label only, and run on."""
        holding = self._holdings.get(uid)
        if holding is None or holding.assumed_until_s:
            return  # the bind under way will tell
        if is_deleted or self.on_doubt is None:
            self.release(uid)
        else:
            self._doubts[uid] = 0.0
            self.on_doubt()

    def doubtful(self, now_s: float) -> list[Holding]:
        """Holdings that must be verified now."""
        return [self._holdings[uid] for uid, due_s in self._doubts.items() if due_s <= now_s]

    def settle(self, holding: Holding, found: PodPlace | None, now_s: float) -> bool:
        """What a GET said of a doubted holding. True: it was released."""
        if holding.pod_uid not in self._doubts:
            return False  # the watch has told meanwhile
        if found is None or found.uid != holding.pod_uid or found.finished or not found.node:
            self.release(holding.pod_uid)
            return True
        self._doubts[holding.pod_uid] = now_s + ASSUMED_FOR_S

        return False

    def reserve(self, pod_uid: str, node: str, gpu_uuids: tuple[str, ...], now_s: float) -> None:
        """Keep GPUs for a pod that is about to be bound to them."""
        self.unreserve(pod_uid)
        self._reserved[pod_uid] = Reservation(node=node, gpu_uuids=gpu_uuids, until_s=now_s + RESERVED_FOR_S)
        self._recount(node)

    def unreserve(self, pod_uid: str) -> None:
        reservation = self._reserved.pop(pod_uid, None)
        if reservation is not None:
            self._recount(reservation.node)

    def lapse(self, now_s: float) -> None:
        """Forget reservations that nothing came of."""
        while self._reserved and next(iter(self._reserved.values())).until_s <= now_s:
            self.unreserve(next(iter(self._reserved)))

    def assume(
        self,
        pod_uid: str,
        node: str,
        gpu_uuids: tuple[str, ...],
        now_s: float,
        namespace: str = "",
        share: float = 0.0,
        name: str = "",
    ) -> None:
        self._hold(
            Holding(
                pod_uid=pod_uid,
                node=node,
                gpu_uuids=gpu_uuids,
                assumed_until_s=now_s + ASSUMED_FOR_S,
                namespace=namespace,
                name=name,
                share=share,
            )
        )

    def confirm(self, pod_uid: str) -> None:
        """The API server accepted the Binding; the watch will say the same, or it is doubted."""
        holding = self._holdings.get(pod_uid)
        if holding is not None and holding.assumed_until_s:
            self._holdings[pod_uid] = replace(holding, assumed_until_s=0.0)
            if self.on_doubt is not None:
                self._doubts[pod_uid] = holding.assumed_until_s

    def release(self, pod_uid: str) -> None:
        holding = self._holdings.pop(pod_uid, None)
        self._doubts.pop(pod_uid, None)
        if holding is not None:
            self._in_use[holding.namespace] -= len(holding.gpu_uuids)
            self._holders[holding.node].discard(pod_uid)
            self._recount(holding.node)

    def expire(self, now_s: float) -> int:
        """Give up assumptions nothing came of. Only while the pod watch is live.

        Silence must mean something.
        """
        stale = [h.pod_uid for h in self._holdings.values() if 0 < h.assumed_until_s <= now_s]
        for uid in stale:
            self.release(uid)

        return len(stale)

    def holding(self, pod_uid: str) -> Holding | None:
        return self._holdings.get(pod_uid)

    def in_use(self, namespace: str) -> int:
        """GPUs that offline pods of the namespace hold or are about to."""
        return self._in_use[namespace]

    def holdings(self) -> list[Holding]:
        return list(self._holdings.values())

    # Jobs

    def put_profile(self, namespace: str, name: str, profile: WorkloadProfile | None) -> None:
        if profile is None:
            self._profiles.pop((namespace, name), None)
        else:
            self._profiles[namespace, name] = profile

    def replace_profiles(self, profiles: dict[tuple[str, str], WorkloadProfile]) -> None:
        self._profiles = profiles

    def replace_avoids(self, avoids: dict[str, dict[str, float]]) -> None:
        self._avoid = {owner: nodes for owner, nodes in avoids.items() if nodes}

    def put_avoid(self, owner_uid: str, until_s_by_node: dict[str, float]) -> None:
        if until_s_by_node:
            self._avoid[owner_uid] = until_s_by_node
        else:
            self._avoid.pop(owner_uid, None)

    def job(self, pod: OfflinePod, now_s: float) -> Job:
        avoid = self._avoid.get(pod.owner_uid, {})
        missed = frozenset(node for node, until_s in avoid.items() if until_s > now_s)
        closed = self.closed_to(pod)
        return Job(
            gpus=pod.gpus,
            sla=pod.sla,
            profile=self._profiles.get((pod.namespace, pod.profile)),
            avoid=missed | closed if missed else closed,
        )

    def closed_to(self, pod: OfflinePod) -> frozenset[str]:
        """Nodes that the pod may not use, whatever their GPUs."""
        return self.grounds.closed_to(pod.wish, self._row_of, self._row_changes)

    # Views for a decision

    def fleet(self, now_s: float) -> Fleet:
        """Views of the arrays, not copies: valid until the next event is handled."""
        standing = np.where(now_s - self._observed_at_s > STALE_AFTER_S, Standing.STALE, Standing.HARVESTING)
        standing = np.where(self._off & (standing == Standing.HARVESTING), Standing.OFF, standing)

        return Fleet(
            names=self._names,
            standing=standing.astype(np.int8),
            gpu_model=self._gpu_model,
            full_mib=self._full_mib,
            idle=self._idle,
            histogram=self._histogram,
            online_peak=self._online_peak,
            alignment=self._alignment,
            open_gpus=self._harvestable & ~self._taken,
        )

    def open_fleet(self, now_s: float) -> Fleet:
        """As if every node harvested and no offline job ran: what could be, whatever stands in its way now."""
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
        """The books: every taken bit belongs to a holding, no GPU to two confirmed ones."""
        expected = np.zeros_like(self._taken)
        owners: dict[tuple[str, str], str] = {}
        for holding in self._holdings.values():
            for uuid in holding.gpu_uuids:
                other = owners.setdefault((holding.node, uuid), holding.pod_uid)
                if other != holding.pod_uid:
                    raise AssertionError(f"GPU {uuid} of {holding.node} is held by {other} and {holding.pod_uid}")
            row = self._row_of.get(holding.node)
            if row is not None:
                expected[row] |= self._bits(row, holding.gpu_uuids)
        for reservation in self._reserved.values():
            row = self._row_of.get(reservation.node)
            if row is not None:
                expected[row] |= self._bits(row, reservation.gpu_uuids)
        used = Counter[str]()
        for holding in self._holdings.values():
            used[holding.namespace] += len(holding.gpu_uuids)
        if used != +self._in_use:
            raise AssertionError(f"GPUs in use by namespace are {+self._in_use}, their holdings add up to {used}")
        live = sorted(self._row_of.values())
        if not np.array_equal(expected[live], self._taken[live]):
            raise AssertionError("taken GPUs differ from the sum of holdings")

    def _hold(self, holding: Holding) -> None:
        before = self._holdings.get(holding.pod_uid)
        if before == holding:
            return
        if before is not None:
            self.release(holding.pod_uid)
        self._holdings[holding.pod_uid] = holding
        self._in_use[holding.namespace] += len(holding.gpu_uuids)
        self._holders[holding.node].add(holding.pod_uid)
        self._recount(holding.node)

    def _touch(self, row: int) -> None:
        self.generation += 1
        self._changed_at[row] = self.generation

    def _recount(self, node: str) -> None:
        row = self._row_of.get(node)
        if row is None:
            return
        self._touch(row)
        self._taken[row] = False
        for uid in self._holders[node]:
            self._taken[row] |= self._bits(row, self._holdings[uid].gpu_uuids)
        for reservation in self._reserved.values():
            if reservation.node == node:
                self._taken[row] |= self._bits(row, reservation.gpu_uuids)

    def _bits(self, row: int, uuids: tuple[str, ...]) -> NDArray[np.bool_]:
        known = self._uuids[row]
        bits = np.zeros(MAX_GPUS, dtype=np.bool_)
        bits[: len(known)] = [uuid in uuids for uuid in known]

        return bits

    def _new_row(self, node: str) -> int:
        if not self._free_rows:
            self._grow()
        row = self._free_rows.pop()
        self._row_of[node] = row
        self._row_changes += 1
        self._names[row] = node

        return row

    def _grow(self) -> None:
        old = len(self._names)
        self._free_rows = list(range(old, 2 * old))[::-1]
        self._names += [""] * old
        self._uuids += [()] * old
        for name in _ARRAYS:
            array = getattr(self, name)
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
