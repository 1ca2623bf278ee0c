"""Offline pods on a GPU under guard: a process that Valve cannot see uses it, and that may last for good.

Such a pod is stopped. The monitor does not judge it, because neither the job nor the node missed anything. Its owner is
told once the guard has lasted for longer than a restart of an online pod takes. As long after its beginning as a broken
promise needs to count (for best effort an hour of the floor) the pod may be moved, by the same budget and back-off,
where another GPU takes it."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from valve_kube import names
from valve_kube.node_wish import node_wish
from valve_kube.objects import Object, annotation, phase_in_force, pod_place
from valve_kube.owners import is_bare, owner_key

from valve_scheduler.controller.monitor import MonitorSettings, Track, Verdict

TOLD_AFTER_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Guarded:
    """One pod, the first of its GPUs that is closed, and why."""

    pod: Object
    node: str
    why: str
    since_s: float
    floor: float  # of best effort on this node

    @property
    def note(self) -> str:
        return f"stopped on {self.node}: {self.why}. It goes on when that ends; {self._fate}"

    @property
    def _fate(self) -> str:
        if is_bare(self.pod):
            return "it has no controller that would create it elsewhere"
        if node_wish(self.pod["spec"]).is_bound:
            return "it is never moved, because only kube-scheduler knows where its volumes and wishes let it go"
        if self.floor <= 0 and not annotation(self.pod, names.SLA):
            return "it is never moved: the policy of its node leaves best effort where it is (floorPercent 0)"
        return "it is moved if this lasts and another GPU can take it"


class Guards:
    """Remembers since when each pod has stood under guard; begins anew with the controller, as windows do."""

    def __init__(self) -> None:
        self.of: dict[str, Guarded] = {}  # by UID of the pod
        self._oldest: dict[str, Guarded] = {}  # by owner

    def look(
        self,
        pods: Iterable[Object],
        nodes: Mapping[str, Object],
        rules: Callable[[str], MonitorSettings],
        now_s: float,
    ) -> None:
        """`nodes`: GPUHarvestNodes with a fresh report. What holds a whole node (a pause, a mode) is no guard."""
        before, self.of = self.of, {}
        for pod in pods:
            place = pod_place(pod)
            node = nodes.get(place.node, {})
            status = node.get("status") or {}
            if phase_in_force(status, node.get("spec") or {}) != "Harvesting":
                continue
            closed = {gpu["uuid"]: gpu.get("reason", "") for gpu in status.get("gpus") or [] if gpu.get("guarded")}
            if uuid := next((uuid for uuid in place.gpu_uuids if uuid in closed), ""):
                since_s = before[place.uid].since_s if place.uid in before else now_s
                why = f"{uuid} is closed to offline work: {closed[uuid]}"
                floor = rules(place.node).floor
                self.of[place.uid] = Guarded(pod=pod, node=place.node, why=why, since_s=since_s, floor=floor)
        self._oldest = {}
        for one in sorted(self.of.values(), key=lambda one: -one.since_s):
            self._oldest[owner_key(one.pod)] = one

    def told(self, now_s: float) -> dict[str, Guarded]:
        """By owner, the pod of it that has stood so for longest."""
        return {uid: one for uid, one in self._oldest.items() if now_s - one.since_s >= TOLD_AFTER_S}

    def waiting(self, tracks: Iterable[Track], rules: Callable[[str], MonitorSettings], now_s: float) -> list[Track]:
        """The tracks, those of pods that were under guard for long enough as ones that want to move."""
        return [
            replace(track, verdict=Verdict.PERSISTENTLY_MISSED)
            if self._is_due(track, rules(track.sample.node), now_s)
            else track
            for track in tracks
        ]

    def _is_due(self, track: Track, rules: MonitorSettings, now_s: float) -> bool:
        found = self.of.get(track.sample.pod_uid)
        windows = rules.floor_windows if track.sample.is_best_effort else rules.windows
        return found is not None and now_s - found.since_s >= windows * rules.window_s
