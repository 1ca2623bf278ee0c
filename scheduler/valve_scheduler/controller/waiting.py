"""Offline pods that kube-scheduler refused: which node would take them by now, and which of them no node ever could."""

import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace

from valve_kube import names
from valve_kube.client import Json
from valve_kube.errors import InvalidObject
from valve_kube.objects import OfflinePod, offline_pod
from valve_kube.owners import owner_key

from valve_scheduler.controller.apart import apart, each, unhurried
from valve_scheduler.controller.caches import Caches
from valve_scheduler.controller.hands import Hands
from valve_scheduler.controller.retries import ROUND_S, Retries
from valve_scheduler.placement.in_turn import in_turn
from valve_scheduler.placement.rank import Job
from valve_scheduler.placement.reach import Beyond, ReachVerdicts

log = logging.getLogger(__name__)

_MOST_TOLD = 100  # owners of one namespace that are told at one time that no node keeps their SLA: each is an object


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    namespace: str
    job: Job
    kind: Job


class Waiting:
    def __init__(
        self,
        caches: Caches,
        hands: Hands,
        now_s: Callable[[], float],
        afresh_every_s: float,
        clock_s: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._caches, self._hands, self._now_s = caches, hands, now_s
        self._retries, self._reach = Retries(caches.state), ReachVerdicts(caches.state)
        self._afresh_every_s, self._afresh_at_s = afresh_every_s, 0.0
        self._clock_s = clock_s
        self._asked: dict[str, _Asked] = {}  # by UID of the pod, the one read longest ago first
        self._after = ""

    async def requeue(self) -> None:
        """Bump the capacity epoch of nodes that became good enough for a refused pod; now and then of ones that are."""
        now_s = self._now_s()
        if now_s >= self._afresh_at_s:  # what the extender had assumed and let go again changed nothing that we see
            self._retries.forget()
            self._afresh_at_s = now_s + self._afresh_every_s
        await self._read(now_s)
        jobs: defaultdict[str, set[Job]] = defaultdict(set)
        for read in self._asked.values():
            jobs[read.namespace].add(read.job)
        bumps = await self._retries.round(jobs, now_s)
        for node in sorted(bumps):
            patch = {"metadata": {"annotations": {names.EPOCH: str(int(now_s * 1000))}}}
            await self._hands.patch(f"/api/v1/nodes/{node}", patch)
            log.info("capacity epoch", extra={"node": node, "pending_pods": len(self._asked)})

    async def unreachable(self, now_s: float) -> dict[str, tuple[Json, Beyond]]:
        """By owner, a refused pod that would get its SLA on no node if nothing else ran there."""
        policies = self._caches.state.policies
        if policies.brake or policies.paused({}):
            return {}  # refused because nothing harvests: that says nothing about what the fleet could give
        await self._read(now_s)
        kinds: defaultdict[str, set[Job]] = defaultdict(set)
        for read in self._asked.values():
            kinds[read.namespace].add(read.kind)
        known = await self._reach.of(kinds, now_s)
        found: dict[str, tuple[Json, Beyond]] = {}
        told: Counter[str] = Counter()
        async for pod in unhurried(self._caches.pods.items.values()):
            asked = self._asked.get(pod["metadata"]["uid"])
            why = known.get(asked.kind) if asked else None
            if asked is None or why is None or owner_key(pod) in found or told[asked.namespace] >= _MOST_TOLD:
                continue
            told[asked.namespace] += 1
            found[owner_key(pod)] = (pod, why)

        return found

    async def _read(self, now_s: float) -> None:
        """What the refused pods ask for. To hold the wish of one against every node takes milliseconds, so a round
        reads as many as its time allows, of each namespace those read longest ago; what was read before stands."""
        pods: defaultdict[str, dict[str, OfflinePod]] = defaultdict(dict)
        for _, pod in await each(self._caches.pods.items.values(), _refused):
            pods[pod.namespace][pod.uid] = pod
        waiting = {uid for of_namespace in pods.values() for uid in of_namespace}
        self._asked = {uid: read for uid, read in self._asked.items() if uid in waiting}
        place = {uid: number for number, uid in enumerate(self._asked)}
        order = {name: sorted(of, key=lambda uid: place.get(uid, -1)) for name, of in pods.items()}
        end_s = self._clock_s() + ROUND_S
        turns = in_turn(order, self._after)
        async for self._after, uid in unhurried(turns):
            pod = pods[self._after][uid]
            self._asked.pop(uid, None)
            with apart({"metadata": {"namespace": pod.namespace, "name": pod.name}}):
                self._asked[uid] = self._of(pod, now_s)
            if self._clock_s() >= end_s:
                break

    def _of(self, pod: OfflinePod, now_s: float) -> _Asked:
        """Of its kind, nodes that its owner avoids for a while count as able; those that are closed to it do not."""
        asked = self._caches.state.asked
        job = asked.job(pod, now_s)
        return _Asked(namespace=pod.namespace, job=job, kind=replace(job, avoid=asked.closed_to(pod)))


def _refused(pod: Json) -> OfflinePod | None:
    conditions = (pod.get("status") or {}).get("conditions") or []
    refused = any(c["type"] == "PodScheduled" and c["status"] == "False" for c in conditions)
    if not refused or (pod.get("spec") or {}).get("nodeName"):
        return None
    try:
        return offline_pod(pod)
    except InvalidObject:
        return None  # the extender told its owner already
