"""What placing costs: the extender in a real kube-scheduler over 1,000 nodes and 8,000 GPUs.

One run serves all rows: etcd, API server, scheduler and extender share this machine (not the controller manager, which
has no part in a placement), and reports of the fleet arrive at 33 a second meanwhile. Five turns, each of three parts:
pods of several kinds, most with an SLA, come at once (the rate); then one after another at a rate that the machine can
serve, with a tap on the wire whose own cost is included (the latencies); then the same kinds come at once to the same
scheduler with an extender that decides nothing (the rate to compare with, of the same minute). Rows are the median of
the turns; binds that the extender refused are counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import re
import ssl
import sys
import time
import urllib.request
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import numpy as np
from valve_kube import names
from valve_kube.access import from_kubeconfig
from valve_kube.client import KubeClient
from valve_scheduler.cli.pause import Paused, pause, resume
from valve_tools.bench.clustersize import peak_mib
from valve_tools.bench.row import Row, row_of
from valve_tools.cluster.api import ClusterApi, Json
from valve_tools.cluster.controlplane import ControlPlane, NotBuilt, binaries, control_plane, free_port, wait_for
from valve_tools.cluster.fleet import (
    UntilStopped,
    create_nodes,
    delete_pods,
    gpu_uuids,
    install_crds,
    node_name,
    offline_pod,
    report,
)
from valve_tools.cluster.listeners import READY, heard
from valve_tools.cluster.tap import calls

from valved.kube.apiserver import now_text

NODES = 1_000
PODS = 600
TURNS = int(os.environ.get("VALVE_TURNS", "5"))  # each of them takes a minute or more
SERVERS = {"GOGC": "400"}  # for etcd and the API server, as for the scheduler: a fifth of their work was collecting
STEADY_PODS, STEADY_PER_S = 200, 20
OF_TRIVIAL = 0.85
REQUEUES, BACKOFF_S = 10, 1.5  # kube-scheduler keeps a pod back for 1 s after its first refusal
REPORTS_PER_S = 33  # one per node and 30 s: the token bucket of the daemons
PATH = "/api/v1/namespaces/default/pods"
SCHEDULED = 'scheduler_schedule_attempts_total{profile="valve-scheduler",result="scheduled"}'
TRUSTING = ssl._create_unverified_context()
VERBS = {"filter": ("extender-filter", 10.0), "prioritize": ("extender-prioritize", 10.0), "bind": ("bind", 20.0)}
KINDS = (("", 1), ("0.2", 1), ("", 2), ("0.3", 2), ("0.5", 1), ("0.2", 4))
"""(SLA, GPUs) of the pods, in turn."""


class Telemetry(UntilStopped):
    """Rewrites one node report after another until told to stop."""

    def __init__(self, api: ClusterApi) -> None:
        super().__init__()
        self._api = api
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


@functools.cache
def _measured() -> dict[str, Row]:
    with control_plane(binaries(Path.cwd()), SERVERS) as plane:
        plane.start()
        plane.kill("kube-controller-manager")
        return _run(plane)


def _run(plane: ControlPlane) -> dict[str, Row]:
    install_crds(plane.api, Path.cwd() / "helm/valve")
    create_nodes(plane.api, NODES)
    _create_profile(plane.api, "bench", "H100", 4_000.0)
    telemetry = Telemetry(plane.api)
    telemetry.start()
    turns = [_turn(plane, number) for number in range(TURNS)]
    extender, _ = _start_extender(plane)
    _start_scheduler(plane, extender)
    rows = {
        "requeue": _requeue(plane, telemetry),
        "cluster-pause": _pause(plane),
        "extender-rss": row_of(
            "extender-rss", "resident peak", "MiB", [turn.resident_mib for turn in turns], 300.0, judged="max"
        ),
        **_latency_rows(turns),
        "bind-rate": _rate_row(turns),
    }
    telemetry.stop()
    return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What was measured one after another within a minute."""

    rate: float
    trivial_rate: float
    refused_binds: int
    """Of both parts."""
    spent_ms: dict[str, float]
    """CPU time per pod of each process."""
    trivial_spent_ms: float
    """Of all of them, with the extender that decides nothing."""
    latencies_ms: dict[str, list[float]]
    resident_mib: float


