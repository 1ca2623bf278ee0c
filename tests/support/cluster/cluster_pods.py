"""Pods on the real control plane: submit, wait, and who holds which GPU."""

import itertools
from collections import Counter
from typing import Any

from valve_kube import names
from valve_tools.cluster.api import ClusterApi
from valve_tools.cluster.controlplane import wait_for
from valve_tools.cluster.fleet import bound_pods, gpu_uuids, offline_pod

PODS = "/api/v1/namespaces/default/pods"
Json = dict[str, Any]


_numbers = itertools.count()


def submit(api: ClusterApi, count: int, **options: Any) -> list[str]:
    """Their names. None is used twice: kube-scheduler 1.36 gives up and exits when a pod that it knows comes back from
    a new list as another of its name on another node."""
    found = [f"p{next(_numbers)}" for _ in range(count)]
    api.each(("POST", PODS, offline_pod(name, **options)) for name in found)
    return found


def wait_bound(api: ClusterApi, count: int) -> list[Json]:
    def all_bound() -> list[Json]:
        found = list(bound_pods(api))
        return found if len(found) >= count else []

    return list(wait_for(f"{count} pods bound", all_bound, 240))


def held_gpus(pods: list[Json]) -> Counter[tuple[str, str]]:
    """How often each GPU was given; every pod that has a node must have its GPUs on that very node."""
    given: Counter[tuple[str, str]] = Counter()
    for pod in pods:
        node = pod["spec"]["nodeName"]
        uuids = pod["metadata"]["annotations"][names.GPUS].split(",")
        assert set(uuids) <= set(gpu_uuids(int(node.rpartition("-")[2])))
        given.update((node, uuid) for uuid in uuids)

    return given
