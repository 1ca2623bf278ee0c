"""How placing grows: 100, 1,000 and 5,000 nodes, up to 40,000 offline pods, 500 kinds of jobs that wait.

No control plane takes part, so these rows are of Valve's own code: what a call costs the extender's process from the
bytes of kube-scheduler's request to the bytes of the answer, while reports arrive as a fleet of that size sends them.
`cluster-memory` alone is beside a real API server: what the chart's memory limits see.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from valve_kube import names
from valve_kube.access import Access
from valve_kube.client import PAGE, KubeClient
from valve_kube.objects import node_report, pod_place
from valve_kube.reflector import Reflector
from valve_kube.shapes import NodeShape, PodShape, ReportShape, Shape
from valve_scheduler.controller.caches import Caches
from valve_scheduler.controller.retries import Retries
from valve_scheduler.extender.decide import Extender
from valve_scheduler.model import ThroughputCurve, WorkloadProfile
from valve_scheduler.placement.rank import Job, PlacementSettings
from valve_scheduler.placement.reach import ReachVerdicts
from valve_scheduler.placement.state import ClusterState
from valve_tools.bench.row import Row, row_of
from valve_tools.cluster.api import Json
from valve_tools.cluster.controlplane import NotBuilt, binaries, control_plane, wait_for
from valve_tools.cluster.fleet import (
    create_nodes,
    gpu_uuids,
    harvest_node,
    install_crds,
    node_name,
    node_object,
    offline_pod,
    report,
)

SIZES = (100, 1_000, 5_000)
FILTER_MS = {100: None, 1_000: 10.0, 5_000: 50.0}
CALLS = 400
REPORT_EVERY_S = 30.0
PODS_PER_S = 20.0
GPUS = 8
PROFILE = WorkloadProfile(
    standalone_tokens_per_s=4_000.0,
    curve=ThroughputCurve(free_mib=(20_000.0, 40_000.0, 80_000.0), tokens_per_s=(1_000.0, 3_000.0, 4_000.0)),
    fit_mib=20_000.0,
)
KINDS = (("", 1), ("", 2), ("0.2", 1), ("0.4", 2), ("0.6", 1), ("0.3", 4))
"""(SLA, GPUs) of the pods, in turn; those with an SLA name a profile."""
PODS_A_NODE = (2, 4, 6, 8)
STRAIGHT = 0.10
WAITING, ROUND_MS = 500, 200.0
ROUNDS = 60
PODS_A_JOB = 20
MEMORY_NODES, OFFLINE_PODS, OTHER_PODS = 1_000, 8_000, 30_000
LIMIT_MIB = 320.0
"""Of extender and controller in the chart's values."""
ROUNDS_S = 40.0
PODS_PATH = "/api/v1/namespaces/default/pods"


class NoApi:
    """Binds are not part of these rows."""

    async def request(self, method: str, path: str, *, body: Any = None) -> Any:
        raise AssertionError(f"{method} {path}")


def state_of(nodes: int) -> tuple[ClusterState, list[bytes]]:
    """A fleet that has just reported, and its reports as the watch brings them."""
    random = np.random.default_rng(1)
    state, reports = ClusterState(PlacementSettings()), []
    for index in range(nodes):
        item = harvest_node(index) | {"spec": {"mode": "harvest"}, "status": report(index, random)}
        reports.append(json.dumps(item).encode())
        state.put_report(node_report(item), time.time())
    state.asked.put_profile("default", "bench", PROFILE)
    return state, reports


def waiting_pod(number: int) -> Json:
    sla, gpus = KINDS[number % len(KINDS)]
    found = offline_pod(f"p{number}", gpus=gpus, sla=sla, profile="bench" if sla else "", namespace="default")
    found["metadata"]["uid"] = f"{number:036d}"
    return found


