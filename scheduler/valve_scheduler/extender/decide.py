"""filter, prioritize and bind for kube-scheduler, as its extender/v1 wire protocol says.

Refusals of Valve all go to FailedAndUnresolvableNodes: preempting pods would cure none of them. A GPU set is
chosen in bind, marked assumed, and written by one Binding that sets node and annotations together; what the
API server did with it is settled before those GPUs are offered again."""

import logging
import uuid
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Protocol
from zlib import crc32

import numpy as np
from numpy.typing import NDArray
from valve_kube import failures, names
from valve_kube.client import ApiError, Json, Unreachable
from valve_kube.errors import InvalidObject, NoPlace, NotReady
from valve_kube.objects import OfflinePod, PodPlace, followed, offline_pod, pod_place

from valve_scheduler import metrics
from valve_scheduler.model.curve import FloatArray
from valve_scheduler.placement.holdings import Holding
from valve_scheduler.placement.namespace_rule import barred
from valve_scheduler.placement.promise import TEXTS, YOUNG_TEXT, refusal, young
from valve_scheduler.placement.rank import Ranking, Reason, scores
from valve_scheduler.placement.rankings import Rankings
from valve_scheduler.placement.served import ServedBases
from valve_scheduler.placement.state import ClusterState
from valve_scheduler.placement.undecided import undecided

log = logging.getLogger(__name__)

# Pods between filter and bind; kube-scheduler works on one at a time and binds a few dozen at once. One may be 70 KB.
_REMEMBERED = 512
# kube-scheduler scores every node that passes with all its plugins: a thousand of them cost it more than Valve's whole
# answer, and a node that is not among the best by share is not chosen anyway (weight 10).
_CANDIDATES = 64
_TEXTS = ["", *(TEXTS[Reason(code)] for code in range(1, len(Reason)))]


class Api(Protocol):
    """The part of the API client that bind needs."""

    async def request(self, method: str, path: str, *, body: Any = None) -> Json: ...


