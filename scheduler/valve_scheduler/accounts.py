"""What each namespace got from harvesting and what it lent, from counters of the nodes. Pure.

A node's counters start anew with its daemon and end with the pod; the account of the namespace keeps their sum and the
last value seen of each, in one object and one write, so nothing is lost or counted twice by a restart of anybody.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Object = Mapping[str, Any]

ACCOUNT = "usage"  # the name of the one HarvestAccount of a namespace
OFFLINE = ("harvestSeconds", "gatedSeconds", "usefulTokens", "tokensLost", "preemptions")
ONLINE = ("lentSeconds", "delaySeconds", "preemptions")
SAVED = "savedSeconds"
# Looks for which a pod may be missing from the reports (its daemon restarts) before its last values are forgotten.
_ABSENT = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """Counters of one pod as its node reports them. `saved_per_token`: GPU-seconds a token costs standalone."""

    pod_uid: str
    online: bool
    counters: Mapping[str, float]
    saved_per_token: float = 0.0


def charge(before: Object, entries: Sequence[Entry]) -> dict[str, Any]:
    """The status of an account after one more look at the nodes; equal to `before` when nothing moved."""
    seen = {(item["podUID"], bool(item.get("online"))): item for item in before.get("seen") or []}
    totals = {side: dict(before.get(side) or {}) for side in ("offline", "online")}
    fresh: list[dict[str, Any]] = []
    for entry in sorted(entries, key=lambda entry: (entry.pod_uid, entry.online)):
        total = totals["online" if entry.online else "offline"]
        last = seen.get((entry.pod_uid, entry.online), {})
        row: dict[str, Any] = {"podUID": entry.pod_uid, **({"online": True} if entry.online else {})}
        for key in ONLINE if entry.online else OFFLINE:
            if key not in entry.counters:
                continue
            row[key] = entry.counters[key]
            grown = _growth(float(last.get(key, 0.0)), float(entry.counters[key]))
            _add(total, key, grown)
            if key == "usefulTokens":
                _add(total, SAVED, grown * entry.saved_per_token)
        fresh.append(row)
    reported = {(entry.pod_uid, entry.online) for entry in entries}
    for pod, last in seen.items():
        absent = int(last.get("absent", 0)) + 1
        if pod not in reported and absent <= _ABSENT:
            fresh.append({**last, "absent": absent})

    return {**totals, "seen": fresh}


def entries_of(nodes: Iterable[Object], offline: Mapping[str, tuple[str, float]]) -> dict[str, list[Entry]]:
    """Per namespace what the nodes report; `offline` tells namespace and GPU-seconds per token of offline pods."""
    found: dict[str, list[Entry]] = {}
    for node in nodes:
        status = node.get("status") or {}
        for counters in status.get("offline") or []:
            namespace, per_token = offline.get(counters["podUID"], ("", 0.0))
            if namespace:
                entry = Entry(
                    pod_uid=counters["podUID"], online=False, counters=_numbers(counters), saved_per_token=per_token
                )
                found.setdefault(namespace, []).append(entry)
        for counters in status.get("services") or []:
            entry = Entry(pod_uid=counters["podUID"], online=True, counters=_numbers(counters))
            found.setdefault(counters["namespace"], []).append(entry)

    return found


def _growth(last: float, now: float) -> float:
    """A counter that fell has started anew: all of it is new."""
    return now - last if now >= last else now


def _add(total: dict[str, float], key: str, grown: float) -> None:
    total[key] = round(float(total.get(key, 0.0)) + grown, 3)


def _numbers(counters: Object) -> dict[str, float]:
    return {key: float(value) for key, value in counters.items() if isinstance(value, int | float)}
