"""What placing costs: the extender in a real kube-scheduler over 1,000 nodes and 8,000 GPUs, 2,000 offline
pods.

One run serves all rows: etcd, API server, scheduler and extender share this machine (not the controller manager, which
has no part in a placement), reports of the fleet arrive at 33 a second meanwhile, and latencies are taken on the wire
by a tap whose own cost is included. First 2,000 pods come at once: the rate, without the tap. Then pods come one after
another at a rate the machine can serve: the latencies. Last the same scheduler with an extender that decides nothing:
the rate to compare with, of the same minute.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import re
import ssl
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
from valve_kube import names
from valve_kube.access import from_kubeconfig
from valve_kube.client import KubeClient
from valve_scheduler.cli.pause import Paused, pause, resume
from valve_tools.bench.row import Row, row_of
from valve_tools.cluster.api import Api
from valve_tools.cluster.controlplane import ControlPlane, NotBuilt, binaries, free_port, wait_for
from valve_tools.cluster.fleet import create_nodes, delete_pods, gpu_uuids, install_crds, node_name, offline_pod, report
from valve_tools.cluster.listeners import READY, heard
from valve_tools.cluster.tap import calls

from valved.kube.apiserver import now_text

NODES = 1_000
PODS = 2_000
SERVERS = {"GOGC": "400"}  # for etcd and the API server, as for the scheduler: a fifth of their work was collecting
STEADY_PODS, STEADY_PER_S = 400, 20
TRIVIAL_PODS = 1_000
REQUEUES, BACKOFF_S = 10, 1.5  # kube-scheduler keeps a pod back for 1 s after its first refusal
REPORTS_PER_S = 33  # one per node and 30 s: the token bucket of the daemons
PATH = "/api/v1/namespaces/default/pods"
SCHEDULED = 'scheduler_schedule_attempts_total{profile="valve-scheduler",result="scheduled"}'
TRUSTING = ssl._create_unverified_context()
VERBS = {"filter": ("extender-filter", 20.0), "prioritize": ("extender-prioritize", 20.0), "bind": ("bind", 30.0)}


class Telemetry(threading.Thread):
    """Rewrites one node report after another until told to stop."""

    def __init__(self, api: Api) -> None:
        super().__init__(daemon=True)
        self._api = api
        self._done = threading.Event()
        random = np.random.default_rng(2)
        self._drawn = [report(index, random) for index in range(251)]
        for each in self._drawn:
            del each["phase"]  # a patch that leaves it as it is, also on a node that was paused
        self.written = 0

    def run(self) -> None:
        begin_s = time.monotonic()
        while not self._done.wait(max(0.0, begin_s + self.written / REPORTS_PER_S - time.monotonic())):
            index = self.written % NODES
            # The series of one, the cards of another: to draw them anew took this process as long as to send them.
            drawn, own = self._drawn[self.written % len(self._drawn)], gpu_uuids(index)
            gpus = [gpu | {"uuid": uuid} for gpu, uuid in zip(drawn["gpus"], own, strict=True)]
            path = f"{names.API_PATH}/gpuharvestnodes/{node_name(index)}/status"
            self._api.patch(path, {"status": drawn | {"gpus": gpus, "observedAt": now_text()}})
            self.written += 1

    def stop(self) -> None:
        self._done.set()
        self.join()


@functools.cache
def _measured() -> dict[str, Row]:
    with tempfile.TemporaryDirectory(prefix="valve-bench-") as folder:
        plane = ControlPlane(Path(folder), binaries(Path.cwd()), SERVERS)
        try:
            plane.start()
            plane.kill("kube-controller-manager")
            return _run(plane)
        finally:
            plane.stop()


def _run(plane: ControlPlane) -> dict[str, Row]:
    install_crds(plane.api, Path.cwd() / "helm/valve")
    create_nodes(plane.api, NODES)
    port, probes = plane.start_extender()
    wait_for("the extender", lambda: urllib.request.urlopen(f"http://127.0.0.1:{probes}/readyz"))
    scheduler = _start_scheduler(plane, port)
    telemetry = Telemetry(plane.api)
    telemetry.start()
    before = {name: _cpu_s(pid) for name, pid in _pids(plane).items()}
    rate = _burst(plane, scheduler, "burst", PODS)
    spent_ms = {name: (_cpu_s(pid) - before[name]) / PODS * 1e3 for name, pid in _pids(plane).items()}
    plane.kill("kube-scheduler")
    rows = _steady(plane, port)
    resident_mib = _peak_mib(plane.processes["extender"].pid)
    rows["extender-rss"] = row_of("extender-rss", "resident peak", "MiB", [resident_mib], 300.0)
    delete_pods(plane.api)  # or a node that becomes good enough may have no GPU left
    rows["requeue"] = _requeue(plane.api, telemetry)
    rows["cluster-pause"] = _pause(plane)
    baseline = _trivial_rate(plane)
    telemetry.stop()

    shares = ", ".join(f"{name} {spent:.1f}" for name, spent in sorted(spent_ms.items(), key=lambda one: -one[1]))
    note = (
        f"{rate / baseline:.2f} of an extender that decides nothing; "
        f"CPU ms per pod, {sum(spent_ms.values()):.0f} in all: {shares}"
    )
    rows["bind-rate"] = row_of(
        "bind-rate", "pods bound, end to end", "pods/s", [rate], 100.0, better="higher", baseline=baseline, note=note
    )

    return rows


def _burst(plane: ControlPlane, scheduler: int, prefix: str, pods: int) -> float:
    """Pods per second from the first creation to the last bind; reports come and go on meanwhile."""
    started = time.monotonic()
    made = (offline_pod(f"{prefix}-{index}", gpus=1 + index % 2) for index in range(pods))
    plane.api.each(("POST", PATH, pod) for pod in made)
    # kube-scheduler's own count: asking the API server for its pods again and again would be most of the load.
    wait_for("all pods bound", lambda: _metric(scheduler, SCHEDULED) >= pods, 300)

    return pods / (time.monotonic() - started)


def _steady(plane: ControlPlane, extender: int) -> dict[str, Row]:
    """One pod after another, with a tap between kube-scheduler and extender."""
    tap, log = free_port(), plane.folder / "calls.txt"
    log.touch()
    arguments = ("-m", "valve_tools.cluster.tap", str(tap), str(extender), str(log))
    plane.spawn("tap", *arguments, program=sys.executable)
    scheduler = _start_scheduler(plane, tap)
    begin = time.monotonic()
    for index in range(STEADY_PODS):
        time.sleep(max(0.0, begin + index / STEADY_PER_S - time.monotonic()))
        plane.api.post(PATH, offline_pod(f"steady-{index}", gpus=1 + index % 2))
    wait_for("all pods bound", lambda: _metric(scheduler, SCHEDULED) >= STEADY_PODS, 300)

    return _latencies(list(calls(log)), scheduler)


def _requeue(api: Api, telemetry: Telemetry) -> Row:
    """From the bump of a node that became good enough to the bind of a pod that was refused and has waited enough."""
    profiles = f"/apis/{names.API_VERSION}/namespaces/default/offlineprofiles"
    spec = {
        "workload": {"model": "rare", "gpuModel": "RARE"},
        "standaloneTokensPerSecond": 100,
        "curve": [{"freeMiB": 0, "tokensPerSecond": 100}],
    }
    body = {"apiVersion": names.API_VERSION, "kind": "OfflineProfile", "metadata": {"name": "rare"}, "spec": spec}
    api.post(profiles, body)
    api.patch(f"{profiles}/rare/status", {"status": {"phase": "Ready"}})
    random, took_s = np.random.default_rng(3), []
    for index in range(REQUEUES):
        pod = f"rare-{index}"
        api.post(PATH, offline_pod(pod, sla="0.1", profile="rare"))
        wait_for("a refusal", functools.partial(_is_refused, api, pod))
        time.sleep(BACKOFF_S)
        node = node_name((telemetry.written + NODES // 2) % NODES)  # far from the one to be overwritten next
        status = report(int(node[-4:]), random, idle=0.9) | {"gpuModel": "RARE"}
        api.patch(f"{names.API_PATH}/gpuharvestnodes/{node}/status", {"status": status})
        time.sleep(BACKOFF_S)  # the extender hears of the report, as the controller that bumps has heard of it
        bumped = time.monotonic()
        api.patch(f"/api/v1/nodes/{node}", {"metadata": {"annotations": {names.EPOCH: str(index)}}})
        wait_for("the bind", functools.partial(_node_of, api, pod))
        took_s.append(time.monotonic() - bumped)
        api.patch(f"{names.API_PATH}/gpuharvestnodes/{node}/status", {"status": {"gpuModel": "H100"}})

    return row_of(
        "requeue", "capacity epoch to bind", "s", took_s, 2.0, judged="max", note="looked at every 20 ms or more"
    )


def _is_refused(api: Api, pod: str) -> bool:
    return bool(api.get(f"{PATH}/{pod}")["status"].get("conditions"))


def _node_of(api: Api, pod: str) -> str:
    return str(api.get(f"{PATH}/{pod}")["spec"].get("nodeName") or "")


def _pause(plane: ControlPlane) -> Row:
    """The brake of the whole fleet, as `valve cluster pause` pulls it: a thousand nodes that watch and answer."""
    log = plane.folder / "heard.txt"
    log.touch()
    arguments = ("-m", "valve_tools.cluster.listeners", str(plane.kubeconfig), str(NODES), str(log))
    plane.spawn("listeners", *arguments, program=sys.executable)
    wait_for("every node to watch", lambda: READY in log.read_text(), 180)

    async def pulled() -> Paused:
        with contextlib.closing(KubeClient(from_kubeconfig(str(plane.kubeconfig)))) as client:
            return await pause(client, wait_s=120.0)

    begun_s = time.monotonic()
    done = asyncio.run(pulled())
    wait_for("every answer", lambda: len(list(heard(log, "paused"))) == NODES)
    plane.kill("listeners")
    asyncio.run(_resumed(plane))
    told = [at_s - begun_s for at_s, _ in heard(log, "paused")]
    answered = max(at_s - begun_s for _, at_s in heard(log, "paused"))
    note = f"{done.confirmed} reports said so after {answered:.1f} s, the command after {done.took_s:.1f} s"

    return row_of("cluster-pause", f"all {NODES} nodes have heard", "s", told, 5.0, judged="max", note=note)


async def _resumed(plane: ControlPlane) -> None:
    with contextlib.closing(KubeClient(from_kubeconfig(str(plane.kubeconfig)))) as client:
        await resume(client)


def _trivial_rate(plane: ControlPlane) -> float:
    """The same scheduler and API server with an extender that decides nothing."""
    for name in ("kube-scheduler", "tap", "extender"):
        plane.kill(name)
    port = free_port()
    arguments = ("-m", "valve_tools.cluster.trivial", str(port), str(plane.kubeconfig))
    plane.spawn("trivial", *arguments, program=sys.executable)

    return _burst(plane, _start_scheduler(plane, port), "trivial", TRIVIAL_PODS)


def _pids(plane: ControlPlane) -> dict[str, int]:
    return {name: process.pid for name, process in plane.processes.items()} | {"this bench": os.getpid()}


def _start_scheduler(plane: ControlPlane, extender: int) -> int:
    port = plane.start_scheduler(extender)
    wait_for("kube-scheduler", lambda: urllib.request.urlopen(f"https://127.0.0.1:{port}/readyz", context=TRUSTING))

    return port


def _latencies(found: Sequence[tuple[str, float, int]], scheduler: int) -> dict[str, Row]:
    samples = {verb: [seconds * 1e3 for name, seconds, _ in found if name == verb] for verb in VERBS}
    together_ms = sum(float(np.mean(samples[verb])) for verb in ("filter", "prioritize"))
    cycle = "scheduler_scheduling_algorithm_duration_seconds"
    cycle_ms = _metric(scheduler, f"{cycle}_sum") / _metric(scheduler, f"{cycle}_count") * 1e3
    refused = sum(status != 200 for _, _, status in found)
    note = (
        f"{STEADY_PER_S} pods/s; mean of filter + prioritize {together_ms:.1f} ms, "
        f"scheduler's own cycle {cycle_ms:.1f} ms; {refused} refused"
    )
    return {
        name: row_of(name, f"{verb} on the wire", "ms", samples[verb], budget_ms, note=note)
        for verb, (name, budget_ms) in VERBS.items()
    }


def _metric(scheduler: int, name: str) -> float:
    """A figure of kube-scheduler's own, 0 until it appears; its scheduling cycle contains filter and prioritize."""
    page = urllib.request.urlopen(f"https://127.0.0.1:{scheduler}/metrics", context=TRUSTING).read().decode()
    found = re.search(rf"^{re.escape(name)}\S* (\S+)$", page, re.M)

    return float(found[1]) if found else 0.0


def _cpu_s(pid: int) -> float:
    """Processor time so far: unlike the rate it hardly depends on who else uses the machine."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _peak_mib(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    return int(re.findall(r"VmHWM:\s+(\d+) kB", status)[0]) / 1024


def _bench(name: str) -> Callable[[], Iterable[Row]]:
    def rows() -> Iterable[Row]:
        try:
            return [_measured()[name]]
        except NotBuilt as reason:
            print(f"{name}: skipped, {reason}", file=sys.stderr)
            return []

    return rows


BENCHES: dict[str, Callable[[], Iterable[Row]]] = {
    name: _bench(name)
    for name in (
        "extender-filter",
        "extender-prioritize",
        "bind",
        "bind-rate",
        "extender-rss",
        "requeue",
        "cluster-pause",
    )
}
