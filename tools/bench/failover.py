"""How long nothing is placed when the leading scheduler dies: two replicas under the chart's own lease of 10 s."""

from __future__ import annotations

import functools
import os
import sys
import time
import urllib.request
from collections.abc import Iterable
from pathlib import Path

from valve_tools.bench.row import Row, row_of
from valve_tools.cluster.api import ClusterApi
from valve_tools.cluster.controlplane import CHART_LEASE, ControlPlane, NotBuilt, binaries, control_plane, wait_for
from valve_tools.cluster.fleet import Heartbeat, create_nodes, install_crds, offline_pod

NODES, KILLS = 40, 5
BUDGET_S = 20.0
HOSTS = ("a", "b")
PODS = "/api/v1/namespaces/default/pods"
LEASE = "/apis/coordination.k8s.io/v1/namespaces/default/leases/valve-scheduler"


def bench() -> Iterable[Row]:
    if os.geteuid() != 0:
        print("failover: skipped, needs root: each replica gets a hostname of its own", file=sys.stderr)
        return []
    try:
        programs = binaries(Path.cwd())
    except NotBuilt as reason:
        print(f"failover: skipped, {reason}", file=sys.stderr)
        return []
    with control_plane(programs) as plane:
        plane.start()
        return [_measured(plane)]


def _measured(plane: ControlPlane) -> Row:
    install_crds(plane.api, Path.cwd() / "helm/valve")
    create_nodes(plane.api, NODES)
    heartbeat = Heartbeat(plane.api, NODES)
    heartbeat.start()
    for host in HOSTS:
        port, probes = plane.start_extender(
            name=f"extender-{host}", arguments=("--lease-namespace=default",), hostname=host
        )
        wait_for("an extender", functools.partial(urllib.request.urlopen, f"http://127.0.0.1:{probes}/healthz"))
        plane.start_scheduler(port, name=f"scheduler-{host}", lease="default", lease_times=CHART_LEASE, hostname=host)
    _place(plane.api, "first")
    took_s = []
    for number in range(KILLS):
        leader = _leader(plane.api)
        plane.kill(f"scheduler-{leader}")
        took_s.append(_place(plane.api, f"after-{number}"))
        plane.restart(f"scheduler-{leader}")
    heartbeat.stop()

    note = f"lease of {CHART_LEASE['leaseDuration']}"
    return row_of("failover", "leader killed to next bind", "s", took_s, BUDGET_S, judged="max", note=note)


def _leader(api: ClusterApi) -> str:
    return str(api.get(LEASE)["spec"]["holderIdentity"]).partition("_")[0]


def _place(api: ClusterApi, pod: str) -> float:
    """Seconds until a pod that comes now has a node."""
    begun_s = time.monotonic()
    api.post(PODS, offline_pod(pod))
    wait_for("the bind", lambda: api.get(f"{PODS}/{pod}")["spec"].get("nodeName"))

    return time.monotonic() - begun_s


BENCHES = {"failover": bench}
