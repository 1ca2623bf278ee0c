"""Runs the SLA controller in rounds: each reads the caches once, decides with pure functions, applies the effects last.

One replica acts (Lease). What a round must not forget lives in OfflineWorkload status. Nothing is done while a view is
incomplete."""

import asyncio
import contextlib
import logging
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace

from valve_kube import names
from valve_kube.client import ApiError, Json, KubeClient, Unreachable
from valve_kube.errors import InvalidObject
from valve_kube.lease import DURATION_S, Lease
from valve_kube.objects import (
    OfflinePod,
    PodPlace,
    annotation,
    is_bare,
    offline_pod,
    owner_uid,
    phase_in_force,
    pod_place,
    started_at_s,
)
from valve_kube.policies import merge_patch, node_spec
from valve_kube.reflector import Reflector, Sink

from valve_scheduler.controller.account_book import AccountBook
from valve_scheduler.controller.apart import apart, each
from valve_scheduler.controller.belief import Belief
from valve_scheduler.controller.better import Better
from valve_scheduler.controller.clearing import ghosts, hidden_leavers, leavers, unseen
from valve_scheduler.controller.conditions import Told, event
from valve_scheduler.controller.given import memory_given
from valve_scheduler.controller.guarded import Guards
from valve_scheduler.controller.hands import Hands
from valve_scheduler.controller.monitor import (
    MonitorSettings,
    Owner,
    Sample,
    Track,
    observe,
    with_policy,
)
from valve_scheduler.controller.profiling import (
    GIVEN_UP_NOTE,
    PROFILING_NOTE,
    is_enough,
    levels_of,
    store_measured,
    to_profile,
)
from valve_scheduler.controller.records import Records
from valve_scheduler.controller.retries import Retries
from valve_scheduler.controller.shadows import is_news, standing
from valve_scheduler.controller.shadows import status_of as shadow_status
from valve_scheduler.controller.store import Store, key_of
from valve_scheduler.controller.stuck import Stuck
from valve_scheduler.controller.tally import SavedCounter, count
from valve_scheduler.controller.turns import choose, gone
from valve_scheduler.controller.workloads import (
    is_starved,
    moved_for,
    new_workload,
    owner_of,
    promised,
    status_of,
    workload_name,
)
from valve_scheduler.placement.rank import Job, PlacementSettings
from valve_scheduler.placement.reach import Beyond, Reach
from valve_scheduler.placement.state import ClusterState
from valve_scheduler.placement.views import (
    grounds_view,
    nodes_view,
    pods_view,
    policies_view,
    profiles_view,
    workloads_view,
)
from valve_scheduler.probes import Probes

log = logging.getLogger(__name__)

