"""Writes what each owner of offline pods shall read, and what must outlive the controller: its OfflineWorkload."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence

from valve_kube import names
from valve_kube.client import ApiError, Json, KubeClient, Unreachable
from valve_kube.owners import owner_key, owner_uid, workload_key
from valve_kube.reflector import Store, key_of

from valve_scheduler.controller.apart import apart, unhurried
from valve_scheduler.controller.conditions import Told
from valve_scheduler.controller.guarded import Guarded
from valve_scheduler.controller.hands import Hands
from valve_scheduler.controller.monitor import MonitorSettings, Owner, Track
from valve_scheduler.controller.workloads import (
    is_starved,
    new_workload,
    promised,
    status_of,
    workload_name,
)
from valve_scheduler.placement.reach import Beyond


class WorkloadBook:
    """What was written stands in `workloads` at once: the watch tells it later."""

    def __init__(self, client: KubeClient, hands: Hands, workloads: Store) -> None:
        self._client, self._hands, self._workloads = client, hands, workloads

    async def save(
        self,
        uid: str,
        owner: Owner,
        tracks: Sequence[Track],
        now_s: float,
        rules: MonitorSettings,
        guarded: Guarded | None,
    ) -> bool:
        """Write the evictions of an owner before they happen. The owner of a pod that is new has no object yet."""
        held = next((item for item in self._workloads.items.items() if workload_key(item[1]) == uid), None)
        if held is None:
            return False
        (namespace, name), workload = held
        before = workload.get("status") or {}
        status = status_of(owner, tracks, before, now_s, rules, guarded=guarded)
        return await self._write(namespace, name, status, before)

    async def open(self, pods: Iterable[Json]) -> None:
        """Make the objects of their owners."""
        for pod in self._unwritten(pods):
            with apart(pod):
                await self._create(pod)

    async def round(
        self,
        running: Sequence[Json],
        owners: Mapping[str, Owner],
        tracks: Mapping[str, Sequence[Track]],
        now_s: float,
        rules: MonitorSettings,
        lost: Mapping[str, tuple[Json, Beyond]],
        guarded: Mapping[str, Guarded],
    ) -> None:
        """`tracks`, `lost` (a pod that no node could serve, and why) and `guarded` are by owner."""
        for pod in self._unwritten([*running, *(pod for pod, _ in lost.values())]):
            uid = owner_key(pod)
            judged = any(not one.sample.is_best_effort or is_starved(one) for one in tracks.get(uid, ()))
            if judged or uid in lost or uid in guarded:
                await self.open([pod])
        async for (namespace, name), workload in unhurried(self._workloads.items.items()):
            uid = workload_key(workload)
            before = workload.get("status") or {}
            why = lost[uid][1] if uid in lost else None
            with apart(workload):
                owner = owners.get(uid, Owner())
                status = status_of(owner, tracks.get(uid, ()), before, now_s, rules, why, guarded.get(uid))
                if status != before:
                    await self._write(namespace, name, status, before)
        for one in guarded.values():
            await self._hands.tell_once(one.pod, Told.GPU_GUARDED, one.note)
        for pod, why in lost.values():
            await self._hands.tell_once(pod, Told.SLA_UNREACHABLE, f"{why.reason}: {why.message}")

    def _unwritten(self, pods: Iterable[Json]) -> Iterator[Json]:
        """Those whose owners have no object when their turn comes."""
        for pod in pods:
            if (pod["metadata"]["namespace"], workload_name(owner_uid(pod))) not in self._workloads.items:
                yield pod

    async def _write(self, namespace: str, name: str, status: Json, before: Json) -> bool:
        path = f"/apis/{names.API_VERSION}/namespaces/{namespace}/offlineworkloads/{name}/status"
        written = await self._hands.patch(path, {"status": {**dict.fromkeys(before), **status}})
        held = self._workloads.items.get((namespace, name))
        if written and held is not None:
            self._workloads.items[namespace, name] = {**held, "status": status}

        return written

    async def _create(self, pod: Json) -> None:
        workload = new_workload(pod, promised(pod))
        path = f"/apis/{names.API_VERSION}/namespaces/{workload['metadata']['namespace']}/offlineworkloads"
        with contextlib.suppress(ApiError, Unreachable):  # made by the round before and not in our view yet, or later
            created = await self._client.request("POST", path, body=workload)
            self._workloads.items[key_of(created)] = created
