"""Every query of the dashboard and every alert, asked of a real Prometheus that scrapes what really runs."""

import itertools
import json
import shutil
import socket
import subprocess
import urllib.parse
import urllib.request
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from cluster_helm import CHART, Helm
from cluster_pods import PODS, submit, wait_bound
from goldens import dashboard
from node_rig import Offline, Online
from valve_kube import names
from valve_tools.cluster.api import ApiRefused
from valve_tools.cluster.controlplane import ControlPlane, free_port, wait_for
from valve_tools.cluster.fleet import Heartbeat, create_nodes, delete_nodes, offline_pod
from valve_tools.cluster.webhook import start_webhook
from valve_tools.demo.node import EmulatedNode
from valve_tools.emulator.node import Options

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not shutil.which("prometheus"), reason="no prometheus: apt-get install prometheus"),
]

Json = dict[str, Any]
DASHBOARD = dashboard()
RUNTIMES = "/apis/node.k8s.io/v1/runtimeclasses"
RULES = CHART / "files/rules.yaml"
# Averages over five minutes need two scrapes within them, so the shortest of intervals gives data at once.
EVERY = "1s"
ROOM = 8  # pods, of 24 GPUs
# A daemon in a cluster has these, and the one here is in none. tests/service/test_kube_*.py see them.
IN_CLUSTERS = ("valve_gpu_guarded", "valve_online_uninjected", "valve_breakers_open")


# Known only where an engine's hook tells of its steps.
OF_ENGINES = "valve_service_grant_worth_points"


def queries() -> Iterator[tuple[str, str]]:
    for panel in DASHBOARD["panels"]:
        for number, target in enumerate(panel["targets"]):
            if any(name in target["expr"] for name in (*IN_CLUSTERS, OF_ENGINES)):
                continue
            yield f"{panel['title']} {number}", target["expr"]


class Prometheus:
    """Scrapes the probes of each process under the labels that the chart's PodMonitor gives."""

    online: Online

    def __init__(self, folder: Path, targets: list[int]) -> None:
        self._port = free_port()
        labels = {"node": socket.gethostname()}
        static = [{"targets": [f"127.0.0.1:{port}" for port in targets], "labels": labels}]
        scrape = {"job_name": "valve", "scrape_interval": EVERY, "scrape_timeout": EVERY, "static_configs": static}
        evaluated = {"scrape_interval": EVERY, "evaluation_interval": EVERY}
        configuration = {"global": evaluated, "rule_files": [str(RULES)], "scrape_configs": [scrape]}
        file = folder / "prometheus.yml"
        file.write_text(yaml.safe_dump(configuration))
        flags = [f"--config.file={file}", f"--storage.tsdb.path={folder}/data"]
        with (folder / "prometheus.log").open("wb") as log:
            self.process = subprocess.Popen(
                ["prometheus", *flags, f"--web.listen-address=127.0.0.1:{self._port}"], stdout=log, stderr=log
            )

    def ask(self, what: str, **query: str) -> Json:
        url = f"http://127.0.0.1:{self._port}/api/v1/{what}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(url) as answer:
            found: Json = json.load(answer)["data"]

        return found

    def figures(self, query: str) -> list[str]:
        """Values of a query that are numbers."""
        found = [row["value"][1] for row in self.ask("query", query=query)["result"]]
        return [value for value in found if value != "NaN"]


