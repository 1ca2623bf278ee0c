"""`valve cluster`: what the fleet offers, and why a pod waits. Reads the API server once, decides nothing."""

import argparse
import asyncio
import contextlib
import json
import os
import sys
import time
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from valve_scheduler import names
from valve_scheduler.errors import InvalidObject, SchedulerError
from valve_scheduler.explain import Explanation, explain
from valve_scheduler.kube.access import find
from valve_scheduler.kube.client import Json, KubeClient
from valve_scheduler.objects import node_report
from valve_scheduler.placement import PlacementSettings
from valve_scheduler.state import ClusterState
from valve_scheduler.views import nodes_view, pods_view, profiles_view, workloads_view

OK, FAILED = 0, 1


def main(argv: list[str]) -> int:
    options = _parser().parse_args(argv)
    try:
        shown = asyncio.run(_show(options))
    except SchedulerError as error:
        print(f"valve cluster: {error}", file=sys.stderr)
        return FAILED
    if options.json:
        print(json.dumps(shown))

    return OK


async def _show(options: argparse.Namespace) -> Json:
    with contextlib.closing(KubeClient(find(dict(os.environ), options.kubeconfig))) as client:
        shown: Json = await _SHOW[options.command](client, options)

    return shown


def _parser() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--kubeconfig", help="default: the service account, else your own")
    common.add_argument("--json", action="store_true", help="one JSON document")
    parser = argparse.ArgumentParser(prog="valve cluster", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    told = "what each node offers, what runs on it, what owners were promised and got"
    commands.add_parser("status", parents=[common], help=told)
    why = commands.add_parser("explain", parents=[common], help="why a pod is where it is, or nowhere")
    why.add_argument("pod", metavar="[NAMESPACE/]POD")

    return parser


async def _status(client: KubeClient, options: argparse.Namespace) -> Json:
    now_s = time.time()
    nodes, _ = await client.list(f"{names.API_PATH}/gpuharvestnodes")
    workloads, _ = await client.list(f"{names.API_PATH}/offlineworkloads")
    shown = {"nodes": [_node_row(node, now_s) for node in nodes], "workloads": list(map(_workload_row, workloads))}
    if not options.json:
        for title, rows in shown.items():
            _print_table(title, rows)

    return shown


def _node_row(node: Json, now_s: float) -> Json:
    status = node.get("status") or {}
    gpus = status.get("gpus") or []
    hours = [gpu["idle"].get("1h", gpu["idle"].get("10m", 0.0)) for gpu in gpus]
    try:
        age_s: float | None = round(now_s - node_report(node).observed_at_s, 1)
    except InvalidObject:
        age_s = None

    return {
        "node": node["metadata"]["name"],
        "phase": status.get("phase", ""),
        "gpu": status.get("gpuModel", ""),
        "harvestable": sum(bool(gpu.get("harvestable")) for gpu in gpus),
        "idle": round(sum(hours) / len(hours), 3) if hours else 0.0,
        "offline": len(status.get("offline") or []),
        "report_age_s": age_s,
    }


def _workload_row(workload: Json) -> Json:
    status = workload.get("status") or {}
    conditions = {c["type"]: c for c in status.get("conditions") or []}

    return {
        "owner": f"{workload['metadata']['namespace']}/{workload['spec'].get('ownerName', '')}",
        "sla": workload["spec"].get("sla", 0.0),
        "achieved": status.get("achieved"),
        "evictions": status.get("evictions", 0),
        "why": conditions.get("SLAMet", {}).get("message", ""),
    }


async def _explain(client: KubeClient, options: argparse.Namespace) -> Json:
    namespace, _, name = options.pod.rpartition("/")
    pod = await client.request("GET", f"/api/v1/namespaces/{namespace or 'default'}/pods/{name}")
    found = explain(await _cluster(client), pod, time.time())
    if not options.json:
        _print_explanation(found)

    return asdict(found)


async def _cluster(client: KubeClient) -> ClusterState:
    """The extender's state, from one list of each kind."""
    state = ClusterState(PlacementSettings())
    views = [
        nodes_view(client, state, time.time),
        pods_view(client, state),
        profiles_view(client, state),
        workloads_view(client, state),
    ]
    for view in views:
        items, _ = await client.list(view.path, view.query)
        view.sink.replace(items)

    return state


def _print_explanation(found: Explanation) -> None:
    console = Console(highlight=False)
    console.print(f"[bold]{found.pod}[/] is {found.state}" + (f" on {found.node}" if found.node else ""))
    if found.gpus:
        console.print(f"  GPUs {', '.join(found.gpus)}; predicted share of standalone {found.predicted or 'unknown'}")
    for node, share in found.candidates:
        console.print(f"  {share:5.2f}  {node}")
    for refusal in found.refusals:
        console.print(f"  {refusal.nodes:5d}  {refusal.text}, e.g. {', '.join(refusal.examples)}")
    if found.advice:
        console.print(f"  {found.advice}")


def _print_table(title: str, rows: list[Json]) -> None:
    table = Table(title=title)
    columns = list(rows[0]) if rows else ["none"]
    for column in columns:
        table.add_column(column)
    for row in rows:
        table.add_row(*("" if row[column] is None else str(row[column]) for column in columns))
    Console().print(table)


_SHOW: dict[str, Any] = {"status": _status, "explain": _explain}
