"""Which online pods run without the shim, or with one that a new release no longer serves. Pure.

Asked before an upgrade: Valve never touches such pods, but their GPUs cannot be harvested until they are started anew.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from valve_kube import names
from valve_kube.objects import Object, annotation, asks_for_gpus, pod_place


@dataclass(frozen=True, slots=True, kw_only=True)
class Covered:
    """`why` is empty for a pod that stays covered."""

    pod: str
    node: str
    owner: str
    shim: str
    why: str

    @property
    def covered(self) -> bool:
        return not self.why


def coverage(pods: Iterable[Object], oldest_shim: str = "") -> list[Covered]:
    """Every online pod that holds GPUs and runs, uncovered ones first."""
    found = [_judge(pod, oldest_shim) for pod in pods if _is_online(pod)]

    return sorted(found, key=lambda one: (one.covered, one.pod))


def version(text: str) -> tuple[int, ...]:
    """1.10.2 comes after 1.9; anything that is no number counts as oldest."""
    return tuple(int(part) for part in re.findall(r"\d+", text.partition("-")[0]))


def _is_online(pod: Object) -> bool:
    place = pod_place(pod)
    holds = any(map(asks_for_gpus, pod["spec"].get("containers") or []))

    return bool(place.node) and not place.finished and holds and annotation(pod, names.ROLE) == names.ONLINE


def _judge(pod: Object, oldest_shim: str) -> Covered:
    metadata = pod["metadata"]
    mark, shim = annotation(pod, names.INJECTION), annotation(pod, names.SHIM)
    owners = [owner for owner in metadata.get("ownerReferences") or [] if owner.get("controller")]
    why = ""
    if mark != "ok":
        why = f"runs without the shim ({mark or 'the webhook did not see it'})"
    elif oldest_shim and version(shim) < version(oldest_shim):
        why = f"its shim {shim or 'of unknown version'} is older than {oldest_shim}; restart it after the upgrade"

    return Covered(
        pod=f"{metadata['namespace']}/{metadata['name']}",
        node=pod_place(pod).node,
        owner=f"{owners[0]['kind']}/{owners[0]['name']}" if owners else "",
        shim=shim,
        why=why,
    )
