"""Whether offline pods get the throughput they were promised, and which of them should move. Pure.

A window is ten minutes of time with offline demand, so a job that waits for its own input is never blamed. While
harvesting is held (a pause, a drain, a guard) nothing is judged, and the windows begin anew afterwards. A pod misses
its SLA when two windows in a row stay below it; it is evicted when the budget of the fleet and the back-off of its
owner allow that, and its owner keeps away from the node for a while.

What a tenant says of the speed of its job moves nothing: unless the controller measured that itself, a miss counts
only where the node gave too little (`given.py`). A best-effort pod was promised nothing; it moves, by the same rules,
when it had next to no time for an hour: its GPUs became busy for good.
"""

import enum
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class MonitorSettings:
    """Defaults; `with_policy` overrides them."""

    window_s: float = 600.0
    windows: int = 2
    warm_up_s: float = 300.0  # weights load and graphs compile: no fair measure before
    min_runtime_s: float = 600.0
    budget_share: float = 0.05  # of running offline pods, at least one pod
    budget_s: float = 600.0
    at_once: int = 8  # pods of one owner that one round may evict
    backoff_s: float = 1200.0  # between two rounds of one owner; doubles with each up to the limit
    max_backoff_s: float = 1200.0
    max_rounds: int = 24  # within a day; then the SLA is called unreachable and the job is left where it is
    avoid_s: float = 21600.0
    forget_s: float = 86400.0  # of an owner's evictions
    # Not in the text of these settings: pages of simulations carry a hash of it, and none of them has best effort.
    floor: float = field(default=0.02, repr=False)  # share of open time below which it had none; 0: it never moves
    floor_windows: int = field(default=6, repr=False)  # an hour of them