def _turn(plane: ControlPlane, number: int) -> Turn:
    extender, probes = _start_extender(plane)
    scheduler = _start_scheduler(plane, extender)
    rate, spent_ms = _spending(plane, scheduler, f"burst-{number}")
    plane.kill("kube-scheduler")
    latencies_ms = _steady(plane, extender, number)
    refused, resident_mib = _refused_binds(probes), peak_mib(plane.processes["extender"].pid)
    for name in ("kube-scheduler", "tap", "extender"):
        plane.kill(name)
    delete_pods(plane.api)
    trivial_rate, trivial_spent_ms = _trivial_rate(plane, number)
    return Turn(
        rate=rate,
        trivial_rate=trivial_rate,
        refused_binds=refused,
        spent_ms=spent_ms,
        trivial_spent_ms=sum(trivial_spent_ms.values()),
        latencies_ms=latencies_ms,
        resident_mib=resident_mib,
    )


def _start_extender(plane: ControlPlane) -> tuple[int, int]:
    port, probes = plane.start_extender()
    wait_for("the extender", lambda: urllib.request.urlopen(f"http://127.0.0.1:{probes}/readyz"))
    return port, probes


def _create_profile(api: ClusterApi, name: str, gpu_model: str, tokens_per_s: float) -> None:
    profiles = f"/apis/{names.API_VERSION}/namespaces/default/offlineprofiles"
    spec = {
        "workload": {"model": name, "gpuModel": gpu_model},
        "standaloneTokensPerSecond": tokens_per_s,
        "curve": [{"freeMiB": 0, "tokensPerSecond": tokens_per_s}],
    }
    body = {"apiVersion": names.API_VERSION, "kind": "OfflineProfile", "metadata": {"name": name}, "spec": spec}
    api.post(profiles, body)
    api.patch(f"{profiles}/{name}/status", {"status": {"phase": "Ready"}})


def _pod(prefix: str, index: int) -> Json:
    sla, gpus = KINDS[index % len(KINDS)]
    return offline_pod(f"{prefix}-{index}", gpus=gpus, sla=sla, profile="bench" if sla else "")


def _burst(plane: ControlPlane, scheduler: int, prefix: str, pods: int) -> float:
    """Pods per second from the first creation to the last bind; reports come and go on meanwhile."""
    started = time.monotonic()
    plane.api.each(("POST", PATH, _pod(prefix, index)) for index in range(pods))
    # kube-scheduler's own count: asking the API server for its pods again and again would be most of the load.
    wait_for("all pods bound", lambda: _metric(scheduler, SCHEDULED) >= pods, 300)

    return pods / (time.monotonic() - started)


def _spending(plane: ControlPlane, scheduler: int, prefix: str) -> tuple[float, dict[str, float]]:
    """The rate of a burst, and the CPU time of each process per pod in ms."""
    before = {name: _cpu_s(pid) for name, pid in _pids(plane).items()}
    rate = _burst(plane, scheduler, prefix, PODS)
    return rate, {name: (_cpu_s(pid) - before[name]) / PODS * 1e3 for name, pid in _pids(plane).items()}


def _steady(plane: ControlPlane, extender: int, number: int) -> dict[str, list[float]]:
    """One pod after another, with a tap between kube-scheduler and extender; milliseconds by verb."""
    tap, log = free_port(), plane.folder / f"calls-{number}.txt"
    log.touch()
    arguments = ("-m", "valve_tools.cluster.tap", str(tap), str(extender), str(log))
    plane.spawn("tap", *arguments, program=sys.executable)
    scheduler = _start_scheduler(plane, tap)
    begin = time.monotonic()
    for index in range(STEADY_PODS):
        time.sleep(max(0.0, begin + index / STEADY_PER_S - time.monotonic()))
        plane.api.post(PATH, _pod(f"steady-{number}", index))
    wait_for("all pods bound", lambda: _metric(scheduler, SCHEDULED) >= STEADY_PODS, 300)
    found = list(calls(log))

    return {verb: [seconds * 1e3 for name, seconds, _ in found if name == verb] for verb in VERBS}


def _refused_binds(probes: int) -> int:
    page = urllib.request.urlopen(f"http://127.0.0.1:{probes}/metrics").read().decode()
    found = re.search(r'^valve_extender_binds_total\{outcome="refused"\} (\S+)$', page, re.M)
    return round(float(found[1])) if found else 0


