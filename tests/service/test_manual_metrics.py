"""docs/metrics.md names every metric of a process of Valve, with the text that the process itself gives."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from kube_node import kube_node, registered, scenario
from prometheus_client.core import Metric
from valve_router.advice import Advice
from valve_router.counts import Counts
from valve_router.replicas import Replicas
from valve_router.server import RouterCollector
from valve_router.settings import RouterSettings
from valve_scheduler import metrics

from valved.metrics import NodeCollector

DOCS = Path(__file__).resolve().parents[2] / "docs"
NODE, CLUSTER, ROUTER = re.fullmatch(
    r"(.*)\n## Scheduler, controller and webhook\n(.*)\n## The router\n(.*)", (DOCS / "metrics.md").read_text(), re.S
).groups()


def rows(families: Iterable[Metric]) -> set[str]:
    return {f"| `{one.name}{'_total' if one.type == 'counter' else ''}` | {one.documentation} |" for one in families}


def written(part: str) -> set[str]:
    return {line for line in part.splitlines() if line.startswith("| `valve_")}


@scenario
async def test_no_metric_of_a_daemon_is_missing_from_the_manual_or_described_otherwise(tmp_path):
    async with kube_node(tmp_path) as node:
        await registered(node)
        status = node.world.node.status()
        managed = replace(status, memory=replace(status.memory, managed=True))
        families = list(NodeCollector(lambda: managed, node.room.metrics).collect())

    assert written(NODE) == rows(families)


def test_no_metric_of_the_cluster_is_missing_from_the_manual_or_described_otherwise():
    assert written(CLUSTER) == rows(metrics.REGISTRY.collect())


def test_no_metric_of_the_router_is_missing_from_the_manual_or_described_otherwise():
    settings = RouterSettings(replicas=("http://127.0.0.1:1",))
    replicas = Replicas(settings, lambda: 0.0)
    advice = Advice(settings, replicas, lambda: 0.0)
    advice.look()

    assert written(ROUTER) == rows(RouterCollector(replicas, Counts(), advice).collect())


def test_no_manual_names_a_metric_that_no_process_has():
    """Packages, and the two functions of the hook that programs of their own may call, are named alike."""
    known = {row.split("`")[1] for row in written(NODE + CLUSTER + ROUTER)}
    others = {"valve_hook", "valve_kv", "valve_router", "valve_scheduler", "valve_tools", "valve_tune"}
    others |= {"valve_kv_begin", "valve_kv_end"}
    pages = sorted(DOCS.glob("*.md"))
    named = {(page.name, one) for page in pages for one in re.findall(r"\bvalve_[a-z_]+[a-z]", page.read_text())}

    assert {one for _, one in named} >= known
    assert sorted(pair for pair in named if pair[1] not in known | others) == []
