"""Which GPUs belong to which pod, and how sure that is.

A GPU is taken while a pod that is not finished names it in its annotation (truth, from the API server), while a
bind for it is under way (assumed: ours, for a bounded time), or for the moment between the choice of a node and its
bind (reserved). A namespace is charged from the filter on, before a node is chosen. What the watch stops to vouch for
is doubted and settled by a GET (`doubts.py`)."""

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from valve_kube.objects import PodPlace

# Longer than the API server's own request time-out of 60 s: after it a lost Binding can no longer appear.
ASSUMED_FOR_S = 70.0
# Between the answers to filter and prioritize and the call of bind lie milliseconds; what is not bound by then went
# elsewhere.
RESERVED_FOR_S = 2.0


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
    """GPUs that one pod will be bound to in a moment; other pods are offered others. node empty: not chosen yet."""

    node: str
    gpu_uuids: tuple[str, ...]
    namespace: str
    gpus: int
    until_s: float


class HeldGpus:
    """`changed` is called with the node on which another GPU is taken or free, `doubted` when a holding must be
    verified. Without `doubted` nothing is verified, and the watch alone counts."""

    def __init__(self, changed: Callable[[str], None], doubted: Callable[[], None] | None = None) -> None:
        self._changed = changed
        self._doubted = doubted
        self._holdings: dict[str, Holding] = {}
        self._holders: defaultdict[str, set[str]] = defaultdict(set)  # node -> pod uids
        self._in_use: Counter[str] = Counter()  # namespace -> GPUs its offline pods hold
        self._reserved: OrderedDict[str, Reservation] = OrderedDict()  # pod uid, the oldest first
        self._doubts: dict[str, float] = {}  # pod uid -> when its holding must be verified

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
        if is_deleted or self._doubted is None:
            self.release(uid)
        else:
            self._doubts[uid] = 0.0
            self._doubted()

    def doubtful(self, now_s: float) -> list[Holding]:
        """HeldGpus that must be verified now."""
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

    def reserve(
        self, pod_uid: str, namespace: str, gpus: int, now_s: float, node: str = "", gpu_uuids: tuple[str, ...] = ()
    ) -> None:
        """Keep as many GPUs of its namespace's limit, and those of the node, for a pod that is about to be bound."""
        self.unreserve(pod_uid)
        until_s = now_s + RESERVED_FOR_S
        self._reserved[pod_uid] = Reservation(
            node=node, gpu_uuids=gpu_uuids, namespace=namespace, gpus=gpus, until_s=until_s
        )
        if node:
            self._changed(node)

    def unreserve(self, pod_uid: str) -> None:
        reservation = self._reserved.pop(pod_uid, None)
        if reservation is not None and reservation.node:
            self._changed(reservation.node)

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
            if self._doubted is not None:
                self._doubts[pod_uid] = holding.assumed_until_s

    def release(self, pod_uid: str) -> None:
        holding = self._holdings.pop(pod_uid, None)
        self._doubts.pop(pod_uid, None)
        if holding is not None:
            self._in_use[holding.namespace] -= len(holding.gpu_uuids)
            self._holders[holding.node].discard(pod_uid)
            self._changed(holding.node)

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

    def in_use(self, namespace: str, *, but: str) -> int:
        """GPUs that offline pods of the namespace hold or are about to; not those of pod uid `but`."""
        own = self._holdings.get(but)
        coming = sum(one.gpus for uid, one in self._reserved.items() if one.namespace == namespace and uid != but)
        return self._in_use[namespace] + coming - (len(own.gpu_uuids) if own else 0)

    def holdings(self) -> list[Holding]:
        return list(self._holdings.values())

    def of_node(self, node: str) -> set[str]:
        """UUIDs that are taken there."""
        held = {uuid for pod in self._holders.get(node, ()) for uuid in self._holdings[pod].gpu_uuids}
        return held.union(*(one.gpu_uuids for one in self._reserved.values() if one.node == node))

    def check_integrity(self) -> None:
        """No GPU belongs to two pods, and namespaces hold what their pods hold."""
        owners: dict[tuple[str, str], str] = {}
        used = Counter[str]()
        for holding in self._holdings.values():
            used[holding.namespace] += len(holding.gpu_uuids)
            for uuid in holding.gpu_uuids:
                other = owners.setdefault((holding.node, uuid), holding.pod_uid)
                if other != holding.pod_uid:
                    raise AssertionError(f"GPU {uuid} of {holding.node} is held by {other} and {holding.pod_uid}")
        if used != +self._in_use:
            raise AssertionError(f"GPUs in use by namespace are {+self._in_use}, their holdings add up to {used}")

    def _hold(self, holding: Holding) -> None:
        before = self._holdings.get(holding.pod_uid)
        if before == holding:
            return
        if before is not None:
            self.release(holding.pod_uid)
        self.unreserve(holding.pod_uid)
        self._holdings[holding.pod_uid] = holding
        self._in_use[holding.namespace] += len(holding.gpu_uuids)
        self._holders[holding.node].add(holding.pod_uid)
        self._changed(holding.node)
