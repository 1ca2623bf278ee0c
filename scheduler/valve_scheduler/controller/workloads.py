"""Turns the monitor's values into OfflineWorkload objects, which people and the extender read, and back. Pure."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from valve_kube import names
from valve_kube.errors import InvalidObject
from valve_kube.objects import Object, kind_of, seconds_of, sla_of
from valve_kube.owners import controller_of, owner_uid

from valve_scheduler.controller.conditions import Told, condition, time_text
from valve_scheduler.controller.guarded import Guarded
from valve_scheduler.controller.monitor import MonitorSettings, Owner, Track, Verdict, backoff_until_s, is_unreachable
from valve_scheduler.placement.reach import Beyond

# Limits of the CRD.
KEPT_EVICTIONS = 192  # a day of them, at the defaults
KEPT_AVOIDED = 256  # at the defaults 144 nodes are avoided at one time

_MESSAGES = {
    Verdict.WARMING_UP: "the pod has just started",
    Verdict.NO_TOKENS: "the engine reports no tokens; install the engine hook to have the SLA watched",
    Verdict.HELD: "harvesting is held; the SLA is watched again from the moment it goes on",
    Verdict.NO_PROFILE: "the job's OfflineProfile is missing or not ready",
    Verdict.MEASURING: "no whole window has passed yet",
    Verdict.MET: "the last window reached the SLA",
    Verdict.MISSED: "the last window missed the SLA",
    Verdict.NODE_GAVE_ENOUGH: "the last window missed the SLA by the pod's own profile alone: the node gave the time "
    "and the memory for it, so the pod stays. Only a profile that Valve measures moves a pod",
    Verdict.PERSISTENTLY_MISSED: "several windows in a row missed the SLA; the pod will be moved",
}
_BELOW = (Verdict.MISSED, Verdict.NODE_GAVE_ENOUGH, Verdict.PERSISTENTLY_MISSED)
_STAYS = "several windows in a row missed the SLA; the pod has no controller that would make it anew, so it stays"


def is_starved(track: Track) -> bool:
    return track.verdict is Verdict.PERSISTENTLY_MISSED


def moved_for(track: Track) -> tuple[Told, str]:
    """Reason and note of the event when a pod is moved."""
    node, reached = track.sample.node, track.achieved or 0.0
    if track.sample.is_best_effort:
        return Told.GPU_BUSY, f"could run {100 * reached:.1f} % of the last window on {node}, busy for an hour; moved"
    return Told.SLA_MISSED, f"reached {reached:.2f} of standalone on {node}, promised {track.sample.sla:.2f}; moved"


def workload_name(owner: str) -> str:
    return f"owner-{owner}"


def new_workload(pod: Object, sla: float) -> dict[str, Any]:
    """The object for a pod's owner; deleted together with it."""
    metadata = pod["metadata"]
    itself = {"apiVersion": "v1", "kind": "Pod", "name": metadata["name"], "uid": metadata["uid"]}
    owner = controller_of(pod) or itself
    reference = {key: owner[key] for key in ("apiVersion", "kind", "name", "uid")}

    return {
        "apiVersion": names.API_VERSION,
        "kind": "OfflineWorkload",
        "metadata": {
            "name": workload_name(owner_uid(pod)),
            "namespace": metadata["namespace"],
            "ownerReferences": [reference],
        },
        "spec": {"ownerUID": owner["uid"], "ownerName": owner["name"], "kind": _kind(pod), "sla": sla},
    }


def _kind(pod: Object) -> str:
    """The kind of the work. A pod that bypassed the webhook may say anything; its owner is watched all the same."""
    try:
        return kind_of(pod)
    except InvalidObject:
        return names.BATCH


def promised(pod: Object) -> float:
    """The promised share. A share that cannot be read promises nothing."""
    try:
        return sla_of(pod)
    except InvalidObject:
        return 0.0


