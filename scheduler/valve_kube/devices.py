"""Whether a node fails to give a container its devices, as its kubelet says in the status of the pod. Pure.

The kubelet tries such a container for ever. What else keeps a container from being made (a Secret that is missing, a
command that does not exist, an image that wants another driver or brings libraries of one) is as true elsewhere."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from valve_kube import names

Object = Mapping[str, Any]

# Reasons of a kubelet for a container that it did not get as far as running; the last two are of runtimes.
_NOT_STARTED = frozenset(
    {
        "CreateContainerConfigError",  # the device plugin refused it, valved among others
        "PreCreateHookError",
        "CreateContainerError",  # containerd and CRI-O do not find what the name of a CDI device stands for
        "PreStartHookError",
        "RunContainerError",  # NVIDIA's runtime does not, or its hook fails
        "StartError",
        "ContainerCannotRun",
    }
)
_OF_DEVICES = re.compile(r"\bCDI\b|\bdevice plugin\b|\bnvidia-(?:container|cdi|ctk)|/dev/nvidia")
_OF_THE_IMAGE = re.compile(
    r"\brequirement error\b|\bunsatisfied condition\b|\bmount error: [^\n]{0,512}\bfile exists\b"
)
_MOST_TEXT = 256  # characters: events show it, and the views of pods keep it


def denied_devices(pod: Object) -> str:
    """The kubelet's words from the first on that speaks of devices; empty where no container lacks them that asks for
    harvested GPUs."""
    for reason, message in _troubles(pod):
        found = _OF_DEVICES.search(message) if reason in _NOT_STARTED else None
        if found and not _OF_THE_IMAGE.search(message):
            return message[found.start() :][:_MOST_TEXT]

    return ""


def as_status(denied: str, working: Sequence[Object]) -> dict[str, Any]:
    """The part of a status of which `denied_devices` says the same; `working`: the containers that ask for harvested
    GPUs. Where there are none an init container does, whose name is not kept."""
    if not denied:
        return {}
    kind, name = ("containerStatuses", working[0]["name"]) if working else ("initContainerStatuses", "")
    return {kind: [{"name": name, "state": {"waiting": {"reason": "CreateContainerError", "message": denied}}}]}


def _troubles(pod: Object) -> Iterator[tuple[str, str]]:
    """Reasons and messages of containers that do not run. While the next try waits the last one says why."""
    spec, status = pod.get("spec") or {}, pod.get("status") or {}
    for kind in ("initContainer", "container"):
        asking = {one.get("name") for one in spec.get(f"{kind}s") or [] if _asks(one)}
        for one in status.get(f"{kind}Statuses") or []:
            state = one.get("state") or {}
            if one.get("name") in asking and state.get("running") is None:
                waiting, ended = state.get("waiting") or {}, state.get("terminated") or {}
                if waiting.get("reason") == "CrashLoopBackOff":
                    ended = (one.get("lastState") or {}).get("terminated") or {}
                for told in (waiting, ended):
                    yield told.get("reason") or "", told.get("message") or ""


def _asks(container: Object) -> bool:
    limits = (container.get("resources") or {}).get("limits") or {}
    return str(limits.get(names.RESOURCE, "0")) != "0"