def _filter(nodes: int) -> Iterator[Row]:
    """Filter, then prioritize on what is left, and the reports that arrive until the next pod."""
    state, reports = state_of(nodes)
    extender = Extender(state, NoApi(), now_s=time.time, can_answer=lambda: True)
    everywhere = [node_name(index) for index in range(nodes)]
    took: dict[str, list[tuple[float, float]]] = {"filter": [], "prioritize": []}
    due = 0.0
    for number in range(CALLS):
        due += nodes / REPORT_EVERY_S / PODS_PER_S
        while due >= 1.0:
            item = json.loads(reports[(number * 7919 + int(due)) % nodes])
            state.put_report(node_report(item), time.time())
            due -= 1.0
        pod = waiting_pod(number)
        left = _timed(took["filter"], extender.filter, {"Pod": pod, "NodeNames": everywhere})["NodeNames"]
        _timed(took["prioritize"], extender.prioritize, {"Pod": pod, "NodeNames": left})
        state.held.unreserve(pod["metadata"]["uid"])
    for verb, samples in took.items():
        budget = FILTER_MS[nodes] if verb == "filter" else None
        wall_ms = np.percentile([wall for _, wall in samples], 99)
        note = f"CPU time in the extender's process; with waiting for a core p99 {wall_ms:.1f}"
        yield row_of("extender-size", f"{verb}, {nodes} nodes", "ms", [cpu for cpu, _ in samples], budget, note=note)


def _timed(samples: list[tuple[float, float]], call: Callable[[Any], Any], arguments: Any) -> Any:
    """Samples are of CPU time and of time, in ms: what others do on the machine is in the second alone."""
    raw = json.dumps(arguments).encode()
    begun_s, cpu_s = time.perf_counter(), time.thread_time()
    found = call(msgspec.json.decode(raw))
    msgspec.json.encode(found)
    samples.append(((time.thread_time() - cpu_s) * 1e3, (time.perf_counter() - begun_s) * 1e3))
    return found


def _size() -> Iterable[Row]:
    for nodes in SIZES:
        yield from _filter(nodes)


def resident_mib(pods: int, nodes: int) -> float:
    """Of this process with so many bound pods of eleven kilobytes, read page by page as the reflector does."""
    state, reports = state_of(nodes)
    del reports
    shape = PodShape()
    for raw in _pages(lambda number: placed_pod(number, nodes), pods):
        for item in shape.page(raw).items:
            state.held.put_pod(pod_place(item))
    if len(state.held.holdings()) != pods:
        raise AssertionError(f"{len(state.held.holdings())} holdings of {pods} pods")
    return now_mib()


def _pages(make: Callable[[int], Json], count: int) -> Iterator[bytes]:
    """As the API server sends them. No more than one object is made at a time: those of a page would be most of what
    this process ever takes."""
    for first in range(0, count, PAGE):
        items = b",".join(json.dumps(make(index)).encode() for index in range(first, min(first + PAGE, count)))
        yield b'{"metadata": {"resourceVersion": "1"}, "items": [' + items + b"]}"


