"""Made-up nodes and their harvest reports, drawn from a seed: what the fleet's daemons would write."""

from __future__ import annotations

import contextlib
import http.client
import threading
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from valve_kube import names
from valve_scheduler.model import MAX_GPUS, free_histogram, pair_alignment
from valve_tools.cluster.api import ApiRefused, ClusterApi, Json
from valve_tools.cluster.controlplane import wait_for

MEMORY_MIB = 81_559.0  # one H100 as the driver reports it
CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"


def node_name(index: int) -> str:
    return f"gpu-{index:04d}"


def gpu_uuids(index: int) -> list[str]:
    return [f"GPU-{index:08x}-0000-0000-0000-{gpu:012x}" for gpu in range(MAX_GPUS)]


def install_crds(api: ClusterApi, chart: Path) -> None:
    for path in sorted((chart / "files/crds").glob("*.yaml")):
        api.post(CRDS, yaml.safe_load(path.read_text()))

    def established() -> bool:
        found = api.get(CRDS)["items"]
        return len(found) > 0 and all(
            any(c["type"] == "Established" and c["status"] == "True" for c in crd["status"].get("conditions") or [])
            for crd in found
        )

    wait_for("the CRDs", established)
    wait_for("the API group", lambda: api.get(f"{names.API_PATH}/offlineworkloads"))


def create_nodes(api: ClusterApi, count: int, *, seed: int = 1, first: int = 0) -> None:
    """Ready nodes of eight harvested GPUs each, and their first reports."""
    chosen = range(first, first + count)
    api.each(("POST", "/api/v1/nodes", node_object(index)) for index in chosen)
    # The API server taints every new node; the controller that would lift it is off, as no kubelet renews leases.
    api.each(("PATCH", f"/api/v1/nodes/{node_name(index)}", {"spec": {"taints": None}}) for index in chosen)
    nodes = f"{names.API_PATH}/gpuharvestnodes"
    api.each(("POST", nodes, harvest_node(index) | {"spec": {"mode": "harvest"}}) for index in chosen)
    random = np.random.default_rng(seed)
    api.each(("PATCH", f"{nodes}/{node_name(index)}/status", {"status": report(index, random)}) for index in chosen)


def node_object(index: int) -> Json:
    resources = {"cpu": "64", "memory": "512Gi", "pods": "110", names.RESOURCE: str(MAX_GPUS)}
    ready = {"type": "Ready", "status": "True", "reason": "KubeletReady", "message": "made up"}

    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": node_name(index),
            "labels": {"kubernetes.io/hostname": node_name(index)},
        },
        "status": {"capacity": resources, "allocatable": resources, "conditions": [ready]},
    }


def harvest_node(index: int) -> Json:
    return {"apiVersion": names.API_VERSION, "kind": "GPUHarvestNode", "metadata": {"name": node_name(index)}}


def report(index: int, random: np.random.Generator, *, idle: float | None = None) -> Json:
    """Status of a node whose GPUs serve one service in step, and now and then on their own."""
    share = float(random.uniform(0.2, 0.9)) if idle is None else idle
    together = random.random((240, 1)) >= share
    busy = together | (random.random((240, MAX_GPUS)) < 0.01)
    alignment = pair_alignment(busy)
    free = random.uniform(0.3, 0.95, (MAX_GPUS, 60)) * MEMORY_MIB
    windows = (1.0 - busy.mean(axis=0)).round(4).tolist()
    gpus = [
        {
            "uuid": uuid,
            "harvestable": True,
            "slots": 1,
            "shim": True,
            "idle": {"1m": windows[gpu], "10m": windows[gpu], "1h": windows[gpu]},
            "observedSeconds": 86_400,
            "observedHourSeconds": 3_600,
            "freeMemory": free_histogram(free[gpu], MEMORY_MIB).round(4).tolist(),
        }
        for gpu, uuid in enumerate(gpu_uuids(index))
    ]

    return {
        "phase": "Harvesting",
        "mode": "harvest",
        "gpuModel": "H100",
        "memoryMiB": MEMORY_MIB,
        "harvestableGPUs": MAX_GPUS,
        "observedAt": _now(),
        "gpus": gpus,
        "alignment": alignment[np.triu_indices(MAX_GPUS, 1)].round(4).tolist(),
    }


def _now() -> str:
    return datetime.now(timezone.utc).isoformat()


def offline_pod(name: str, *, gpus: int = 1, sla: str = "", profile: str = "", **metadata: Any) -> Json:
    annotations = {key: value for key, value in ((names.SLA, sla), (names.PROFILE, profile)) if value}
    container = {
        "name": "work",
        "image": "example.invalid/offline:1",
        "resources": {"limits": {names.RESOURCE: str(gpus)}},
    }

    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {names.ROLE: names.OFFLINE}, "annotations": annotations, **metadata},
        "spec": {"schedulerName": names.SCHEDULER, "containers": [container], "restartPolicy": "Never"},
    }


def bound_pods(api: ClusterApi, namespace: str = "default") -> Iterator[Json]:
    for pod in api.get(f"/api/v1/namespaces/{namespace}/pods")["items"]:
        if pod["spec"].get("nodeName"):
            yield pod


def delete_pods(api: ClusterApi, namespace: str = "default") -> None:
    """All at once and without grace: no kubelet will ever confirm."""
    path = f"/api/v1/namespaces/{namespace}/pods"
    api.delete(path, {"gracePeriodSeconds": 0, "propagationPolicy": "Background"})
    wait_for("the pods to go", lambda: not api.get(path)["items"])


class UntilStopped(threading.Thread):
    """Its `run` goes on until it is told to stop."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._done = threading.Event()

    def stop(self) -> None:
        self._done.set()
        self.join()


class Heartbeat(UntilStopped):
    """Renews the reports of a fleet, as daemons do: after 90 s without one a node takes no offline work."""

    EVERY_S = 20.0

    def __init__(self, api: ClusterApi, count: int) -> None:
        super().__init__()
        self._api = api
        self._count = count

    def run(self) -> None:
        while not self._done.wait(self.EVERY_S):
            for index in range(self._count):
                path = f"{names.API_PATH}/gpuharvestnodes/{node_name(index)}/status"
                # The API server may be down, or the node gone: a daemon tries again, too.
                with contextlib.suppress(OSError, http.client.HTTPException, ApiRefused):
                    self._api.patch(path, {"status": {"observedAt": _now()}})


def delete_nodes(api: ClusterApi) -> None:
    api.delete("/api/v1/nodes")
    api.delete(f"{names.API_PATH}/gpuharvestnodes")