def owner_of(workload: Object) -> Owner:
    status = workload.get("status") or {}
    return Owner(
        evicted_at_s=tuple(map(seconds_of, status.get("evictionTimes") or [])),
        avoid_until_s={entry["node"]: seconds_of(entry["until"]) for entry in status.get("avoidNodes") or []},
    )


def status_of(
    owner: Owner,
    tracks: Sequence[Track],
    before: Object,
    now_s: float,
    settings: MonitorSettings,
    beyond: Beyond | None = None,
    guarded: Guarded | None = None,
) -> dict[str, Any]:
    """Status of an owner: its worst pod decides; a condition's transition time moves only with its status.

    `beyond`: why no node would keep the SLA of a waiting pod of this owner. `guarded`: the owner's pod that has been
    under guard for longest.
    """
    old = before.get("conditions") or []
    worst = min((one for one in tracks if not one.sample.is_best_effort), key=_standing, default=None)
    conditions = []
    busy = next((one for one in tracks if one.sample.is_best_effort and is_starved(one)), None)
    if busy is not None:
        message = f"{busy.sample.node}: online work has kept the GPUs of the pod for an hour"
        conditions.append(condition("GPUBusy", "True", "BusyForGood", message, old, now_s))
    if guarded is not None:
        conditions.append(condition("GPUGuarded", "True", "UnseenUse", guarded.note, old, now_s))
    if worst is not None:
        met = {Verdict.MET: "True"} | dict.fromkeys(_BELOW, "False")
        stays = worst.verdict is Verdict.PERSISTENTLY_MISSED and not worst.sample.is_movable
        message = f"{worst.sample.node}: {_STAYS if stays else _MESSAGES[worst.verdict]}"
        verdict = ("SLAMet", met.get(worst.verdict, "Unknown"), worst.verdict.value, message)
        conditions.append(condition(*verdict, old, now_s))
    if is_unreachable(owner, now_s, settings):
        rounds = len(owner.rounds(now_s, settings))
        message = f"evicted {rounds} times within a day and still got too little; it stays where it is"
        conditions.append(condition("SLAUnreachable", "True", "TooManyEvictions", message, old, now_s))
    elif beyond is not None:
        conditions.append(condition("SLAUnreachable", "True", beyond.reason, beyond.message, old, now_s))
    status: dict[str, Any] = {
        "evictions": len(owner.evicted_at_s),
        "evictionTimes": [time_text(at_s) for at_s in _kept_evictions(owner.evicted_at_s)],
        "avoidNodes": [{"node": node, "until": time_text(at_s)} for node, at_s in _kept_avoided(owner, now_s)],
        "conditions": conditions,
    }
    if worst is not None and worst.achieved is not None:
        status["achieved"] = round(worst.achieved, 4)
    backoff_s = backoff_until_s(owner, now_s, settings)
    if backoff_s > now_s:
        status["backoffUntil"] = time_text(backoff_s)

    return status


def _kept_evictions(evicted_at_s: Sequence[float]) -> list[float]:
    """The latest rounds, each at least once: their number decides when the controller stops moving an owner's pods."""
    counts = Counter(evicted_at_s)
    rounds = sorted(counts, reverse=True)[:KEPT_EVICTIONS]
    more = [at_s for at_s in rounds for _ in range(counts[at_s] - 1)]

    return sorted(rounds + more[: KEPT_EVICTIONS - len(rounds)])


def _kept_avoided(owner: Owner, now_s: float) -> list[tuple[str, float]]:
    """The nodes that are avoided for the longest time to come, by name. A node that is left out may be tried early."""
    ahead = [(node, until_s) for node, until_s in owner.avoid_until_s.items() if until_s > now_s]
    return sorted(sorted(ahead, key=lambda pair: (-pair[1], pair[0]))[:KEPT_AVOIDED])


def _standing(track: Track) -> tuple[float, str]:
    """Pods with a measure before pods without, the lowest achieved first."""
    achieved = float("inf") if track.achieved is None else track.achieved / max(track.sample.sla, 1e-9)
    return achieved, track.sample.pod_uid
