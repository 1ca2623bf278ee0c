"""Lets nodes measure the jobs that have no measurement yet, and stores what they found."""

from collections.abc import Callable

from valve_kube import names
from valve_kube.client import Json, KubeClient
from valve_kube.objects import annotation, pod_place

from valve_scheduler.controller.apart import apart
from valve_scheduler.controller.belief import Belief
from valve_scheduler.controller.caches import Caches
from valve_scheduler.controller.conditions import Told
from valve_scheduler.controller.hands import Hands
from valve_scheduler.controller.profiling import (
    GIVEN_UP_NOTE,
    PROFILING_NOTE,
    is_enough,
    levels_of,
    store_measured,
    to_profile,
)


class Measuring:
    def __init__(
        self, client: KubeClient, hands: Hands, caches: Caches, belief: Belief, now_s: Callable[[], float]
    ) -> None:
        self._client, self._hands, self._caches, self._belief, self._now_s = client, hands, caches, belief, now_s
        self._under_way: dict[str, Json] = {}  # pods that are being measured, by UID

    async def chosen(self) -> dict[str, list[str]]:
        """By node, the UIDs of the pods that its daemon shall measure; their owners are told."""
        found = to_profile(self._caches.pods.items.values(), self._caches.profiles.items, self._now_s())
        await self._tell({uid for uids in found.values() for uid in uids})
        return found

    async def store(self) -> None:
        """Store what a best-effort run at several memory limits has shown, under the name its pod asks for."""
        if await self._belief.is_young(self._now_s()):
            return
        for pod in self._caches.running():
            place, name = pod_place(pod), annotation(pod, names.PROFILE)
            if not name or (place.namespace, name) in self._caches.profiles.items:
                continue
            with apart(pod):
                levels = levels_of(self._caches.reported(place.node, place.uid) or {})
                node = self._caches.node(place.node).get("status") or {}
                if not is_enough(levels):
                    continue
                if note := await store_measured(self._client, pod, node, levels, self._belief.since_s):
                    await self._hands.tell_once(pod, Told.PROFILED, note)

    async def _tell(self, uids: set[str]) -> None:
        """Where a pod runs with a part of its memory its owner shall read why, and what became of it."""
        if not uids and not self._under_way:
            return
        pods = {pod["metadata"]["uid"]: pod for pod in self._caches.pods.items.values()}
        before, self._under_way = self._under_way, {uid: pods[uid] for uid in uids}
        for uid in uids - before.keys():
            note = f"is measured for OfflineProfile {annotation(pods[uid], names.PROFILE)}: {PROFILING_NOTE}"
            await self._hands.tell_once(pods[uid], Told.PROFILING, note)
        for uid in before.keys() & pods.keys() - uids:
            pod = pods[uid]
            name = annotation(pod, names.PROFILE)
            is_made = (pod["metadata"]["namespace"], name) in self._caches.profiles.items
            if not is_made and not pod_place(pod).finished:
                note = f"OfflineProfile {name} is not made from this pod: {GIVEN_UP_NOTE}"
                await self._hands.tell_once(pod, Told.PROFILING_ENDED, note)
