"""Who owns a pod, as rounds know it: a UID in its namespace. Pure.

Whoever makes a pod writes its owner's UID, and that of another tenant's Job is no secret."""

from valve_kube.objects import Object, owner_uid


def key_of_owner(namespace: str, uid: str) -> str:
    return f"{namespace}/{uid}"


def owner_key(pod: Object) -> str:
    return key_of_owner(pod["metadata"].get("namespace", ""), owner_uid(pod))


def workload_key(workload: Object) -> str:
    """The same of an OfflineWorkload."""
    uid = (workload.get("spec") or {}).get("ownerUID", "")
    return key_of_owner(workload["metadata"].get("namespace", ""), str(uid))
