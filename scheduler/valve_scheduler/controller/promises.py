"""Watches what running offline pods were promised, and moves those that do not get it.

What a round must not forget lives in OfflineWorkload status."""

from collections import defaultdict
from collections.abc import Callable, Iterable

from valve_kube.client import Json
from valve_kube.errors import InvalidObject
from valve_kube.objects import PodPlace, offline_pod, phase_in_force, pod_place, started_at_s
from valve_kube.owners import is_bare, key_of_owner, workload_key

from valve_scheduler.controller.apart import apart, each
from valve_scheduler.controller.belief import Belief
from valve_scheduler.controller.better import Better
from valve_scheduler.controller.caches import Caches
from valve_scheduler.controller.conditions import Told
from valve_scheduler.controller.denials import Denials, denied_track
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
from valve_scheduler.controller.records import Records
from valve_scheduler.controller.tally import count
from valve_scheduler.controller.turns import Late, choose, gone
from valve_scheduler.controller.waiting import Waiting
from valve_scheduler.controller.workload_book import WorkloadBook
from valve_scheduler.controller.workloads import moved_for, owner_of


class Promises:
    def __init__(
        self,
        caches: Caches,
        hands: Hands,
        book: WorkloadBook,
        waiting: Waiting,
        belief: Belief,
        now_s: Callable[[], float],
        steady_s: Callable[[], float],
        settings: MonitorSettings,
        denials: Denials,
    ) -> None:
        self._caches, self._hands, self._book = caches, hands, book
        self._waiting, self._belief, self._settings = waiting, belief, settings
        self._now_s, self._steady_s = now_s, steady_s
        self._tracks: dict[str, Track] = {}  # by UID of the pod
        self._records, self._guards, self._better = Records(), Guards(), Better(caches.state)
        self._denials, self._late = denials, Late()

    async def round(self) -> None:
        await self._belief.look()
        now_s, steady_s, rules = self._now_s(), self._steady_s(), self._rules()
        denied = await self._denied(steady_s)
        running = [pod for pod in self._caches.running() if pod["metadata"]["uid"] not in self._denials.of]
        samples = [sample for _, sample in await each(running, self._sample)]
        known = self._tracks
        self._tracks = {
            sample.pod_uid: observe(known.get(sample.pod_uid), sample, self._rules(sample.node)) for sample in samples
        }
        count(known, self._tracks)
        workloads = self._caches.workloads.items
        stored = {workload_key(item): one for item, one in await each(workloads.values(), owner_of)}
        owners = self._records.merged(stored, now_s, rules)
        homes = {workload_key(item): item["metadata"]["namespace"] for item in workloads.values()}
        pods = {pod["metadata"]["uid"]: pod for pod in [*running, *(pod for pod, _ in denied)]}
        self._guards.look(running, self._caches.fresh_nodes(now_s), self._rules, steady_s)
        waiting = self._guards.waiting(self._tracks.values(), self._rules, steady_s)
        movable = self._better.movable(waiting, pods, owners, now_s, self._guards.of)
        without = [track for _, track in denied]
        spent = self._denials.spent(now_s, rules.budget_s)
        chosen = choose(movable, owners, len(running), now_s, rules, homes, without, spent, self._late.of(steady_s))
        await self._book.open(pods[one.sample.pod_uid] for one in chosen if one.sample.pod_uid in self._denials.of)
        for uid, tracks in _by_owner(chosen).items():
            with apart(pods[tracks[0].sample.pod_uid]):
                owners[uid] = await self._move(uid, tracks, owners.get(uid, Owner()), pods)
        of_owner, lost = _by_owner(self._tracks.values()), await self._waiting.unreachable(now_s)
        await self._book.round(running, owners, of_owner, now_s, rules, lost, self._guards.told(steady_s))
        self._hands.forget_all_but({pod["metadata"]["uid"] for pod in self._caches.pods.items.values()})

    async def _move(self, uid: str, tracks: list[Track], before: Owner, pods: dict[str, Json]) -> Owner:
        """Evict pods of one owner. Their evictions are stored first: what cannot be stored is not done, or a restart
        would forget back-off and budget. An eviction that is refused afterwards is taken back."""
        now_s, steady_s, rules = self._now_s(), self._steady_s(), self._rules()
        owner, guarded = before, self._guards.of
        for track in tracks:
            owner = gone(owner, track, now_s, rules, was_guarded=track.sample.pod_uid in guarded)
        of_owner = _by_owner(self._tracks.values()).get(uid, [])
        if not await self._book.save(uid, owner, of_owner, now_s, rules, self._guards.told(steady_s).get(uid)):
            for track in tracks:
                self._late.refused(track, steady_s)
            return before
        done = before
        for track in tracks:
            pod = track.sample.pod_uid
            if await self._hands.evict(pods[pod], *self._why(track)):
                done = gone(done, track, now_s, rules, was_guarded=pod in guarded)
                self._records.keep(uid, done)
                if pod in self._denials.of:
                    self._denials.moved(uid, now_s)
            else:
                self._late.refused(track, steady_s)

        return done

    def _why(self, track: Track) -> tuple[Told, str]:
        """Reason and note of the event with which a pod goes."""
        pod = track.sample.pod_uid
        if pod in self._denials.of:
            return Told.PLACE_LOST, self._denials.of[pod].note
        return (Told.GPU_GUARDED, f"{self._guards.of[pod].why}; moved") if pod in self._guards.of else moved_for(track)

    async def _denied(self, steady_s: float) -> list[tuple[Json, Track]]:
        """Pods that have lacked their devices for long enough."""
        self._denials.look(self._caches.pods.items.values(), self._is_stopped_or_guarded, steady_s)
        return await each(self._denials.lasting(steady_s), denied_track)

    def _rules(self, node: str | None = None) -> MonitorSettings:
        """SLA windows of the node's policy; without a node the eviction budget of the whole cluster."""
        policies = self._caches.state.policies
        spec = policies.of_node(self._caches.grounds.labels(node)) if node else policies.of_cluster()
        return with_policy(self._settings, spec)

    def _sample(self, pod: Json) -> Sample | None:
        """None for a pod its node has not reported, for what cannot be read, and where best effort is left alone."""
        place = pod_place(pod)
        try:
            wish = offline_pod(pod)
        except InvalidObject:
            return None
        reported = self._caches.reported(place.node, place.uid)
        if reported is None or (wish.sla <= 0 and self._rules(place.node).floor <= 0):
            return None
        profile = self._caches.state.asked.profile(wish)

        return Sample(
            pod_uid=place.uid,
            owner_uid=key_of_owner(wish.namespace, wish.owner_uid),
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
            is_measured=self._belief.covers(self._caches.profiles.items.get((wish.namespace, wish.profile), {})),
            memory=memory_given(self._caches.node(place.node), place.gpu_uuids),
        )

    def _is_held(self, place: PodPlace) -> bool:
        """Something keeps the pod from running that is no fault of its node: by our own word, or by the node's."""
        return self._is_stopped(place) or not all(gpu.get("harvestable") for gpu in self._gpus(place))

    def _is_stopped_or_guarded(self, place: PodPlace) -> bool:
        """A GPU that is not offered for another reason keeps no pod whose container cannot be made."""
        return self._is_stopped(place) or any(gpu.get("guarded") for gpu in self._gpus(place))

    def _is_stopped(self, place: PodPlace) -> bool:
        """Offline work may not run there now: a brake, a pause, a drain or a mode."""
        policies = self._caches.state.policies
        if policies.brake or policies.paused(self._caches.grounds.labels(place.node)):
            return True
        node = self._caches.node(place.node)
        return phase_in_force(node.get("status") or {}, node.get("spec") or {}) != "Harvesting"

    def _gpus(self, place: PodPlace) -> list[Json]:
        """The pod's, as its node reports them; one that it does not report is empty."""
        status = self._caches.node(place.node).get("status") or {}
        reported = {gpu["uuid"]: gpu for gpu in status.get("gpus") or []}
        return [reported.get(uuid, {}) for uuid in place.gpu_uuids]


def _by_owner(tracks: Iterable[Track]) -> dict[str, list[Track]]:
    found: defaultdict[str, list[Track]] = defaultdict(list)
    for track in tracks:
        found[track.sample.owner_uid].append(track)
    return found
