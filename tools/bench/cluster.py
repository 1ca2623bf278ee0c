"""What placing costs: the extender in a real kube-scheduler over 1,000 nodes and 8,000 GPUs, 2,000 offline
pods.

One run serves all rows: etcd, API server, scheduler and extender share this machine, reports of the fleet
arrive at 33 a second meanwhile, and latencies are taken on the wire by a tap whose own cost is included."""

from __future__ import annotations

import functools
import os
import re
import ssl
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
from valve_scheduler import names
from valve_tools.bench.row import Row, row_of
from valve_tools.cluster.api import Api
from valve_tools.cluster.controlplane import ControlPlane, NotBuilt, binaries, free_port, wait_for
from valve_tools.cluster.fleet import create_nodes, install_crds, node_name, offline_pod, report
from valve_tools.cluster.tap import calls

NODES = 1_000
PODS = 2_000
REPORTS_PER_S = 33  # one per node and 30 s: the token bucket of the daemons
VERBS = {"filter": ("extender-filter", 20.0), "prioritize": ("extender-prioritize", 20.0), "bind": ("bind", 30.0)}


class Telemetry(threading.Thread):
    """Rewrites one node report after another until told to stop."""

    def __init__(self, api: Api) -> None:
        super().__init__(daemon=True)
        self._api = api
        self._done = threading.Event()
        self.written = 0

    def run(self) -> None:
        random = np.random.default_rng(2)
        while not self._done.wait(1 / REPORTS_PER_S):
            index = self.written % NODES
            path = f"{names.API_PATH}/gpuharvestnodes/{node_name(index)}/status"
            self._api.patch(path, {"status": report(index, random)})
            self.written += 1

    def stop(self) -> None:
        self._done.set()
        self.join()


@functools.cache
def _measured() -> dict[str, Row]:
    with tempfile.TemporaryDirectory(prefix="valve-bench-") as folder:
        plane = ControlPlane(Path(folder), binaries(Path.cwd()))
        try:
            plane.start()
            return _run(plane)
        finally:
            plane.stop()


def _run(plane: ControlPlane) -> dict[str, Row]:
    install_crds(plane.api, Path.cwd() / "helm/valve")
    create_nodes(plane.api, NODES)
    scheduler = _start(plane)
    telemetry = Telemetry(plane.api)
    telemetry.start()
    before = {name: _cpu_s(pid) for name, pid in _pids(plane).items()}
    started = time.monotonic()
    path = "/api/v1/namespaces/default/pods"
    plane.api.each(("POST", path, offline_pod(f"p{index}", gpus=1 + index % 2)) for index in range(PODS))
    wait_for("all pods bound", lambda: _bound(plane.folder / "calls.txt") >= PODS, 300)
    took_s = time.monotonic() - started
    telemetry.stop()
    spent_ms = {name: (_cpu_s(pid) - before[name]) / PODS * 1e3 for name, pid in _pids(plane).items()}

    rows = _latencies(plane.folder / "calls.txt", _algorithm_mean_ms(scheduler))
    resident_mib = _peak_mib(plane.processes["extender"].pid)
    rows["extender-rss"] = row_of("extender-rss", "resident peak", "MiB", [resident_mib], 300.0)
    shares = ", ".join(f"{name} {spent:.1f}" for name, spent in sorted(spent_ms.items(), key=lambda one: -one[1]))
    note = f"{telemetry.written / took_s:.0f} reports/s meanwhile; CPU ms per pod: {shares}"
    rows["bind-rate"] = row_of(
        "bind-rate", "pods bound, end to end", "pods/s", [PODS / took_s], 100.0, better="higher", note=note
    )

    return rows


def _pids(plane: ControlPlane) -> dict[str, int]:
    return {name: process.pid for name, process in plane.processes.items()} | {"this bench": os.getpid()}


def _bound(log: Path) -> int:
    """Answered binds; asking the API server for its pods again and again would be most of the load."""
    return log.read_text(encoding="utf-8").count("bind ")


def _start(plane: ControlPlane) -> int:
    """kube-scheduler, a tap and the extender; the port of the first."""
    port, probes = plane.start_extender()
    wait_for("the extender", lambda: urllib.request.urlopen(f"http://127.0.0.1:{probes}/readyz"))
    tap = free_port()
    arguments = ("-m", "valve_tools.cluster.tap", str(tap), str(port), str(plane.folder / "calls.txt"))
    plane.spawn("tap", *arguments, program=sys.executable)

    return plane.start_scheduler(tap)


def _latencies(log: Path, algorithm_mean_ms: float) -> dict[str, Row]:
    samples: dict[str, list[float]] = {verb: [] for verb in VERBS}
    refused = 0
    for verb, seconds, status in calls(log):
        samples[verb].append(seconds * 1e3)
        refused += status != 200
    together = sum(float(np.mean(samples[verb])) for verb in ("filter", "prioritize"))
    note = f"mean of filter + prioritize {together:.1f} ms, scheduler's own cycle {algorithm_mean_ms:.1f} ms"

    return {
        name: row_of(name, f"{verb} on the wire", "ms", samples[verb], budget_ms, note=f"{note}; {refused} refused")
        for verb, (name, budget_ms) in VERBS.items()
    }


def _algorithm_mean_ms(scheduler: int) -> float:
    """kube-scheduler's own figure for a scheduling cycle, which contains filter and prioritize."""
    context = ssl._create_unverified_context()
    page = urllib.request.urlopen(f"https://127.0.0.1:{scheduler}/metrics", context=context).read().decode()
    found = {
        part: float(re.findall(rf"^scheduler_scheduling_algorithm_duration_seconds_{part}\S* (\S+)", page, re.M)[0])
        for part in ("sum", "count")
    }

    return found["sum"] / found["count"] * 1e3


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
    name: _bench(name) for name in ("extender-filter", "extender-prioritize", "bind", "bind-rate", "extender-rss")
}