@pytest.fixture(scope="module")
def prometheus(
    control_plane: ControlPlane, helm: Helm, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Prometheus]:
    """A node that harvests on the emulated GPU, and the scheduler, controller and webhook of a small fleet."""
    helm.install()
    runtime = {"apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass", "metadata": {"name": "nvidia"}}
    control_plane.api.post(RUNTIMES, runtime | {"handler": "nvidia"})
    create_nodes(control_plane.api, 3)
    heartbeat = Heartbeat(control_plane.api, 3)
    heartbeat.start()
    metrics = free_port()
    folder = tmp_path_factory.mktemp("node")
    config = f"metrics_port = {metrics}\nhang_ms = 10000.0"  # a busy machine is no driver that hangs
    with EmulatedNode(folder, options=Options(gpus=1), mode="harvest", config=config) as node:
        node.start_valved()
        online = begin_work(node)
        port, extender = control_plane.start_extender()
        wait_for("the extender", lambda: urllib.request.urlopen(f"http://127.0.0.1:{extender}/readyz"))
        control_plane.start_scheduler(port)
        webhook, controller = start_webhook(control_plane), control_plane.start_controller("--namespace=valve-system")
        started = Prometheus(tmp_path_factory.mktemp("prometheus"), [metrics, extender, webhook, controller])
        try:
            place_and_refuse(control_plane)
            started.online = online
            yield started
        finally:
            started.process.terminate()
            started.process.wait(30)
            for name in ("controller", "webhook", "kube-scheduler", "extender"):
                control_plane.kill(name)
            heartbeat.stop()
            delete_nodes(control_plane.api)
            control_plane.api.delete(f"{RUNTIMES}/nvidia")
            helm.uninstall()


def begin_work(node: EmulatedNode) -> Online:
    """One preemption, so that latencies and delays exist."""
    offline, online = Offline(node, "batch"), Online(node, "chat")
    online.wait_ready()
    offline.wait_running()
    online.launch(us=200)
    offline.wait_stopped()
    offline.wait_running()

    return online


def place_and_refuse(plane: ControlPlane) -> None:
    def admitted() -> bool:
        submit(plane.api, 1)
        return True

    wait_for("the webhook", admitted)
    wait_bound(plane.api, 1)
    accounts = f"/apis/{names.API_VERSION}/namespaces/default/harvestaccounts"
    try:
        account = {"apiVersion": names.API_VERSION, "kind": "HarvestAccount", "metadata": {"name": "usage"}}
        plane.api.post(accounts, account)
    except ApiRefused as refused:
        if refused.status != 409:  # accounts outlive pods, and tests
            raise
    figures = {"harvestSeconds": 60.0, "savedSeconds": 30.0}
    plane.api.patch(f"{accounts}/usage/status", {"status": {"offline": figures}})
    plane.api.post(PODS, offline_pod("wishful", sla="0.9", profile="missing"))
    with pytest.raises(ApiRefused):
        plane.api.post(PODS, offline_pod("wrong", sla="2"))


@pytest.mark.parametrize(("title", "query"), list(queries()), ids=[title for title, _ in queries()])
def test_a_panel_of_the_dashboard_has_data(
    control_plane: ControlPlane, prometheus: Prometheus, title: str, query: str
) -> None:
    numbers = itertools.count()
    waiting: deque[str] = deque()

    def has_data() -> list[str]:
        # What is averaged over time needs something to happen meanwhile: a stop, and a pod to be placed. Older pods
        # make room: the scheduler asks nobody about a pod that fits on no node.
        prometheus.online.launch(us=200)
        waiting.append(f"more-{next(numbers)}")
        control_plane.api.post(PODS, offline_pod(waiting[-1]))
        if len(waiting) > ROOM:
            control_plane.api.delete(f"{PODS}/{waiting.popleft()}", {"gracePeriodSeconds": 0})
        return prometheus.figures(query)

    assert wait_for(title, has_data, 60)


def test_every_alert_is_evaluated_without_an_error_and_none_fires_on_a_sound_fleet(prometheus: Prometheus) -> None:
    def evaluated() -> list[Json]:
        rules = [rule for group in prometheus.ask("rules")["groups"] for rule in group["rules"]]
        return rules if rules and all(rule["health"] != "unknown" for rule in rules) else []

    rules = wait_for("all rules", evaluated)

    assert {rule["health"] for rule in rules} == {"ok"}
    assert [rule["name"] for rule in rules if rule["state"] == "firing"] == []


def test_every_process_is_scraped(prometheus: Prometheus) -> None:
    assert wait_for("all targets", lambda: prometheus.figures("up") == ["1"] * 4)
