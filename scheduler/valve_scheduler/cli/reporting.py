"""`valve cluster report`: asks Prometheus for a week and the API server for pools and pods, and writes one page."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path

from valve_kube import names
from valve_kube.client import Json, KubeClient
from valve_kube.errors import InvalidObject, SchedulerError
from valve_kube.objects import Object, annotation, names_gpus, node_report
from valve_kube.options import option
from valve_kube.owners import owner_name

from valve_scheduler.report import page, prometheus
from valve_scheduler.report.worth import Candidate, Findings, NodeAlignment, by_pool, price

UNITS_S = {"h": 3600, "d": 86400, "w": 604800}
POOL_LABELS = (
    "cloud.google.com/gke-nodepool",
    "eks.amazonaws.com/nodegroup",
    "kubernetes.azure.com/agentpool",
    "karpenter.sh/nodepool",
    "pool",
)
PROMISED_STOP_S = 0.001  # where no node has harvested yet: what the product promises at p99
MOST_PRICES = 100


def add_options(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--prometheus",
        metavar="URL",
        default=os.environ.get("VALVE_PROMETHEUS", ""),
        help="The URL of the Prometheus to read. Default: VALVE_PROMETHEUS of the environment.",
    )
    option(command, "--since", "7d", "The time to look back, such as 12h, 7d or 2w.", metavar="TIME")
    option(
        command,
        "--sla",
        "0.2,0.4,0.6",
        "The SLA levels to judge by, as shares of a job's speed alone.",
        metavar="S,S,...",
    )
    command.add_argument(
        "--pool-label", default="", help="The node label that names a node's pool. Default: the usual ones."
    )
    command.add_argument(
        "--out", type=Path, metavar="FILE", help="Write the page to this file, as HTML. Default: print it."
    )


async def report(client: KubeClient, options: argparse.Namespace) -> Json:
    if not options.prometheus:
        raise SchedulerError(
            "no Prometheus: give its URL by --prometheus or VALVE_PROMETHEUS (nodes themselves keep one day: "
            "`valve cluster status`)"
        )
    source = prometheus.Prometheus(url=options.prometheus, token=os.environ.get("VALVE_PROMETHEUS_TOKEN", ""))
    since_s, slas = seconds_of(options.since), levels_of(options.sla)
    end_s = int(time.time()) // prometheus.HOUR_S * prometheus.HOUR_S
    begin_s = end_s - since_s + prometheus.HOUR_S  # the value of an hour stands at its end
    nodes, _ = await client.list("/api/v1/nodes")
    pods, _ = await client.list("/api/v1/pods")
    reports, _ = await client.list(f"{names.API_PATH}/gpuharvestnodes")
    stop_s = prometheus.stop_seconds(source, since_s, end_s)
    prices = [price(one, stop_s or PROMISED_STOP_S) for one in prometheus.services(source, since_s, end_s)]
    found = Findings(
        source=f"hours of {options.prometheus}",
        hours=since_s // prometheus.HOUR_S,
        stop_ms=(stop_s or PROMISED_STOP_S) * 1000,
        stop_source="p99 of the stops measured on nodes that harvest"
        if stop_s
        else "the promised p99; none was measured",
        pools=by_pool(
            prometheus.gpu_hours(source, begin_s, end_s),
            pools_of(nodes, reports, options.pool_label),
            slas,
            dict(alignments_of(reports)),
        ),
        prices=tuple(sorted(prices, key=lambda one: -one.share)[:MOST_PRICES]),
        candidates=tuple(candidates(pods)),
        uninjected=prometheus.uninjected(source, end_s),
    )
    if options.out is not None:
        options.out.write_text(page.html(found), encoding="utf-8")
    if not options.json:
        print(page.headline(found))
    return asdict(found)


def seconds_of(text: str) -> int:
    matched = re.fullmatch(r"([1-9][0-9]{0,3})([hdw])", text)
    if matched is None:
        raise SchedulerError(f"--since is {text!r}, must be a number with h, d or w, such as 7d")
    return int(matched[1]) * UNITS_S[matched[2]]


def levels_of(text: str) -> tuple[float, ...]:
    try:
        levels = tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise SchedulerError(f"--sla is {text!r}, must be numbers separated by commas, such as 0.2,0.4") from error
    if not all(0.0 < level <= 1.0 for level in levels):
        raise SchedulerError(f"--sla is {text!r}, each must be in (0, 1]")
    return levels


def pools_of(nodes: Iterable[Object], reports: Iterable[Object], label: str) -> dict[str, str]:
    """The pool of each node: by its label, else by the model of its GPUs."""
    pools = {one["metadata"]["name"]: str((one.get("status") or {}).get("gpuModel", "")) or "other" for one in reports}
    for node in nodes:
        labels = node["metadata"].get("labels") or {}
        found = next((labels[key] for key in ((label,) if label else POOL_LABELS) if key in labels), "")
        if found:
            pools[node["metadata"]["name"]] = found
    return pools


def alignments_of(reports: Iterable[Object]) -> Iterator[tuple[str, NodeAlignment]]:
    """Of the nodes whose report can be read."""
    for one in reports:
        with contextlib.suppress(InvalidObject):
            found = node_report(one)
            yield found.node, NodeAlignment(uuids=found.uuids, pairs=found.alignment)


def candidates(pods: Iterable[Object]) -> Iterator[Candidate]:
    """Owners of pods with whole GPUs that end by themselves (Jobs), and of pods that wait for GPUs."""
    counts: dict[tuple[str, str, str], int] = {}
    for pod in pods:
        metadata, phase = pod["metadata"], (pod.get("status") or {}).get("phase")
        containers = (pod.get("spec") or {}).get("containers") or []
        if annotation(pod, names.ROLE) or phase in ("Succeeded", "Failed") or not any(map(names_gpus, containers)):
            continue
        kinds = {owner.get("kind") for owner in metadata.get("ownerReferences") or [] if owner.get("controller")}
        why = ""
        if "Job" in kinds:
            why = "a Job on whole GPUs: it has an end and no users who wait"
        elif phase == "Pending":
            why = "waits for whole GPUs"
        if why:
            key = (metadata["namespace"], owner_name(pod), why)
            counts[key] = counts.get(key, 0) + 1
    for (namespace, owner, why), count in sorted(counts.items()):
        yield Candidate(namespace=namespace, owner=owner, why=why, pods=count)
