"""What must be known of a pod of which nothing else can be read. Pure."""

from typing import Any

import msgspec

from valve_kube import names
from valve_kube.errors import UNUSABLE
from valve_kube.node_wish import KEPT, TOO_LONG
from valve_kube.objects import annotation, pod_place

_KEPT = ("name", "namespace", "uid", "resourceVersion", "creationTimestamp", "deletionTimestamp")


def place_alone(raw: bytes) -> dict[str, Any] | None:
    """Where it is and which GPUs are its own: in a list without it they would seem free, and be given twice."""
    try:
        pod = msgspec.json.decode(raw)
        place, metadata = pod_place(pod), {key: pod["metadata"][key] for key in _KEPT if key in pod["metadata"]}
        metadata["labels"] = {names.ROLE: annotation(pod, names.ROLE)}
    except (msgspec.DecodeError, *UNUSABLE):
        return None
    metadata["annotations"] = {names.GPUS: ",".join(place.gpu_uuids)}
    phase = "Succeeded" if place.finished else "Running"

    return {"metadata": metadata, "spec": {KEPT: TOO_LONG, "nodeName": place.node}, "status": {"phase": phase}}
