"""The owner of a pod, as rounds know it: a UID in its namespace. Pure.

The tenant that makes a pod writes its owner, and the UID of another tenant's Job is no secret."""

from collections.abc import Mapping
from typing import Any

Object = Mapping[str, Any]

# The longest that a real controller has. The API server takes a megabyte for each.
_OWNER_TEXTS = {"uid": 64, "name": 253, "kind": 63, "apiVersion": 317}


def controller_of(pod: Object) -> Object | None:
    """Its Job, or whatever else makes it anew. The creator of a pod writes this: one that cannot exist is none."""
    owners = pod["metadata"].get("ownerReferences") or []
    return next((one for one in owners if one.get("controller") and _can_exist(one)), None)


def _can_exist(owner: Object) -> bool:
    return all(len(str(owner.get(key, ""))) <= most for key, most in _OWNER_TEXTS.items())


def owner_uid(pod: Object) -> str:
    """The controller of the pod (its Job), which survives eviction; a bare pod is its own."""
    return str((controller_of(pod) or pod["metadata"])["uid"])


def is_bare(pod: Object) -> bool:
    """Nothing makes it anew when it is gone."""
    return controller_of(pod) is None


def owner_name(pod: Object) -> str:
    """What people call the thing a pod is one of: its Job, StatefulSet or Deployment; a bare pod by its own name."""
    metadata = pod["metadata"]
    owner = controller_of(pod) or {}
    name = str(owner.get("name") or metadata.get("name", ""))
    made_by_deployment = (metadata.get("labels") or {}).get("pod-template-hash", "") if owner else ""

    return name.removesuffix(f"-{made_by_deployment}") if made_by_deployment else name


def key_of_owner(namespace: str, uid: str) -> str:
    return f"{namespace}/{uid}"


def owner_key(pod: Object) -> str:
    return key_of_owner(pod["metadata"].get("namespace", ""), owner_uid(pod))


def workload_key(workload: Object) -> str:
    """The same of an OfflineWorkload."""
    uid = (workload.get("spec") or {}).get("ownerUID", "")
    return key_of_owner(workload["metadata"].get("namespace", ""), str(uid))