def _latency_rows(turns: Sequence[Turn]) -> dict[str, Row]:
    refused = ", ".join(str(turn.refused_binds) for turn in turns)
    note = f"median of {len(turns)} turns, {STEADY_PER_S} pods/s; binds refused in {PODS + STEADY_PODS}: {refused}"
    rows = {}
    for verb, (name, budget_ms) in VERBS.items():
        each = [row_of(name, f"{verb} on the wire", "ms", turn.latencies_ms[verb], budget_ms) for turn in turns]
        p50, p99 = (median([getattr(row, figure) for row in each]) for figure in ("p50", "p99"))
        longest, count = max(row.max for row in each), sum(row.n for row in each)
        rows[name] = replace(each[0], p50=p50, p99=p99, max=longest, n=count, note=note)
    return rows


def _rate_row(turns: Sequence[Turn]) -> Row:
    spent = {name: median([turn.spent_ms[name] for turn in turns]) for name in turns[0].spent_ms}
    shares = ", ".join(f"{name} {ms:.1f}" for name, ms in sorted(spent.items(), key=lambda one: -one[1]))
    rates = median([turn.rate for turn in turns]), median([turn.trivial_rate for turn in turns])
    trivial_ms = median([turn.trivial_spent_ms for turn in turns])
    # On a machine that others use, too, the rate is what is left for it; the CPU time of a pod hardly depends on them.
    of_cpu = median([turn.trivial_spent_ms / sum(turn.spent_ms.values()) for turn in turns])
    note = (
        f"{rates[0]:.1f} pods/s against {rates[1]:.1f}; CPU ms per pod, {sum(spent.values()):.0f} in all: {shares}; "
        f"of the other extender {trivial_ms:.0f}, so by CPU time {of_cpu:.2f}; "
        f"binds refused: {', '.join(str(turn.refused_binds) for turn in turns)}"
    )
    ratios = [turn.rate / turn.trivial_rate for turn in turns]
    metric = "pods a second over an extender that decides nothing"
    return row_of("bind-rate", metric, "ratio", ratios, OF_TRIVIAL, better="higher", judged="p50", note=note)


def _requeue(plane: ControlPlane, telemetry: Telemetry) -> Row:
    """From the bump of a node that became good enough to the bind of a pod that was refused and has waited enough."""
    api = plane.api
    _create_profile(api, "rare", "RARE", 100.0)
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


def _is_refused(api: ClusterApi, pod: str) -> bool:
    return bool(api.get(f"{PATH}/{pod}")["status"].get("conditions"))


def _node_of(api: ClusterApi, pod: str) -> str:
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


def _trivial_rate(plane: ControlPlane, number: int) -> tuple[float, dict[str, float]]:
    """The same scheduler and API server with an extender that decides nothing."""
    port = free_port()
    arguments = ("-m", "valve_tools.cluster.trivial", str(port), str(plane.kubeconfig))
    plane.spawn("trivial", *arguments, program=sys.executable)
    found = _spending(plane, _start_scheduler(plane, port), f"trivial-{number}")
    for name in ("kube-scheduler", "trivial"):
        plane.kill(name)
    delete_pods(plane.api)
    return found


def _pids(plane: ControlPlane) -> dict[str, int]:
    return {name: process.pid for name, process in plane.processes.items()} | {"this bench": os.getpid()}


def _start_scheduler(plane: ControlPlane, extender: int) -> int:
    port = plane.start_scheduler(extender)
    wait_for("kube-scheduler", lambda: urllib.request.urlopen(f"https://127.0.0.1:{port}/readyz", context=TRUSTING))

    return port


def _metric(scheduler: int, name: str) -> float:
    """A figure of kube-scheduler's own, 0 until it appears; its scheduling cycle contains filter and prioritize."""
    page = urllib.request.urlopen(f"https://127.0.0.1:{scheduler}/metrics", context=TRUSTING).read().decode()
    found = re.search(rf"^{re.escape(name)}\S* (\S+)$", page, re.M)

    return float(found[1]) if found else 0.0


def _cpu_s(pid: int) -> float:
    """Processor time so far: unlike the rate it hardly depends on other work on the machine."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


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
