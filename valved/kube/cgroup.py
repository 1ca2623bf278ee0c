"""Which pod a control group belongs to. Pure.

The kubelet's two layouts, cgroupfs and systemd, on either version, and as seen from another cgroup namespace:

    /kubepods/burstable/pod3c1f...-...-.../8d1e...
    /kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod3c1f..._..._....slice/cri-containerd-8d1e....scope
    /../../kubepods-burstable-pod3c1f..._..._....slice/cri-containerd-8d1e....scope
"""

from __future__ import annotations

import re
from dataclasses import dataclass

# A UID has dashes (underscores under systemd); that of a static pod is a bare hash of its manifest.
_POD = re.compile(r"(?:^|-)pod([0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12}|[0-9a-f]{32})(?:\.slice)?$")


@dataclass(frozen=True, slots=True, kw_only=True)
class PodGroup:
    uid: str
    path: str  # of the pod: all its containers are inside


def pod_of(cgroup: str) -> PodGroup | None:
    """The outermost pod of a path: what a container makes inside its own group names no other pod."""
    parts = cgroup.split("/")
    for depth, part in enumerate(parts, 1):
        found = _POD.search(part)
        if found:
            return PodGroup(uid=found.group(1).replace("_", "-"), path="/".join(parts[:depth]))
    return None
