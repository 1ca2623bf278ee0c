"""A whole cluster with the chart on it, and faults in an order that a seed decides. By hand and in `make test-all`:

VALVE_SOAK=40 pytest -s tests/cluster/test_soak.py     # so many faults; VALVE_SOAK_SEED chooses their order
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster_soak import (
    OURS,
    PATIENCE_S,
    REPORTS,
    Faults,
    LogWatch,
    delete_soak_pods,
    held_twice,
    left,
    processes,
    resident_kib,
)
from rich.console import Console
from valve_kube import names
from valve_tools.cluster import quiet
from valve_tools.cluster.controlplane import ControlPlane, binaries, wait_for
from valve_tools.cluster.fleet import Heartbeat, bound_pods, create_nodes, node_name, offline_pod
from valve_tools.cluster.helm import Helm
from valve_tools.cluster.node import NAME, RealNode
from valve_tools.cluster.workpods import PODS
from valve_tools.demo import cluster_node
from valve_tools.demo.cluster import programs_or_why_not
from valve_tools.demo.cluster_node import Chat, Stage
from valve_tools.demo.cluster_screen import Screen

ROOT = Path(__file__).resolve().parents[2]
FAULTS = int(os.environ.get("VALVE_SOAK", "0"))
SEED = int(os.environ.get("VALVE_SOAK_SEED", "1"))
NODES = 6
PLACED = 30  # offline pods that must find their place at the end
GROWTH_KIB = 12 << 10  # of a process over churn in which nothing is left: far less than a kept object each would be

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(not FAULTS, reason="VALVE_SOAK says how many faults; make test-all sets it"),
]


@contextlib.contextmanager
def cluster() -> Iterator[Stage]:
    """A control plane of its own, a real node, the chart's pods on it, and some made-up nodes."""
    problem, _ = programs_or_why_not(ROOT)
    if problem:
        pytest.skip(problem)
    with tempfile.TemporaryDirectory(prefix="vs-") as folder, contextlib.ExitStack() as last:
        plane = ControlPlane(Path(folder), binaries(ROOT))
        last.callback(plane.stop)
        plane.start()
        plane.start_default_scheduler()
        with RealNode(plane, gpus=2, pod_network=True) as node:
            stage = Stage(screen=Screen(Console(file=sys.stdout)), plane=plane, node=node, helm=helm_of(plane))
            try:
                yield stage
            finally:
                plane.kill("kube-controller-manager")  # or the chart's pods would come back


def helm_of(plane: ControlPlane) -> Helm:
    return Helm(plane, ROOT / "helm/valve")


def is_settled(stage: Stage) -> bool:
    """Every container of the chart runs and is ready, and the real node reports what it offers."""
    pods = stage.plane.api.get(OURS)["items"]
    ready = [all(one["ready"] for one in pod["status"].get("containerStatuses") or [{"ready": False}]) for pod in pods]
    report = stage.plane.api.get(f"{REPORTS}/{NAME}").get("status") or {}
    return len(pods) == 4 and all(ready) and report.get("phase") == "Harvesting" and len(report.get("gpus") or []) == 2


def place(stage: Stage, prefix: str) -> None:
    """Pods come, all find a place, none on another's GPU, and go without a trace."""
    api = stage.plane.api
    for number in range(PLACED):
        wait_for("the pod to be let in", lambda number=number: api.post(PODS, offline_pod(f"soak-{prefix}-{number}")))
    wanted = {f"soak-{prefix}-{number}" for number in range(PLACED)}
    wait_for("all placed", lambda: wanted <= {pod["metadata"]["name"] for pod in bound_pods(api)}, PATIENCE_S)
    assert held_twice(stage) == []
    delete_soak_pods(stage)
    wait_for("nothing left", lambda: not left(stage), PATIENCE_S)


def test_faults_in_any_order_never_leave_anything_behind(ends_in_order: None) -> None:
    with cluster() as stage:
        cluster_node.load_images(stage)
        logs = LogWatch(stage.node.folder / "logs")
        logs.start()
        began = cluster_node.install(stage)
        chat = cluster_node.start_online(stage)
        cluster_node.start_offline(stage, began)
        create_nodes(stage.plane.api, NODES)
        # As GPU pools usually are: the chart's own pods keep away from nodes without a kubelet.
        taint = {"key": names.ONLINE_RESOURCE, "value": "present", "effect": "NoSchedule"}
        nodes = [f"/api/v1/nodes/{node_name(index)}" for index in range(NODES)]
        stage.plane.api.each(("PATCH", node, {"spec": {"taints": [taint]}}) for node in nodes)
        heartbeat = Heartbeat(stage.plane.api, NODES)
        heartbeat.start()
        try:
            live_through(stage, chat, logs)
        finally:
            heartbeat.stop()
            logs.stop()
        assert stage.screen.failures == []


def live_through(stage: Stage, chat: Chat, logs: LogWatch) -> None:
    faults = Faults(stage, NODES, SEED)
    for number, fault in enumerate(faults.draw(FAULTS)):
        stage.screen.say(f"{number:3d}  {wait_for(fault.__name__, fault, PATIENCE_S)}")
        assert held_twice(stage) == []

    faults.mend_reports()
    wait_for("the chart", lambda: is_settled(stage), PATIENCE_S)
    delete_soak_pods(stage)
    place(stage, "after")
    before = {pid: resident_kib(pid) for pid, _, _ in processes()}
    for number in range(5):
        place(stage, f"churn{number}")
    grown = {name: resident_kib(pid) - before[pid] for pid, _, name in processes() if pid in before}
    answered = chat.answered
    wait_for("chat answers on", lambda: chat.answered > answered, PATIENCE_S)
    logs.look()
    pods = stage.plane.api.get(OURS)["items"]
    # kube-scheduler ends itself when it loses its lease, as it does while no API server answers.
    restarted = sum(count for name, count in quiet.restarts(pods).items() if not name.endswith("/kube-scheduler"))
    stage.screen.say(f"killed {faults.killed}, restarted {restarted} (of pods that stayed), grown {grown} KiB")

    assert logs.found == []
    assert restarted <= faults.killed, list(quiet.why_restarted(pods))
    assert stage.node.pods.get("chat")["status"]["containerStatuses"][0]["restartCount"] == 0
    assert max(grown.values()) < GROWTH_KIB, grown
