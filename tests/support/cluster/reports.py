"""Objects of the Kubernetes API as nodes and users write them, for the tests of the cluster half."""

from datetime import datetime, timezone
from typing import Any

from valve_kube import names

NOW_S = datetime(2026, 1, 1, tzinfo=timezone.utc).timestamp()
Json = dict[str, Any]


def uuids(node: str, count: int = 8) -> list[str]:
    return [f"GPU-{node}-{gpu}" for gpu in range(count)]


def harvest_node(node: str = "n1", *, idle: float = 0.5, cards: int = 8, age_s: float = 0.0, **status: Any) -> Json:
    """A node whose GPUs are idle together and have all their memory free."""
    observed_at = datetime.fromtimestamp(NOW_S - age_s, timezone.utc).isoformat()
    seen = {"idle": {"1h": idle}, "observedSeconds": 86_400, "observedHourSeconds": 3_600}
    gpu = {"harvestable": True, **seen, "freeMemory": [0.0] * 31 + [1.0]}

    return {
        "metadata": {"name": node, "uid": f"uid-{node}", "resourceVersion": "1"},
        "status": {
            "phase": "Harvesting",
            "gpuModel": "H100",
            "memoryMiB": 80_000,
            "observedAt": observed_at,
            "gpus": [{"uuid": uuid, **gpu} for uuid in uuids(node, cards)],
            "alignment": [1.0] * (cards * (cards - 1) // 2),
            **status,
        },
    }


def pod(
    name: str = "p1",
    *,
    gpus: Any = 1,
    annotations: dict[str, str] | None = None,
    node: str = "",
    held: str = "",
    phase: str = "Pending",
    owner: str = "",
) -> Json:
    """An offline pod; `held` is the GPU annotation that only Valve writes."""
    owners = [{"uid": owner, "controller": True}] if owner else []
    given = {**(annotations or {}), **({names.GPUS: held} if held else {})}

    return {
        "metadata": {
            "uid": f"uid-{name}",
            "name": name,
            "namespace": "default",
            "labels": {names.ROLE: names.OFFLINE},
            "annotations": given,
            "ownerReferences": owners,
            "resourceVersion": "1",
        },
        "spec": {
            "nodeName": node,
            "containers": [{"name": "work", "resources": {"limits": {names.RESOURCE: str(gpus)}}}],
        },
        "status": {"phase": phase},
    }