class Extender:
    """Stateless but for what it remembers of pods on their way through; `now_s` is the wall clock."""

    def __init__(
        self,
        state: ClusterState,
        api: Api,
        *,
        now_s: Callable[[], float],
        can_answer: Callable[[], bool],
        served: ServedBases | None = None,
    ) -> None:
        self._state = state
        self._served = served or ServedBases()
        self._api = api
        self._now_s = now_s
        self._can_answer = can_answer
        self._pods: OrderedDict[str, OfflinePod] = OrderedDict()
        self._rankings = Rankings(state)

    def filter(self, arguments: Json) -> Json:
        self._check_ready()
        wanted = arguments.get("NodeNames")
        if wanted is None:
            return _filter_error("NodeNames is missing: set nodeCacheCapable: true for this extender")
        try:
            pod = offline_pod(followed(arguments["Pod"]))
        except InvalidObject as error:
            failures.objects["Pod"] += 1
            return _filter_error(f"valve: {error}")
        self._state.held.unreserve(pod.uid)
        if full := self._barred(pod):
            return _filter_error(f"valve: {full}")
        self._remember(pod)
        pinned = self._state.held.holding(pod.uid)
        if pinned is not None and pinned.assumed_until_s and pinned.node not in wanted:
            return _filter_error(f"valve: {undecided(pinned.node)}")  # tried again by itself, which a refusal is not
        ranking = self._rank(pod)
        rows, codes = self._codes(wanted, ranking)
        if pinned is not None:  # an earlier bind is undecided: only the same place can still be right
            codes = np.where(rows == self._state.row(pinned.node), np.int8(Reason.NONE), np.int8(Reason.NO_FREE_GPUS))
        passed = np.flatnonzero(codes == Reason.NONE)
        _count(codes)
        # Reasons are read only where nothing passes; a thousand of them would cost both sides more than the answer.
        refused = {} if len(passed) else self._texts(pod, wanted, rows, codes)
        worth = self._served.worth(ranking.share[rows], wanted, pod.base)
        best = [wanted[index] for index in _best(passed, worth[passed])]
        if best:  # of one node alone kube-scheduler asks for no scores
            self._reserve(pod, best[0] if len(best) == 1 else "", ranking)

        return {"NodeNames": best, "FailedNodes": {}, "FailedAndUnresolvableNodes": refused, "Error": ""}

    def prioritize(self, arguments: Json) -> list[Json]:
        self._check_ready()
        wanted = arguments.get("NodeNames") or []
        pod = offline_pod(arguments["Pod"])
        self._state.held.unreserve(pod.uid)
        ranking = self._rank(pod)
        rows = self._state.rows(wanted)
        shares = self._served.worth(np.where(rows < 0, 0.0, ranking.share[rows]), wanted, pod.base)
        points = scores(shares)
        chosen = ""
        if len(points) and points.max() > 0:
            # One node has the highest score alone, so that the GPUs kept there are those the pod will get. Among
            # equals each pod begins at another one: a fleet of equal nodes fills evenly.
            best = np.flatnonzero(shares == shares.max())
            top = int(best[crc32(pod.uid.encode()) % len(best)])
            points = np.where(np.arange(len(points)) == top, points, np.minimum(points, points.max() - 1))
            chosen = wanted[top]
        self._reserve(pod, chosen, ranking)

        return [{"Host": name, "Score": score} for name, score in zip(wanted, points.tolist(), strict=True)]

    async def bind(self, arguments: Json) -> Json:
        """Never raises: every failure is an Error that puts the pod back into the queue."""
        try:
            self._check_ready()
            await self._bind(arguments)
        except (NotReady, NoPlace, InvalidObject, ApiError) as error:
            metrics.binds.labels("refused").inc()
            return self._bind_failed(arguments, error)
        except Unreachable as error:
            metrics.binds.labels("undecided").inc()
            return self._bind_failed(arguments, error)
        metrics.binds.labels("bound").inc()

        return {"Error": ""}

    async def _bind(self, arguments: Json) -> None:
        uid, node = arguments["PodUID"], arguments["Node"]
        pod = self._pods.get(uid) or await self._read(arguments)
        held = self._state.held.holding(uid)
        if held is not None and held.node != node:
            raise NoPlace(_elsewhere(held))
        if held is not None and not held.assumed_until_s:
            return  # the answer to an earlier call was lost; the Binding was not
        if held is None and (full := self._barred(pod)):
            raise NoPlace(full)
        gpus, share = (held.gpu_uuids, held.share) if held else self._choose(pod, node)
        # Synchronous up to here: no other request has seen these GPUs as free.
        self._state.held.assume(uid, node, gpus, self._now_s(), pod.namespace, share, pod.name)
        try:
            await self._post(pod, node, gpus, share)
        except Unreachable as error:
            raise Unreachable(f"{undecided(node)}: {error}") from error
        self._pods.pop(uid, None)

    def _reserve(self, pod: OfflinePod, node: str, ranking: Ranking) -> None:
        """Until it is bound its namespace has fewer GPUs left, and, once a node is chosen, other pods are offered other
        GPUs: without that one bind in seven failed under load."""
        held, row = self._state.held, self._state.row(node)
        if held.holding(pod.uid) is not None:
            return
        if row is None or ranking.reason[row] != Reason.NONE:
            held.reserve(pod.uid, pod.namespace, pod.gpus, self._now_s())
            return
        members = self._state.sets(pod.gpus).members[ranking.set_index[row]]
        uuids = self._state.uuids(node, members.tolist())
        held.reserve(pod.uid, pod.namespace, pod.gpus, self._now_s(), node, uuids)

    def _choose(self, pod: OfflinePod, node: str) -> tuple[tuple[str, ...], float]:
        """The best set on the node by what is known now, which may be more than when it was filtered."""
        self._state.held.unreserve(pod.uid)
        ranking = self._rank(pod)
        row = self._state.row(node)
        reason = Reason.STALE if row is None else Reason(ranking.reason[row])
        if row is None or reason is not Reason.NONE:
            raise NoPlace(f"{node}: {refusal(reason, row is not None and bool(self._young(pod)[row]))}")
        members = self._state.sets(pod.gpus).members[ranking.set_index[row]]

        return self._state.uuids(node, members.tolist()), float(ranking.share[row])

    async def _post(self, pod: OfflinePod, node: str, gpus: tuple[str, ...], share: float) -> None:
        annotations = {names.GPUS: ",".join(gpus), names.DECISION: uuid.uuid4().hex[:16]}
        if share > 0:
            annotations[names.PREDICTED] = f"{share:.3f}"
        binding = {
            "apiVersion": "v1",
            "kind": "Binding",
            "metadata": {
                "namespace": pod.namespace,
                "name": pod.name,
                "uid": pod.uid,
                "annotations": annotations,
            },
            "target": {"apiVersion": "v1", "kind": "Node", "name": node},
        }
        try:
            with metrics.bind_waits.time():
                await self._api.request("POST", f"{_pod_path(pod)}/binding", body=binding)
        except ApiError as error:
            await self._settle(pod, node, gpus, error)
        self._state.held.confirm(pod.uid)
        log.info("bound", extra={"pod": f"{pod.namespace}/{pod.name}", "node": node, **annotations})

    async def _settle(self, pod: OfflinePod, node: str, gpus: tuple[str, ...], error: ApiError) -> None:
        """The server said no. A conflict may be our own Binding of an earlier try.

        A 5xx may have happened.
        """
        if error.status >= 500:
            raise Unreachable(str(error)) from error
        if error.status == 409 and (found := await self._place(pod)) is not None and found.uid == pod.uid:
            if (found.node, found.gpu_uuids) == (node, gpus):
                return
            if found.node:
                self._state.held.put_pod(found)
                raise error
        self._state.held.release(pod.uid)
        raise error

    async def _place(self, pod: OfflinePod) -> PodPlace | None:
        """Where the server has it; None: it was deleted meanwhile."""
        try:
            return pod_place(await self._api.request("GET", _pod_path(pod)))
        except ApiError as error:
            if error.status != 404:
                raise
            return None

    async def _read(self, arguments: Json) -> OfflinePod:
        path = f"/api/v1/namespaces/{arguments['PodNamespace']}/pods/{arguments['PodName']}"
        pod = offline_pod(followed(await self._api.request("GET", path)))
        if pod.uid != arguments["PodUID"]:
            raise NoPlace("the pod was replaced by another of its name")

        return pod

    def _barred(self, pod: OfflinePod) -> str:
        self._state.held.lapse(self._now_s())
        return barred(self._state, pod)

    def _rank(self, pod: OfflinePod) -> Ranking:
        now_s = self._now_s()
        self._state.held.lapse(now_s)
        return self._rankings.of(self._state.asked.job(pod, now_s), now_s)

    def _codes(self, wanted: list[str], ranking: Ranking) -> tuple[NDArray[np.intp], NDArray[np.int8]]:
        """Row and Reason of each asked node; row -1 is a node that never reported."""
        rows = self._state.rows(wanted)
        return rows, np.where(rows < 0, np.int8(Reason.STALE), ranking.reason[rows])

    def _young(self, pod: OfflinePod) -> NDArray[np.bool_]:
        return young(self._state.fleet(self._now_s()), self._state.sets(pod.gpus), self._state.belief)

    def _texts(
        self, pod: OfflinePod, wanted: list[str], rows: NDArray[np.intp], codes: NDArray[np.int8]
    ) -> dict[str, str]:
        of_sla = codes == Reason.SLA
        is_young = of_sla & self._young(pod)[rows] if of_sla.any() else of_sla
        judged = zip(wanted, codes.tolist(), is_young.tolist(), strict=True)
        return {name: YOUNG_TEXT if is_young else _TEXTS[code] for name, code, is_young in judged}

    def _remember(self, pod: OfflinePod) -> None:
        self._pods[pod.uid] = pod
        self._pods.move_to_end(pod.uid)
        while len(self._pods) > _REMEMBERED:
            self._pods.popitem(last=False)

    def _check_ready(self) -> None:
        if not self._can_answer():
            raise NotReady("this replica does not lead, or its view of the cluster is not complete yet")

    def _bind_failed(self, arguments: Json, error: Exception) -> Json:
        pod = f"{arguments.get('PodNamespace')}/{arguments.get('PodName')}"
        log.warning("bind failed", extra={"pod": pod, "node": arguments.get("Node"), "error": str(error)})
        self._state.held.unreserve(arguments.get("PodUID", ""))

        return {"Error": f"valve: {error}"}


def _filter_error(text: str) -> Json:
    return {"NodeNames": [], "FailedNodes": {}, "FailedAndUnresolvableNodes": {}, "Error": text}


def _elsewhere(held: Holding) -> str:
    if held.assumed_until_s:
        return undecided(held.node)
    return f"the pod is bound to {held.node} already"


def _pod_path(pod: OfflinePod) -> str:
    return f"/api/v1/namespaces/{pod.namespace}/pods/{pod.name}"


def _count(codes: NDArray[np.int8]) -> None:
    metrics.accepted.inc(int((codes == Reason.NONE).sum()))
    for code, count in enumerate(np.bincount(codes, minlength=len(Reason)).tolist()):
        if count and code != Reason.NONE:
            metrics.refusals.labels(Reason(code).name.lower()).inc(count)


def _best(passed: NDArray[np.intp], shares: FloatArray) -> list[int]:
    """The nodes worth scoring, in the order asked; the rest is left out without a reason, as it was not refused."""
    if len(passed) > _CANDIDATES:
        passed = np.sort(passed[np.argsort(-shares, kind="stable")[:_CANDIDATES]])

    return [int(index) for index in passed]
