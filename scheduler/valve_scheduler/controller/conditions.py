"""Conditions and events: what the controller says about an object, in the words of the Kubernetes API. Pure."""

import enum
from collections.abc import Iterable
from datetime import datetime, timezone
from typing import Any
from zlib import crc32

from valve_kube import names
from valve_kube.objects import Object

MOST_TEXT = 8192  # characters of a message; the API server takes four times as many
CLUSTER_EVENTS = "default"  # the namespace of events about objects that have none


class Told(enum.Enum):
    """Reasons of events; docs/cluster.md explains each."""

    SLA_MISSED = "SLAMissed"
    GPU_BUSY = "GPUBusy"
    GPU_GUARDED = "GPUGuarded"
    NODE_DRAINED = "NodeDrained"
    NODE_NOT_HARVESTING = "NodeNotHarvesting"
    ONLINE_AT_RISK = "OnlineAtRisk"
    OFFLINE_UNGATED = "OfflineUngated"
    PLACE_LOST = "PlaceLost"
    PROFILING = "Profiling"
    PROFILED = "Profiled"
    PROFILING_ENDED = "ProfilingEnded"
    SLA_UNREACHABLE = "SLAUnreachable"
    POLICY_SHADOWED = "PolicyShadowed"


_EVICTIONS = (
    Told.SLA_MISSED,
    Told.GPU_BUSY,
    Told.GPU_GUARDED,
    Told.NODE_DRAINED,
    Told.NODE_NOT_HARVESTING,
    Told.ONLINE_AT_RISK,
    Told.OFFLINE_UNGATED,
    Told.PLACE_LOST,
)
_WARNINGS = (Told.OFFLINE_UNGATED, Told.PROFILING_ENDED, Told.SLA_UNREACHABLE, Told.POLICY_SHADOWED)


def condition(
    kind: str, status: str, reason: str, message: str, before: Iterable[Object], now_s: float
) -> dict[str, Any]:
    """Its transition time is that of the one `before` while the status stays."""
    old: Object = next((one for one in before if one["type"] == kind), {})
    since = old["lastTransitionTime"] if old.get("status") == status else time_text(now_s)

    text = message if len(message) <= MOST_TEXT else f"{message[: MOST_TEXT - 3]}..."

    return {"type": kind, "status": status, "reason": reason, "message": text, "lastTransitionTime": since}


def event(
    item: Object, reason: Told, note: str, now_s: float, *, kind: str = "Pod", once: bool = False
) -> dict[str, Any]:
    """What happened to an object and why, as `kubectl describe` shows it.

    `once`: the API server refuses a second one for the same object and reason while it remembers the first (an hour),
    so a controller that begins anew may tell everything again.
    """
    metadata = item["metadata"]
    api = "v1" if kind == "Pod" else names.API_VERSION
    regarding = {"apiVersion": api, "kind": kind}
    regarding |= {key: metadata[key] for key in ("namespace", "name", "uid") if key in metadata}
    mark = f"{reason.value.lower()}.{crc32(metadata['uid'].encode()):08x}" if once else f"{int(now_s * 1e6):x}"

    return {
        "apiVersion": "events.k8s.io/v1",
        "kind": "Event",
        # A name of our own, as kubelets make them: the API server takes no generateName that ends in a dot.
        "metadata": {
            "name": f"{metadata['name'][:200].rstrip('.-')}.{mark}",
            "namespace": metadata.get("namespace", CLUSTER_EVENTS),
        },
        "eventTime": time_text(now_s, "microseconds"),
        "reportingController": f"{names.DOMAIN}/controller",
        "reportingInstance": "valve-controller",
        "action": "Evict" if reason in _EVICTIONS else "Judge",
        "type": "Warning" if reason in _WARNINGS else "Normal",
        "reason": reason.value,
        "note": note[:1024],  # longer ones are refused
        "regarding": regarding,
    }


def time_text(at_s: float, precision: str = "seconds") -> str:
    return datetime.fromtimestamp(at_s, timezone.utc).isoformat(timespec=precision).replace("+00:00", "Z")
