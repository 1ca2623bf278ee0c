"""What each namespace got from harvesting and what it lent, also by owner and service, from counters of nodes. Pure.

A node's counters start anew with its daemon and end with the pod; the account of the namespace keeps their sum and the
last value seen of each, in one object and one write, so nothing is lost or counted twice when a daemon or a controller
restarts. An account follows a thousand pods at most: with more it goes on in a second object (usage-2, ...), and the
amounts of all of them together are what the namespace got.

What tokens were worth comes from a profile and an engine that tenants bring. So a pod saves at most what it harvested:
`creditSeconds` of its row is the harvested time that no token has been counted for yet.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Object = Mapping[str, Any]

ACCOUNT = "usage"  # the name of the first HarvestAccount of a namespace
MOST_SEEN = 1000  # pods that one object follows; with more each write of it is large, and etcd's limit is near
OFFLINE = ("harvestSeconds", "gatedSeconds", "usefulTokens", "tokensLost", "preemptions")
ONLINE = ("lentSeconds", "delaySeconds", "grantedSeconds", "preemptions")
SAVED, CREDIT = "savedSeconds", "creditSeconds"
MOST_NAMED = 200  # owners, and services, of a namespace; those with the least are one row without a name
# Looks for which a pod may be missing from the reports (its daemon restarts) before its last values are forgotten.
_ABSENT = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """Counters of one pod as its node reports them. `name`: its owner or service; `saved_per_token`: GPU-seconds that a
    token costs standalone."""

    pod_uid: str
    online: bool
    counters: Mapping[str, float]
    name: str = ""
    saved_per_token: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Worth:
    """What the controller knows of an offline pod."""

    namespace: str
    owner: str = ""
    saved_per_token: float = 0.0


def charge(before: Object, entries: Sequence[Entry]) -> dict[str, Any]:
    """The status of an account after one more look at the nodes; equal to `before` when nothing moved."""
    seen = {_key(item): item for item in before.get("seen") or []}
    totals = {side: dict(before.get(side) or {}) for side in ("offline", "online")}
    parts = {side: {row["name"]: dict(row) for row in before.get(side) or []} for side in ("owners", "services")}
    fresh: list[dict[str, Any]] = []
    for entry in sorted(entries, key=lambda entry: (entry.pod_uid, entry.online)):
        total = totals["online" if entry.online else "offline"]
        part = parts["services" if entry.online else "owners"].setdefault(entry.name, {"name": entry.name})
        last = seen.get((entry.pod_uid, entry.online), {})
        row: dict[str, Any] = {"podUID": entry.pod_uid, **({"online": True} if entry.online else {})}
        for key in ONLINE if entry.online else OFFLINE:
            if key not in entry.counters:
                continue
            row[key] = entry.counters[key]
            grown = _growth(float(last.get(key, 0.0)), float(entry.counters[key]))
            for sum_ in (total, part):
                _add(sum_, key, grown)
        if not entry.online:
            saved_s, row[CREDIT] = _saving(last, row, entry.saved_per_token)
            for sum_ in (total, part) if saved_s else ():
                _add(sum_, SAVED, saved_s)
        fresh.append(row)
    reported = {(entry.pod_uid, entry.online) for entry in entries}
    for pod, last in seen.items():
        absent = int(last.get("absent", 0)) + 1
        if pod not in reported and absent <= _ABSENT:
            fresh.append({**last, "absent": absent})

    named = {
        "owners": _most(parts["owners"].values(), "harvestSeconds"),
        "services": _most(parts["services"].values(), "lentSeconds"),
    }

    return {**totals, **{side: rows for side, rows in named.items() if rows}, "seen": fresh}


def spread(accounts: Mapping[str, Object], entries: Iterable[Entry]) -> dict[str, list[Entry]]:
    """Which object of a namespace counts which pod: the one that did so before, else the first with room. `accounts`:
    statuses by name; names of objects that do not exist yet are in the answer."""
    home = {_key(item): name for name, status in accounts.items() for item in status.get("seen") or []}
    rows = Counter(home.values())
    found: dict[str, list[Entry]] = {}
    number = 1
    for entry in sorted(entries, key=lambda entry: (entry.pod_uid, entry.online)):
        name = home.get((entry.pod_uid, entry.online))
        if name is None:
            while rows[_name(number)] >= MOST_SEEN:
                number += 1
            name = _name(number)
            rows[name] += 1
        found.setdefault(name, []).append(entry)

    return found


def total_of(statuses: Iterable[Object]) -> dict[str, Any]:
    """What the objects of a namespace hold together, without what they keep of each pod."""
    whole: dict[str, Any] = {"offline": {}, "online": {}}
    parts: dict[str, dict[str, dict[str, Any]]] = {"owners": {}, "services": {}}
    for status in statuses:
        for side in ("offline", "online"):
            for key, value in (status.get(side) or {}).items():
                _add(whole[side], key, float(value))
        for side, rows in parts.items():
            for row in status.get(side) or []:
                part = rows.setdefault(row["name"], {"name": row["name"]})
                for key in row.keys() - {"name"}:
                    _add(part, key, float(row[key]))

    return whole | {side: list(rows.values()) for side, rows in parts.items()}


def _name(number: int) -> str:
    return ACCOUNT if number == 1 else f"{ACCOUNT}-{number}"


def _key(item: Object) -> tuple[str, bool]:
    return item["podUID"], bool(item.get("online"))


def entries_of(nodes: Iterable[Object], offline: Mapping[str, Worth]) -> dict[str, list[Entry]]:
    """Per namespace what the nodes report; `offline`: the offline pods, by UID."""
    found: dict[str, list[Entry]] = {}
    for node in nodes:
        status = node.get("status") or {}
        for counters in status.get("offline") or []:
            worth = offline.get(counters["podUID"])
            if worth is not None:
                entry = Entry(
                    pod_uid=counters["podUID"],
                    online=False,
                    counters=_numbers(counters),
                    name=worth.owner,
                    saved_per_token=worth.saved_per_token,
                )
                found.setdefault(worth.namespace, []).append(entry)
        for counters in status.get("services") or []:
            name = counters.get("service", "")
            entry = Entry(pod_uid=counters["podUID"], online=True, counters=_numbers(counters), name=name)
            found.setdefault(counters["namespace"], []).append(entry)

    return found


def _most(rows: Iterable[dict[str, Any]], key: str) -> list[dict[str, Any]]:
    """Sorted by name; beyond the limit those with the least of `key` are added to the row without a name."""
    ordered = sorted(rows, key=lambda row: (row["name"] != "", -float(row.get(key, 0.0)), row["name"]))
    kept, rest = ordered[:MOST_NAMED], ordered[MOST_NAMED:]
    if rest and kept[0]["name"]:
        kept, rest = [{"name": ""}, *kept[:-1]], [kept[-1], *rest]
    for row in rest:
        for counter, value in row.items():
            if counter != "name":
                _add(kept[0], counter, value)

    return sorted(kept, key=lambda row: str(row["name"]))


def _saving(last: Object, row: Object, saved_per_token: float) -> tuple[float, float]:
    """What the tokens of a look saved, and the harvested time that is left for later ones."""
    tokens, harvested_s = (
        _growth(float(last.get(key, 0.0)), float(row.get(key, 0.0))) for key in ("usefulTokens", "harvestSeconds")
    )
    credit_s = round(float(last.get(CREDIT, 0.0)) + harvested_s, 3)
    saved_s = min(round(tokens * saved_per_token, 3), credit_s) if tokens else 0.0  # a token may be worth infinity
    return saved_s, round(credit_s - saved_s, 3)


def _growth(last: float, now: float) -> float:
    """A counter that fell has started anew: all of it is new."""
    return now - last if now >= last else now


def _add(total: dict[str, float], key: str, grown: float) -> None:
    total[key] = round(float(total.get(key, 0.0)) + grown, 3)


def _numbers(counters: Object) -> dict[str, float]:
    return {key: float(value) for key, value in counters.items() if isinstance(value, int | float)}
