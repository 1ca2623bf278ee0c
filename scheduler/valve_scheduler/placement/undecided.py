"""A bind whose outcome is not known yet: the API server did not say whether it stored it.

The extender alone knows of it. It tells kube-scheduler, which writes that into the pod's condition PodScheduled, and
there `explain` finds it. Pure."""

import re

from valve_kube.objects import Object

from valve_scheduler.placement.holdings import ASSUMED_FOR_S

_TOLD = re.compile(r"the bind of the pod to (\S+) is undecided")


def undecided(node: str) -> str:
    return f"the bind of the pod to {node} is undecided"


def undecided_node(pod: Object) -> str:
    """Where the bind led, as kube-scheduler was told last; empty when it was told something else."""
    for one in (pod.get("status") or {}).get("conditions") or []:
        if (one.get("type"), one.get("status")) == ("PodScheduled", "False"):
            found = _TOLD.search(one.get("message") or "")
            return found[1] if found else ""
    return ""


def undecided_told(node: str) -> str:
    """For people."""
    told = (
        f"the API server did not say whether it stored the last bind, to {node}: it is not known yet whether the pod "
        f"is there. Its GPUs are kept for it, for {ASSUMED_FOR_S:.0f} s at most, and kube-scheduler tries again "
        "by itself"
    )
    return told