def now_mib() -> float:
    with Path("/proc/self/statm").open(encoding="ascii") as line:
        return int(line.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def followed_mib(nodes: int) -> dict[str, float]:
    """Of this process once the controller's caches have read so many nodes, then their reports, then eight pods of
    each, page by page from objects as large as a cluster's; and the most that it ever took."""
    caches = Caches(KubeClient(Access(host="", port=0, tls=None, authorization=str)), PlacementSettings(), time.time)
    random = np.random.default_rng(1)
    drawn = [report(index, random) for index in range(64)]
    pods_view, reports_view, _, _, _, nodes_view, _ = caches.views
    parts: dict[str, tuple[Reflector, Shape, Callable[[int], Json], int]] = {
        "nodes": (nodes_view, NodeShape(), whole_node, nodes),
        "reports": (reports_view, ReportShape(), lambda index: whole_report(index, drawn), nodes),
        "pods": (pods_view, PodShape(), lambda number: placed_pod(number, nodes), nodes * GPUS),
    }
    found = {"start": now_mib()}
    for name, (view, shape, make, count) in parts.items():
        items: list[Json] = []
        for raw in _pages(make, count):
            items += shape.page(raw).items
        view.sink.replace(items)
        found[name] = now_mib()
    return found | {"peak": peak_mib(os.getpid())}


def whole_node(index: int) -> Json:
    """A Node as a kubelet keeps it, with its images and managed fields: seventeen kilobytes."""
    found = node_object(index)
    found["metadata"]["labels"] |= {f"feature.node.kubernetes.io/cpu-{n}": "true" for n in range(60)}
    found["metadata"] |= {
        "annotations": {f"example.com/note-{n}": "x" * 200 for n in range(10)},
        "managedFields": [{"manager": f"m{n}", "fieldsV1": {f"f:{key}": {} for key in range(80)}} for n in range(3)],
    }
    images = [[f"example.invalid/team/image@sha256:{'a' * 64}", f"example.invalid/team/image:{n}"] for n in range(50)]
    found["status"]["images"] = [{"names": of_one, "sizeBytes": 10**9} for of_one in images]
    return found


def whole_report(index: int, drawn: Sequence[Json]) -> Json:
    """What a node says beside eight offline pods: ten kilobytes. Objects of their own, as decoded ones are."""
    status: Json = json.loads(json.dumps(drawn[index % len(drawn)]))
    for uuid, gpu in zip(gpu_uuids(index), status["gpus"], strict=True):
        gpu |= {"uuid": uuid, "onlineMemory": dict.fromkeys(("1h", "24h"), gpu["freeMemory"][::-1])}
    counted = {"demandSeconds": 1.5, "usefulTokens": 2.5, "runnableSeconds": 1.5, "harvestSeconds": 1.5}
    status["offline"] = [{"podUID": f"{index * GPUS + n:036d}", "namespace": "default", **counted} for n in range(GPUS)]
    status["services"] = [{"pod": f"chat-{index}", "namespace": "default", "lentSeconds": 1.5}]
    return harvest_node(index) | {"spec": {"mode": "harvest"}, "status": status}


def placed_pod(number: int, nodes: int) -> Json:
    """Bound to one GPU, with what an API server keeps of a Job's pod around it: eleven kilobytes."""
    found = waiting_pod(number)
    node, gpu = number // GPUS % nodes, number % GPUS
    found["metadata"]["annotations"] |= {names.GPUS: gpu_uuids(node)[gpu], "example.com/applied": "x" * 3_000}
    job = number // PODS_A_JOB
    found["metadata"] |= {
        "resourceVersion": str(10**7 + number),
        "creationTimestamp": f"2026-01-01T00:{job // 60 % 60:02}:{job % 60:02}Z",
        "ownerReferences": [
            {"apiVersion": "batch/v1", "kind": "Job", "name": f"job-{job}", "uid": f"{job:036d}", "controller": True}
        ],
    }
    found["metadata"]["managedFields"] = [
        {"manager": f"m{n}", "operation": "Update", "fieldsV1": {f"f:{key}": {} for key in range(60)}} for n in range(3)
    ]
    found["spec"]["nodeName"] = node_name(node)
    found["spec"]["containers"][0] |= {
        "resources": {"limits": {names.RESOURCE: "1"}},
        "env": [{"name": f"NAME_{n}", "value": "v" * 60} for n in range(50)],
    }
    found["status"] = running_status(number)
    return found


def running_status(number: int) -> Json:
    """As a kubelet writes it, a second after the one before."""
    minute, second = divmod(number, 60)
    at = f"2026-01-01T{minute // 60 % 24:02}:{minute % 60:02}:{second:02}Z"
    kinds = ("PodReadyToStartContainers", "Initialized", "Ready", "ContainersReady", "PodScheduled")
    return {
        "phase": "Running",
        "startTime": at,
        "conditions": [{"type": kind, "status": "True", "lastTransitionTime": at} for kind in kinds],
        "containerStatuses": [{"name": "work", "state": {"running": {"startedAt": at}}}],
    }


def _pods() -> Iterable[Row]:
    """A process for each count: what one has freed it may keep."""
    for nodes in SIZES:
        counts = [nodes * pods for pods in PODS_A_NODE]
        found = [float(_alone(f"resident_mib({count}, {nodes})")) for count in counts]
        slope, start = np.polyfit(counts, found, 1)
        off = np.abs(np.array(found) - (start + slope * np.array(counts))).max() / found[-1]
        shown = ", ".join(f"{count:,}: {mib:.0f}" for count, mib in zip(counts, found, strict=True))
        note = f"resident MiB by pods: {shown}; {slope * 1024:.2f} KiB a pod"
        metric = f"farthest from a line in pods, {nodes:,} nodes"
        yield row_of("extender-pods", metric, "share", [float(off)], STRAIGHT, note=note)


def _nodes() -> Iterable[Row]:
    """The controller keeps more than the extender: reports as they came, and which pods may use a node."""
    for nodes in SIZES:
        found = json.loads(_alone(f"json.dumps(followed_mib({nodes}))"))
        shown = ", ".join(f"{name} {mib:.0f}" for name, mib in found.items())
        note = f"resident MiB after each: {shown}; {nodes * GPUS:,} pods"
        yield row_of("controller-nodes", f"peak, {nodes:,} nodes", "MiB", [found["peak"]], LIMIT_MIB, note=note)


def _alone(expression: str) -> str:
    code = f"import json; from valve_tools.bench.clustersize import *; print({expression})"
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


def _round() -> Iterable[Row]:
    """What the controller's loop does for kinds that wait, each second and each half minute."""
    took = asyncio.run(_rounds())
    for part, samples in took.items():
        note = f"{WAITING} kinds wait, 1,000 nodes; the first round judges what it can and the next go on"
        yield row_of("controller-round", part, "ms", samples, ROUND_MS, judged="max", note=note)


async def _rounds() -> dict[str, list[float]]:
    state, reports = state_of(1_000)
    jobs = {"batch": [Job(gpus=1 + n % 4, sla=0.3 + n / WAITING / 2, profile=PROFILE) for n in range(WAITING)]}
    retries, reach = Retries(state), ReachVerdicts(state)
    took: dict[str, list[float]] = {"requeue": [], "out of reach": []}
    for number in range(ROUNDS):
        for index in range(33):  # a second's reports
            item = json.loads(reports[(number * 33 + index) % len(reports)])
            state.put_report(node_report(item), time.time())
        begun_s = time.perf_counter()
        await retries.round(jobs, time.time())
        took["requeue"].append((time.perf_counter() - begun_s) * 1e3)
        if number % 10 == 0:
            begun_s = time.perf_counter()
            await reach.of(jobs, time.time())
            took["out of reach"].append((time.perf_counter() - begun_s) * 1e3)
    return took


def _memory() -> Iterable[Row]:
    """Peaks of the processes that start beside a cluster which is full already: the list is the most they ever hold."""
    try:
        programs = binaries(Path.cwd())
    except NotBuilt as reason:
        print(f"cluster-memory: skipped, {reason}", file=sys.stderr)
        return
    with control_plane(programs) as plane:
        plane.start()
        plane.kill("kube-controller-manager")
        install_crds(plane.api, Path.cwd() / "helm/valve")
        create_nodes(plane.api, MEMORY_NODES)
        plane.api.each(("POST", PODS_PATH, pod) for pod in _full_cluster())
        extender, probes = plane.start_extender()
        plane.start_scheduler(extender)
        ports = {"extender": probes, "controller": plane.start_controller()}
        for name, port in ports.items():
            _wait_ready(name, port)
        time.sleep(ROUNDS_S)  # the controller's rounds go over all of it
        note = f"{OFFLINE_PODS:,} offline and {OTHER_PODS:,} other pods of {len(json.dumps(placed_pod(0, 1))):,} bytes"
        for name in ports:
            peak = peak_mib(plane.processes[name].pid)
            yield row_of("cluster-memory", f"{name}, peak", "MiB", [peak], LIMIT_MIB, note=note)
        yield row_of(
            "cluster-memory",
            "kube-scheduler, peak",
            "MiB",
            [peak_mib(plane.processes["kube-scheduler"].pid)],
            None,
        )


def _full_cluster() -> Iterator[Json]:
    for number in range(OFFLINE_PODS):
        pod = placed_pod(number, MEMORY_NODES)
        for own in ("managedFields", "resourceVersion", "creationTimestamp"):  # the API server's come instead
            pod["metadata"].pop(own)
        yield pod
    for number in range(OTHER_PODS):
        pod = placed_pod(number, MEMORY_NODES)
        pod["metadata"] = {"name": f"other-{number}", "labels": {"app": "other"}, "annotations": {"note": "x" * 3_000}}
        pod["spec"]["containers"][0]["resources"] = {"limits": {"cpu": "1"}}
        yield pod


def _wait_ready(name: str, port: int) -> None:
    wait_for(name, lambda: urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz"), 300)


def peak_mib(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    return int(re.findall(r"VmHWM:\s+(\d+) kB", status)[0]) / 1024


BENCHES: dict[str, Callable[[], Iterable[Row]]] = {
    "extender-size": _size,
    "extender-pods": _pods,
    "controller-nodes": _nodes,
    "controller-round": _round,
    "cluster-memory": _memory,
}