_NO_SINK = Sink(replace=lambda _: None, put=lambda _: None, drop=lambda _: None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerSettings:
    """Rounds: retries are looked for each second, SLAs at the pace of node reports."""

    namespace: str = "valve-system"
    probe_host: str = "0.0.0.0"
    probe_port: int = 8902
    lease_name: str = "valve-controller"
    lease_s: float = DURATION_S
    requeue_every_s: float = 1.0
    policy_every_s: float = 1.0
    clear_every_s: float = 5.0
    afresh_every_s: float = 30.0
    monitor_every_s: float = 30.0
    monitor: MonitorSettings = field(default_factory=MonitorSettings)
    placement: PlacementSettings = field(default_factory=PlacementSettings)


class Controller:
    def __init__(
        self, client: KubeClient, settings: ControllerSettings, now_s: Callable[[], float] = time.time
    ) -> None:
        self._client = client
        self._hands = Hands(client, now_s)
        self._settings = settings
        self._now_s = now_s
        self._state = ClusterState(settings.placement)
        self.pods, self.nodes, self.workloads, self.accounts, self.profiles = (Store() for _ in range(5))
        self.labels: dict[str, dict[str, str]] = {}
        self.views = [
            self.pods.tee(pods_view(client, self._state)),
            self.nodes.tee(nodes_view(client, self._state, now_s)),
            self.profiles.tee(profiles_view(client, self._state)),
            self.workloads.tee(workloads_view(client, self._state)),
            policies_view(client, self._state),
            grounds_view(client, self.labels, self._state.asked.grounds),
            self.accounts.tee(Reflector(client, f"{names.API_PATH}/harvestaccounts", _NO_SINK)),
        ]
        self._accounts_view = self.views[-1]
        self._tracks: dict[str, Track] = {}
        self._retries = Retries(self._state)
        self._reach = Reach(self._state)
        self._better = Better(self._state)
        self._belief = Belief(client)
        self._afresh_at_s = 0.0
        self._records, self._tally = Records(), SavedCounter()
        self._book = AccountBook(client, self._hands, self._state, self._tally, self.pods, self.nodes, self.accounts)
        self._stuck, self._guards = Stuck(), Guards()
        self._told: dict[str, tuple[Json, float]] = {}
        self._profiled: dict[str, Json] = {}  # pods that are being measured, by UID

    def missing(self) -> list[str]:
        """Accounts are not waited for: after a rollback their CRD may be one that this release does not know."""
        return [view.path for view in self.views if not view.synced and view is not self._accounts_view]

    def stand_down(self) -> None:
        """What only the leader knows is not told by another: an old figure of a former leader would stand for ever."""
        self._tally.forget()

    # Retries

    async def requeue(self) -> None:
        """Bump the capacity epoch of nodes that became good enough for a refused pod; now and then of ones that are."""
        now_s = self._now_s()
        if now_s >= self._afresh_at_s:  # what the extender had assumed and let go again changed nothing that we see
            self._retries.forget()
            self._afresh_at_s = now_s + self._settings.afresh_every_s
        jobs = frozenset(job for _, job in each(self.pods.items.values(), self._refused_job))
        bumps = await self._retries.round(jobs, now_s)
        for node in sorted(bumps):
            patch = {"metadata": {"annotations": {names.EPOCH: str(int(now_s * 1000))}}}
            await self._hands.patch(f"/api/v1/nodes/{node}", patch)
            log.info("capacity epoch", extra={"node": node, "pending_jobs": len(jobs)})

    def _refused_job(self, pod: Json) -> Job | None:
        wish = self._refused(pod)
        return None if wish is None else self._state.asked.job(wish, self._now_s())

    def _refused_kind(self, pod: Json) -> Job | None:
        """Nodes that its owner avoids for a while count as able; those that are closed to it do not."""
        wish = self._refused(pod)
        if wish is None:
            return None
        asked = self._state.asked
        return replace(asked.job(wish, self._now_s()), avoid=asked.closed_to(wish))

    def _refused(self, pod: Json) -> OfflinePod | None:
        conditions = (pod.get("status") or {}).get("conditions") or []
        refused = any(c["type"] == "PodScheduled" and c["status"] == "False" for c in conditions)
        if not refused or (pod.get("spec") or {}).get("nodeName"):
            return None
        try:
            return offline_pod(pod)
        except InvalidObject:
            return None  # the extender told its owner already

    # Policies

    async def apply_policies(self) -> None:
        """Write into each GPUHarvestNode what the policies say of it, and which of its pods to profile: the one object
        its daemon follows."""
        policies, now_s, theta = self._state.policies, self._now_s(), self._settings.placement.theta
        # Whoever judges a node knows the default; what differs from it stands in the node.
        defaults = {} if theta == PlacementSettings().theta else {"alignmentThreshold": theta}
        profile = to_profile(self.pods.items.values(), self.profiles.items, now_s)
        await self._tell_profiled({uid for uids in profile.values() for uid in uids})
        patches = []
        for (_, name), node in self.nodes.items.items():
            wanted = node_spec(policies, self.labels.get(name, {}), profile.get(name, ()), defaults)
            spec = node.get("spec") or {}
            stands = {"paused": bool(spec.get("paused")), "resolved": spec.get("resolved") or {}}
            told, told_s = self._told.get(name, ({}, 0.0))
            # An older CRD drops what it does not know: the same is not said to it again every second.
            if stands != wanted and (told != wanted or now_s - told_s >= self._settings.afresh_every_s):
                self._told[name] = wanted, now_s
                patch = {"spec": merge_patch(stands, wanted)}
                patches.append(self._hands.patch(f"{names.API_PATH}/gpuharvestnodes/{name}", patch))
        if patches:
            log.info("policies", extra={"nodes": len(patches)})
        await asyncio.gather(*patches)

    async def judge_policies(self) -> None:
        """Say of each policy where it holds, and what overrules it where it does not."""
        policies, now_s = self._state.policies, self._now_s()
        nodes = {name: self.labels.get(name, {}) for _, name in self.nodes.items}
        modes = {name: (node.get("spec") or {}).get("mode") for (_, name), node in self.nodes.items.items()}
        said = {name: mode for name, mode in modes.items() if mode}
        for policy in policies.items:
            status = shadow_status(policy, standing(policy, policies, nodes, said), now_s)
            if status == policy.get("status"):
                continue
            path = f"{names.API_PATH}/harvestpolicies/{policy['metadata']['name']}/status"
            if await self._hands.patch(path, {"status": status}) and is_news(policy, status):
                note = status["conditions"][0]["message"]
                told = event(policy, Told.POLICY_SHADOWED, note, now_s, kind="HarvestPolicy")
                await self._hands.tell(told)

    # Accounts

    async def account(self) -> None:
        if self._accounts_view.synced:
            await self._book.round(self._now_s())

    # Profiles

    async def measure(self) -> None:
        """Store what a best-effort run at several memory limits has shown, under the name its pod asks for."""
        if await self._belief.is_young(self._now_s()):
            return
        for pod in self._running():
            place, name = pod_place(pod), annotation(pod, names.PROFILE)
            if not name or (place.namespace, name) in self.profiles.items:
                continue
            with apart(pod):
                levels = levels_of(self._reported(place.node, place.uid) or {})
                node = self.nodes.items.get(("", place.node), {}).get("status") or {}
                if not is_enough(levels):
                    continue
                if note := await store_measured(self._client, pod, node, levels, self._belief.since_s):
                    await self._hands.tell_once(pod, Told.PROFILED, note)

    async def _tell_profiled(self, uids: set[str]) -> None:
        """Where a pod runs with a part of its memory its owner shall read why, and what became of it."""
        if not uids and not self._profiled:
            return
        pods = {pod["metadata"]["uid"]: pod for pod in self.pods.items.values()}
        before, self._profiled = self._profiled, {uid: pods[uid] for uid in uids}
        for uid in uids - before.keys():
            note = f"is measured for OfflineProfile {annotation(pods[uid], names.PROFILE)}: {PROFILING_NOTE}"
            await self._hands.tell_once(pods[uid], Told.PROFILING, note)
        for uid in before.keys() & pods.keys() - uids:
            pod = pods[uid]
            name = annotation(pod, names.PROFILE)
            if (pod["metadata"]["namespace"], name) not in self.profiles.items and not pod_place(pod).finished:
                note = f"OfflineProfile {name} is not made from this pod: {GIVEN_UP_NOTE}"
                await self._hands.tell_once(pod, Told.PROFILING_ENDED, note)

    # Nodes that are drained or gone

    async def clear(self) -> None:
        """Evict what must leave, as often as disruption budgets want to be asked."""
        nodes = {name: node for (_, name), node in self.nodes.items.items()}
        found = list(leavers(self.pods.items.values(), nodes))
        for name, uids in list(unseen(self.pods.items.values(), nodes)):
            found += hidden_leavers(await self._hands.pods_of(name), name, uids)
        for leaver in found:
            await self._hands.evict(leaver.pod, leaver.reason, leaver.note)

    async def free_stuck(self) -> None:
        """Evict what can never run where it was placed."""
        now_s = self._now_s()
        for one in self._stuck.find(self.pods.items.values(), self._state.fresh_gpus(now_s), now_s):
            await self._hands.evict(one.pod, Told.PLACE_LOST, one.note)

    async def forget(self) -> None:
        """Delete the reports of nodes that have left the cluster: their daemons cannot."""
        nodes = {name: node for (_, name), node in self.nodes.items.items()}
        for name, versions in list(ghosts(nodes, self.labels, self._now_s())):
            try:
                path = f"{names.API_PATH}/gpuharvestnodes/{name}"
                await self._client.request("DELETE", path, body={"preconditions": versions})
                log.info("report of a node that is gone deleted", extra={"node": name})
            except (ApiError, Unreachable) as error:  # it has just reported again, or the next round will tell
                log.info("report not deleted", extra={"node": name, "error": str(error)})

    # SLA

    async def monitor(self) -> None:
        await self._belief.look()
        now_s, rules = self._now_s(), self._rules()
        running = self._running()
        samples = [sample for _, sample in each(running, self._sample)]
        known = self._tracks
        self._tracks = {
            sample.pod_uid: observe(known.get(sample.pod_uid), sample, self._rules(sample.node)) for sample in samples
        }
        count(known, self._tracks)
        stored = {item["spec"]["ownerUID"]: one for item, one in each(self.workloads.items.values(), owner_of)}
        owners = self._records.merged(stored, now_s, rules)
        homes = {item["spec"]["ownerUID"]: item["metadata"]["namespace"] for item in self.workloads.items.values()}
        pods = {pod["metadata"]["uid"]: pod for pod in running}
        self._guards.look(running, self._fresh_nodes(now_s), self._rules, now_s)
        waiting = self._guards.waiting(self._tracks.values(), self._rules, now_s)
        movable = self._better.movable(waiting, pods, owners, now_s, self._guards.of)
        chosen = choose(movable, owners, len(running), now_s, rules, homes)
        rounds: defaultdict[str, list[Track]] = defaultdict(list)
        for track in chosen:
            rounds[track.sample.owner_uid].append(track)
        for uid, tracks in rounds.items():
            with apart(pods[tracks[0].sample.pod_uid]):
                owners[uid] = await self._move(uid, tracks, owners.get(uid, Owner()), pods)
        await self._write_workloads(running, owners, now_s)

    async def _move(self, uid: str, tracks: list[Track], before: Owner, pods: dict[str, Json]) -> Owner:
        """Evict pods of one owner. Their evictions are stored first: what cannot be stored is not done, or a restart
        would forget back-off and budget. An eviction that is refused afterwards is taken back."""
        now_s, rules = self._now_s(), self._rules()
        owner, guarded = before, self._guards.of
        for track in tracks:
            owner = gone(owner, track, now_s, rules, was_guarded=track.sample.pod_uid in guarded)
        if not await self._store(uid, owner, now_s):
            return before
        done = before
        for track in tracks:
            pod = track.sample.pod_uid
            why = (Told.GPU_GUARDED, f"{guarded[pod].why}; moved") if pod in guarded else moved_for(track)
            if await self._hands.evict(pods[pod], *why):
                done = gone(done, track, now_s, rules, was_guarded=pod in guarded)
                self._records.keep(uid, done)

        return done

    async def _store(self, uid: str, owner: Owner, now_s: float) -> bool:
        """Write the evictions of an owner before they happen. The owner of a pod that is new has no object yet."""
        held = next((item for item in self.workloads.items.items() if item[1]["spec"]["ownerUID"] == uid), None)
        if held is None:
            return False
        (namespace, name), workload = held
        before = workload.get("status") or {}
        tracks = [track for track in self._tracks.values() if track.sample.owner_uid == uid]
        guarded = self._guards.told(now_s).get(uid)
        status = status_of(owner, tracks, before, now_s, self._rules(), guarded=guarded)
        return await self._write_status(namespace, name, status, before)

    def _rules(self, node: str | None = None) -> MonitorSettings:
        """SLA windows of the node's policy; without a node the eviction budget of the whole cluster."""
        policies = self._state.policies
        spec = policies.of_node(self.labels.get(node, {})) if node else policies.of_cluster()
        return with_policy(self._settings.monitor, spec)

    def _running(self) -> list[Json]:
        return [
            pod
            for pod in self.pods.items.values()
            if pod_place(pod).gpu_uuids
            and (pod.get("status") or {}).get("phase") == "Running"
            and not pod["metadata"].get("deletionTimestamp")
        ]

    def _sample(self, pod: Json) -> Sample | None:
        """None for a pod its node has not reported, for what cannot be read, and where best effort is left alone."""
        place = pod_place(pod)
        try:
            wish = offline_pod(pod)
        except InvalidObject:
            return None
        reported = self._reported(place.node, place.uid)
        if reported is None or (wish.sla <= 0 and self._rules(place.node).floor <= 0):
            return None
        profile = self._state.asked.job(wish, self._now_s()).profile

        return Sample(
            pod_uid=place.uid,
            owner_uid=wish.owner_uid,
            namespace=wish.namespace,
            gpus=wish.gpus,
            node=place.node,
            sla=wish.sla,
            standalone_tokens_per_s=profile.standalone_tokens_per_s if profile else 0.0,
            runtime_s=self._now_s() - started_at_s(pod),
            demand_s=float(reported.get("demandSeconds", 0.0)),
            tokens=reported.get("usefulTokens"),
            runnable_s=reported.get("runnableSeconds"),
            is_held=self._is_held(place),
            is_movable=not is_bare(pod),
            is_measured=self._belief.covers(self.profiles.items.get((wish.namespace, wish.profile), {})),
            memory=memory_given(self.nodes.items.get(("", place.node), {}), place.gpu_uuids),
        )

    def _is_held(self, place: PodPlace) -> bool:
        """Something keeps the pod from running that is no fault of its node: by our own word, or by the node's."""
        policies = self._state.policies
        if policies.brake or policies.paused(self.labels.get(place.node, {})):
            return True
        node = self.nodes.items.get(("", place.node), {})
        status = node.get("status") or {}
        if phase_in_force(status, node.get("spec") or {}) != "Harvesting":
            return True
        harvestable = {gpu["uuid"] for gpu in status.get("gpus") or [] if gpu.get("harvestable")}
        return not harvestable.issuperset(place.gpu_uuids)

    def _fresh_nodes(self, now_s: float) -> dict[str, Json]:
        fresh = self._state.fresh_gpus(now_s)
        return {name: node for (_, name), node in self.nodes.items.items() if name in fresh}

    def _reported(self, node: str, pod_uid: str) -> Json | None:
        status = self.nodes.items.get(("", node), {}).get("status") or {}
        return next((entry for entry in status.get("offline") or [] if entry["podUID"] == pod_uid), None)

    async def _write_workloads(self, running: list[Json], owners: dict[str, Owner], now_s: float) -> None:
        tracks: defaultdict[str, list[Track]] = defaultdict(list)
        for track in self._tracks.values():
            tracks[track.sample.owner_uid].append(track)
        lost = await self._unreachable(now_s)
        guarded = self._guards.told(now_s)
        for pod in [*running, *(pod for pod, _ in lost.values())]:
            uid = owner_uid(pod)
            key = (pod["metadata"]["namespace"], workload_name(uid))
            judged = any(not one.sample.is_best_effort or is_starved(one) for one in tracks[uid])
            if key not in self.workloads.items and (judged or uid in lost or uid in guarded):
                with apart(pod):
                    await self._create_workload(pod)
        for (namespace, name), workload in list(self.workloads.items.items()):
            uid = workload["spec"]["ownerUID"]
            before = workload.get("status") or {}
            why = lost[uid][1] if uid in lost else None
            with apart(workload):
                owner = owners.get(uid, Owner())
                status = status_of(owner, tracks[uid], before, now_s, self._rules(), why, guarded.get(uid))
                if status != before:
                    await self._write_status(namespace, name, status, before)
        self._hands.forget_all_but({pod["metadata"]["uid"] for pod in self.pods.items.values()})
        for one in guarded.values():
            await self._hands.tell_once(one.pod, Told.GPU_GUARDED, one.note)
        for pod, why in lost.values():
            await self._hands.tell_once(pod, Told.SLA_UNREACHABLE, f"{why.reason}: {why.message}")

    async def _write_status(self, namespace: str, name: str, status: Json, before: Json) -> bool:
        """What was written stands in our own view at once: the watch tells it later."""
        path = f"/apis/{names.API_VERSION}/namespaces/{namespace}/offlineworkloads/{name}/status"
        written = await self._hands.patch(path, {"status": {**dict.fromkeys(before), **status}})
        held = self.workloads.items.get((namespace, name))
        if written and held is not None:
            self.workloads.items[namespace, name] = {**held, "status": status}

        return written

    async def _unreachable(self, now_s: float) -> dict[str, tuple[Json, Beyond]]:
        """By owner, a refused pod that would get its SLA on no node if nothing else ran there."""
        if self._state.policies.brake or self._state.policies.paused({}):
            return {}  # refused because nothing harvests: that says nothing about what the fleet could give
        waiting = each(self.pods.items.values(), self._refused_kind)
        known = await self._reach.of([kind for _, kind in waiting], now_s)
        found = {}
        for pod, kind in waiting:
            if why := known.get(kind):
                found[owner_uid(pod)] = (pod, why)

        return found

    async def _create_workload(self, pod: Json) -> None:
        workload = new_workload(pod, promised(pod))
        path = f"/apis/{names.API_VERSION}/namespaces/{workload['metadata']['namespace']}/offlineworkloads"
        with contextlib.suppress(ApiError, Unreachable):  # made by the round before and not in our view yet, or later
            created = await self._client.request("POST", path, body=workload)
            self.workloads.items[key_of(created)] = created


async def run_controller(client: KubeClient, settings: ControllerSettings, identity: str) -> None:
    """Until cancelled; followers keep their views warm and do nothing."""
    controller = Controller(client, settings)
    lease = Lease(client, settings.namespace, settings.lease_name, identity, settings.lease_s)

    async def every(seconds: float, act: Callable[[], Awaitable[None]]) -> None:
        while True:
            if not controller.missing() and lease.held:
                try:
                    await act()
                except Exception:
                    log.exception("round failed")
            elif not lease.held:
                controller.stand_down()
            await asyncio.sleep(seconds)

    tasks = [view.run() for view in controller.views]
    rounds = [
        every(settings.requeue_every_s, controller.requeue),
        every(settings.policy_every_s, controller.apply_policies),
        every(settings.clear_every_s, controller.clear),
        every(settings.monitor_every_s, controller.monitor),
        every(settings.monitor_every_s, controller.judge_policies),
        every(settings.monitor_every_s, controller.forget),
        every(settings.monitor_every_s, controller.free_stuck),
        every(settings.monitor_every_s, controller.account),
        every(settings.monitor_every_s, controller.measure),
    ]
    await Probes(controller.missing).serve(settings.probe_host, settings.probe_port)
    await asyncio.gather(lease.run(), *tasks, *rounds)
