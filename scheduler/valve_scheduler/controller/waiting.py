"""Offline pods that kube-scheduler refused: which node would take them by now, and which of them no node ever could."""

import logging
from collections.abc import Callable
from dataclasses import replace

from valve_kube import names
from valve_kube.client import Json
from valve_kube.errors import InvalidObject
from valve_kube.objects import OfflinePod, offline_pod
from valve_kube.owners import owner_key

from valve_scheduler.controller.apart import each
from valve_scheduler.controller.caches import Caches
from valve_scheduler.controller.hands import Hands
from valve_scheduler.controller.retries import Retries
from valve_scheduler.placement.rank import Job
from valve_scheduler.placement.reach import Beyond, ReachVerdicts

log = logging.getLogger(__name__)


class Waiting:
    def __init__(self, caches: Caches, hands: Hands, now_s: Callable[[], float], afresh_every_s: float) -> None:
        self._caches, self._hands, self._now_s = caches, hands, now_s
        self._retries, self._reach = Retries(caches.state), ReachVerdicts(caches.state)
        self._afresh_every_s, self._afresh_at_s = afresh_every_s, 0.0

    async def requeue(self) -> None:
        """Bump the capacity epoch of nodes that became good enough for a refused pod; now and then of ones that are."""
        now_s = self._now_s()
        if now_s >= self._afresh_at_s:  # what the extender had assumed and let go again changed nothing that we see
            self._retries.forget()
            self._afresh_at_s = now_s + self._afresh_every_s
        jobs = frozenset(job for _, job in each(self._caches.pods.items.values(), self._refused_job))
        bumps = await self._retries.round(jobs, now_s)
        for node in sorted(bumps):
            patch = {"metadata": {"annotations": {names.EPOCH: str(int(now_s * 1000))}}}
            await self._hands.patch(f"/api/v1/nodes/{node}", patch)
            log.info("capacity epoch", extra={"node": node, "pending_jobs": len(jobs)})

    async def unreachable(self, now_s: float) -> dict[str, tuple[Json, Beyond]]:
        """By owner, a refused pod that would get its SLA on no node if nothing else ran there."""
        policies = self._caches.state.policies
        if policies.brake or policies.paused({}):
            return {}  # refused because nothing harvests: that says nothing about what the fleet could give
        waiting = each(self._caches.pods.items.values(), self._refused_kind)
        known = await self._reach.of([kind for _, kind in waiting], now_s)
        found = {}
        for pod, kind in waiting:
            if why := known.get(kind):
                found[owner_key(pod)] = (pod, why)

        return found

    def _refused_job(self, pod: Json) -> Job | None:
        wish = _refused(pod)
        return None if wish is None else self._caches.state.asked.job(wish, self._now_s())

    def _refused_kind(self, pod: Json) -> Job | None:
        """Nodes that its owner avoids for a while count as able; those that are closed to it do not."""
        wish, asked = _refused(pod), self._caches.state.asked
        return None if wish is None else replace(asked.job(wish, self._now_s()), avoid=asked.closed_to(wish))


def _refused(pod: Json) -> OfflinePod | None:
    conditions = (pod.get("status") or {}).get("conditions") or []
    refused = any(c["type"] == "PodScheduled" and c["status"] == "False" for c in conditions)
    if not refused or (pod.get("spec") or {}).get("nodeName"):
        return None
    try:
        return offline_pod(pod)
    except InvalidObject:
        return None  # the extender told its owner already
