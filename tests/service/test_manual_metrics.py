"""docs/metrics.md names every metric of a daemon, with the text that the daemon itself gives."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from kube_node import kube_node, registered, scenario
from prometheus_client.core import CounterMetricFamily

from valved.metrics import NodeCollector

MANUAL = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"


@scenario
async def test_no_metric_of_a_daemon_is_missing_from_the_manual_or_described_otherwise(tmp_path):
    async with kube_node(tmp_path) as node:
        await registered(node)
        status = node.world.node.status()
        managed = replace(status, memory=replace(status.memory, managed=True))
        families = list(NodeCollector(lambda: managed, node.room.metrics).collect())

    wanted = {
        f"| `{family.name}{'_total' if isinstance(family, CounterMetricFamily) else ''}` | {family.documentation} |"
        for family in families
    }
    written = {line for line in MANUAL.read_text().splitlines() if line.startswith("| `valve_")}

    assert written == wanted