# Keys of a HarvestPolicy's spec.
_SECONDS = {
    "sla": {"windowSeconds": "window_s", "warmUpSeconds": "warm_up_s", "minRuntimeSeconds": "min_runtime_s"},
    "eviction": {
        "budgetSeconds": "budget_s",
        "backoffSeconds": "backoff_s",
        "maxBackoffSeconds": "max_backoff_s",
        "avoidSeconds": "avoid_s",
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What a node reports of one offline pod; counters since the pod's start. tokens None: no engine hook."""

    pod_uid: str
    owner_uid: str
    node: str
    sla: float
    standalone_tokens_per_s: float
    runtime_s: float
    demand_s: float
    tokens: float | None
    runnable_s: float | None = None  # time the gate was open
    is_movable: bool = True  # a controller makes it anew; a bare pod that is evicted is lost
    namespace: str = ""
    gpus: int = 1
    is_held: bool = False  # a pause, a drain, a mode or a guard keeps it from running: not a miss
    is_measured: bool = False  # the controller measured the standalone speed; else it is the tenant's word
    memory: float = 1.0  # share of its speed that the free memory of its GPUs leaves to an unmeasured job

    @property
    def is_best_effort(self) -> bool:
        return self.sla <= 0


class Verdict(enum.Enum):
    """How a pod stands, as the reason of its SLAMet condition."""

    WARMING_UP = "WarmingUp"
    HELD = "HarvestingHeld"
    NO_TOKENS = "NoEngineHook"  # harvest seconds alone say nothing about tokens
    NO_PROFILE = "NoProfile"
    MEASURING = "Measuring"
    MET = "Met"
    MISSED = "Missed"
    NODE_GAVE_ENOUGH = "NodeGaveEnough"  # slower than its profile says, on a node that gave what was promised
    PERSISTENTLY_MISSED = "PersistentlyMissed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Track:
    """One pod under watch: where its window began and how the last ones ended."""

    sample: Sample
    verdict: Verdict
    begin_demand_s: float = 0.0
    begin_tokens: float = 0.0
    begin_runnable_s: float = 0.0
    misses: int = 0
    achieved: float | None = None  # share of standalone in the last whole window


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """What survives of a job between its pods and between two runs of the monitor (OfflineWorkload status)."""

    evicted_at_s: tuple[float, ...] = ()  # one per pod; those of one round are equal
    avoid_until_s: Mapping[str, float] = field(default_factory=dict)

    def rounds(self, now_s: float, settings: MonitorSettings) -> list[float]:
        """When pods of it were evicted, as far as that is remembered."""
        return sorted({at_s for at_s in self.evicted_at_s if now_s - at_s < settings.forget_s})


def with_policy(base: MonitorSettings, spec: Mapping[str, Any]) -> MonitorSettings:
    """The settings as a HarvestPolicy's spec changes them."""
    numbers: dict[str, Any] = {}
    for part, keys in _SECONDS.items():
        found = spec.get(part) or {}
        numbers |= {name: float(found[key]) for key, name in keys.items() if key in found}
    sla, eviction = spec.get("sla") or {}, spec.get("eviction") or {}
    if "windows" in sla:
        numbers["windows"] = int(sla["windows"])
    if "floorPercent" in sla:
        numbers["floor"] = float(sla["floorPercent"]) / 100
    if "budgetPercent" in eviction:
        numbers["budget_share"] = float(eviction["budgetPercent"]) / 100
    if "maxPerOwner" in eviction:
        numbers["max_rounds"] = int(eviction["maxPerOwner"])
    if "atOncePerOwner" in eviction:
        numbers["at_once"] = int(eviction["atOncePerOwner"])

    return replace(base, **numbers)


def observe(track: Track | None, sample: Sample, settings: MonitorSettings) -> Track:
    """Take one more sample of a pod; closes its window when that holds enough time with demand."""
    tokens = _most_tokens(sample)
    unknown = _cannot_judge(sample, tokens, settings)
    if unknown is not None or tokens is None:
        return _begin(sample, unknown or Verdict.NO_TOKENS)
    if track is not None and track.verdict is Verdict.HELD:
        return _begin(sample, Verdict.MEASURING)
    went_back = track is not None and (tokens < track.begin_tokens or sample.demand_s < track.begin_demand_s)
    if track is None or went_back:  # first sight, or the node's daemon lost its counters
        return _begin(sample, Verdict.MEASURING, misses=track.misses if track else 0)
    span_s = sample.demand_s - track.begin_demand_s
    if span_s < settings.window_s:
        known = track.achieved is not None or track.verdict is Verdict.NO_TOKENS
        return replace(track, sample=sample, verdict=track.verdict if known else Verdict.MEASURING)
    achieved = (tokens - track.begin_tokens) / span_s / _speed(sample)
    wanted, windows = (
        (settings.floor, settings.floor_windows) if sample.is_best_effort else (sample.sla, settings.windows)
    )
    if achieved >= wanted:
        if sample.tokens is None or sample.is_best_effort:
            return _begin(sample, Verdict.NO_TOKENS)  # it had the time; it does not report what it made of it
        return _begin(sample, Verdict.MET, achieved=achieved)
    if not sample.is_measured and sample.runnable_s is not None:
        given = (sample.runnable_s - track.begin_runnable_s) / span_s * sample.memory
        if given >= wanted:
            return _begin(sample, Verdict.NODE_GAVE_ENOUGH, achieved=achieved)
    misses = track.misses + 1
    persistent = misses >= windows and sample.runtime_s >= settings.min_runtime_s
    verdict = Verdict.PERSISTENTLY_MISSED if persistent else Verdict.MISSED

    return _begin(sample, verdict, misses=misses, achieved=achieved)


def choose_evictions(
    tracks: Iterable[Track],
    owners: Mapping[str, Owner],
    running: int,
    now_s: float,
    settings: MonitorSettings,
    namespaces: Mapping[str, str] | None = None,
) -> list[Track]:
    """The pods to move now: the worst of the namespace that had the fewest moves, or the longest ago; a few per owner,
    within what is left of the budget. How badly a pod misses rests on a profile that its tenant wrote, so it ranks
    within the tenant alone. `namespaces`: of owners, those whose pods wait among them."""
    tracks = list(tracks)
    recent = {uid: sum(now_s - at_s < settings.budget_s for at_s in one.evicted_at_s) for uid, one in owners.items()}
    left = max(1, int(settings.budget_share * running)) - sum(recent.values())
    waiting: dict[str, list[Track]] = {}
    for track in tracks:
        if track.verdict is Verdict.PERSISTENTLY_MISSED and track.sample.is_movable:
            waiting.setdefault(track.sample.namespace, []).append(track)
    moved = Counter(dict.fromkeys(waiting, 0))
    last_s: dict[str, float] = {}
    homes = {**(namespaces or {}), **{track.sample.owner_uid: track.sample.namespace for track in tracks}}
    for uid, namespace in homes.items():
        moved[namespace] += recent.get(uid, 0)
        times = owners[uid].evicted_at_s if uid in owners else ()
        last_s[namespace] = max(last_s.get(namespace, 0.0), *times, 0.0)
    for of_namespace in waiting.values():
        of_namespace.sort(key=_need, reverse=True)
    chosen: list[Track] = []
    of_owner: Counter[str] = Counter()
    while waiting and len(chosen) < left:
        namespace = min(waiting, key=lambda name: (moved[name], last_s[name], name))
        track = waiting[namespace].pop()
        if not waiting[namespace]:
            del waiting[namespace]
        uid = track.sample.owner_uid
        owner = owners.get(uid, Owner())
        may_go = now_s >= backoff_until_s(owner, now_s, settings) and not is_unreachable(owner, now_s, settings)
        if may_go and of_owner[uid] < settings.at_once:
            of_owner[uid] += 1
            moved[namespace] += 1
            chosen.append(track)

    return chosen


def evicted(owner: Owner, node: str, now_s: float, settings: MonitorSettings) -> Owner:
    """The owner after one of its pods was evicted from a node."""
    avoid = {name: until_s for name, until_s in owner.avoid_until_s.items() if until_s > now_s}

    kept = (at_s for at_s in owner.evicted_at_s if now_s - at_s < settings.forget_s)

    return Owner(
        evicted_at_s=(*kept, now_s),
        avoid_until_s={**avoid, node: now_s + settings.avoid_s},
    )


def backoff_until_s(owner: Owner, now_s: float, settings: MonitorSettings) -> float:
    """Before this no other pod of the owner is evicted."""
    rounds = owner.rounds(now_s, settings)
    if not rounds:
        return 0.0

    longest_s = max(settings.backoff_s, settings.max_backoff_s)
    return rounds[-1] + min(settings.backoff_s * 2.0 ** (len(rounds) - 1), longest_s)


def is_unreachable(owner: Owner, now_s: float, settings: MonitorSettings) -> bool:
    return len(owner.rounds(now_s, settings)) >= settings.max_rounds


def _need(track: Track) -> tuple[bool, float, str]:
    """The pod that misses most of what it was promised comes first; a pod that was promised nothing comes last."""
    sample = track.sample
    return sample.is_best_effort, (track.achieved or 0.0) / (sample.sla or 1.0), sample.pod_uid


def _speed(sample: Sample) -> float:
    """What a share is a share of: tokens, for best effort seconds."""
    return 1.0 if sample.is_best_effort else sample.standalone_tokens_per_s


def _most_tokens(sample: Sample) -> float | None:
    """What the engine counted; without a hook what it can have made at most, at full speed whenever the gate was open:
    if even that is below the SLA, the miss is proven. Of best effort only the open time matters."""
    if sample.is_best_effort:
        return sample.runnable_s
    if sample.tokens is not None or sample.runnable_s is None:
        return sample.tokens

    return sample.runnable_s * sample.standalone_tokens_per_s


def _cannot_judge(sample: Sample, tokens: float | None, settings: MonitorSettings) -> Verdict | None:
    if _speed(sample) <= 0:
        return Verdict.NO_PROFILE
    if tokens is None:
        return Verdict.NO_TOKENS
    if sample.is_held:
        return Verdict.HELD
    if sample.runtime_s < settings.warm_up_s:
        return Verdict.WARMING_UP

    return None


def _begin(sample: Sample, verdict: Verdict, *, misses: int = 0, achieved: float | None = None) -> Track:
    """A fresh window from this sample on."""
    return Track(
        sample=sample,
        verdict=verdict,
        begin_demand_s=sample.demand_s,
        begin_tokens=_most_tokens(sample) or 0.0,
        begin_runnable_s=sample.runnable_s or 0.0,
        misses=misses,
        achieved=achieved,
    )
