"""Makes the rows of figures that people see of a fleet, from the objects of the API. Pure.

What harvesting would save is what the placement model promises a job on one GPU at a time: the share of time it may run
times its memory factor, with the prior curve of a job without a measurement. Observing nodes are judged by the same
rule as harvesting ones, so the figure before the switch is the one that holds after it.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

from valve_kube import names
from valve_kube.errors import InvalidObject
from valve_kube.objects import NodeReport, Object, annotation, gpus_wanted, mode_in_force, node_report, pod_place

from valve_scheduler.controller.accounts import total_of
from valve_scheduler.model import memory_factor, memory_weights, prior_profile
from valve_scheduler.placement.state import STALE_AFTER_S

Row = dict[str, Any]


def node_row(node: Object, now_s: float) -> Row:
    """One node: what it does, what it offers, and how many whole GPUs of batch work that is."""
    status, spec = node.get("status") or {}, node.get("spec") or {}
    row: Row = {
        "node": node["metadata"]["name"],
        "mode": mode_in_force(spec) or status.get("mode") or "default",
        "phase": status.get("phase", ""),
        "gpu": status.get("gpuModel", ""),
        "gpus": len(status.get("gpus") or []),
        "harvestable": 0,
        "idle": 0.0,
        "worth_gpus": 0.0,
        "offline": len(status.get("offline") or []),
        "report_age_s": None,
        "clock": "",
    }
    try:
        report = node_report(node)
    except InvalidObject:
        return row
    # By the clock of the API server, as placement goes by: a node's own may be wrong.
    written_at_s = report.observed_at_s if report.written_at_s is None else report.written_at_s
    row["report_age_s"] = round(now_s - written_at_s, 1)
    row["clock"] = _clock(status, report.observed_at_s - written_at_s)
    count = len(report.uuids)
    row["idle"] = round(float(report.idle[:count].mean()), 3) if count else 0.0
    row["harvestable"] = sum(report.harvestable)
    if row["report_age_s"] <= STALE_AFTER_S:
        row["worth_gpus"] = round(worth_gpus(report, _usable(status)), 2)

    return row


def _clock(status: Object, ahead_s: float) -> str:
    """How far it is off, where the node has said that it is."""
    is_off = any((one["type"], one["status"]) == ("ClockSkew", "True") for one in status.get("conditions") or [])
    return f"{abs(ahead_s):.0f} s {'ahead' if ahead_s > 0 else 'behind'}" if is_off else ""


def worth_gpus(report: NodeReport, usable: Sequence[int]) -> float:
    """Whole GPUs that the idle time and free memory of these GPUs of a node amount to, for single-GPU jobs."""
    if report.full_mib <= 0:
        return 0.0
    memory = memory_factor(report.histogram, memory_weights(prior_profile(report.full_mib), report.full_mib))

    return float((report.idle * memory)[list(usable)].sum())


def _usable(status: Object) -> list[int]:
    """GPUs that may be harvested, or could be if the node did more than observe. No other reason is against them."""
    observing = status.get("phase") == "Observing"
    return [
        index
        for index, gpu in enumerate(status.get("gpus") or [])
        if gpu.get("harvestable") or (observing and not gpu.get("reason"))
    ]


def fleet_row(rows: Iterable[Row]) -> Row:
    """The sum over the nodes: one for the nodes that harvest, one for those that could."""
    rows = list(rows)
    now = [row for row in rows if row["phase"] == "Harvesting"]
    idle = [row for row in rows if row["phase"] != "Harvesting"]

    return {
        "nodes": len(rows),
        "gpus": sum(row["gpus"] for row in rows),
        "harvesting_worth_gpus": round(sum(row["worth_gpus"] for row in now), 1),
        "observed_worth_gpus": round(sum(row["worth_gpus"] for row in idle), 1),
        "phases": dict(sorted(Counter(row["phase"] or "silent" for row in rows).items())),
    }


def fleet_text(fleet: Row) -> str:
    """One sentence for the decision an operator has to make."""
    phases = ", ".join(f"{count} {phase}" for phase, count in fleet["phases"].items())
    text = f"{fleet['nodes']} nodes ({phases or 'none reports'}), {fleet['gpus']} GPUs."
    if fleet["harvesting_worth_gpus"]:
        text += f" Harvesting is worth {fleet['harvesting_worth_gpus']:.1f} GPUs now."
    if fleet["observed_worth_gpus"]:
        text += f" Nodes that do not harvest would add {fleet['observed_worth_gpus']:.1f} GPUs (mode: harvest)."

    return text


def workload_row(workload: Object) -> Row:
    status = workload.get("status") or {}
    conditions = {c["type"]: c for c in status.get("conditions") or []}

    return {
        "owner": f"{workload['metadata']['namespace']}/{workload['spec'].get('ownerName', '')}",
        "sla": workload["spec"].get("sla", 0.0),
        "achieved": status.get("achieved"),
        "evictions": status.get("evictions", 0),
        "why": conditions.get("SLAMet", {}).get("message", ""),
    }


def pod_rows(pods: Iterable[Object], nodes: Iterable[Object]) -> list[Row]:
    """Offline pods with what their nodes report of them: running ones first, by node."""
    reported = {entry["podUID"]: entry for node in nodes for entry in (node.get("status") or {}).get("offline") or []}
    rows = [_pod_row(pod, reported.get(pod["metadata"]["uid"], {})) for pod in pods if not pod_place(pod).finished]

    return sorted(rows, key=lambda row: (row["node"] == "", row["node"], row["pod"]))


def _pod_row(pod: Object, entry: Object) -> Row:
    demand_s, tokens = float(entry.get("demandSeconds", 0.0)), entry.get("usefulTokens")
    try:
        gpus: int | None = gpus_wanted(pod)
    except InvalidObject:
        gpus = None

    return {
        "pod": f"{pod['metadata']['namespace']}/{pod['metadata']['name']}",
        "node": pod_place(pod).node,
        "phase": (pod.get("status") or {}).get("phase", ""),
        "kind": annotation(pod, names.KIND) or names.BATCH,
        "gpus": gpus,
        "sla": annotation(pod, names.SLA),
        "predicted": annotation(pod, names.PREDICTED),
        "harvest_s": round(float(entry.get("harvestSeconds", 0.0)), 1),
        "tokens_per_s": round(tokens / demand_s, 1) if tokens is not None and demand_s > 0 else None,
    }


def by_namespace(accounts: Iterable[Object]) -> list[Object]:
    """One account per namespace: a large one is kept in several objects."""
    found: dict[str, list[Object]] = {}
    for account in sorted(accounts, key=lambda one: (one["metadata"]["namespace"], one["metadata"]["name"])):
        found.setdefault(account["metadata"]["namespace"], []).append(account)

    return [
        {"metadata": parts[0]["metadata"], "status": total_of(part.get("status") or {} for part in parts)}
        for parts in found.values()
    ]


def usage_rows(account: Object, by: str) -> list[Row]:
    """An account in GPU-hours, since it was opened: as a whole, or by owner or by service."""
    status = account.get("status") or {}
    opened = account["metadata"].get("creationTimestamp", "")
    whole: Row = {
        "namespace": account["metadata"]["namespace"],
        "since": datetime.fromisoformat(opened.replace("Z", "+00:00")).date().isoformat() if opened else "",
    }
    if by == "owner":
        return [whole | {"owner": part["name"] or "others"} | _got(part) for part in status.get("owners") or []]
    if by == "service":
        return [whole | {"service": part["name"] or "others"} | _lent(part) for part in status.get("services") or []]

    return [whole | _got(status.get("offline") or {}) | _lent(status.get("online") or {})]


def _got(offline: Object) -> Row:
    return {
        "harvested_gpu_h": _hours(offline, "harvestSeconds"),
        "saved_gpu_h": _hours(offline, "savedSeconds"),
        "gated_gpu_h": _hours(offline, "gatedSeconds"),
        "tokens": round(float(offline.get("usefulTokens", 0))),
        "tokens_lost": round(float(offline.get("tokensLost", 0))),
    }


def _lent(online: Object) -> Row:
    return {
        "lent_gpu_h": _hours(online, "lentSeconds"),
        "delay_s": round(float(online.get("delaySeconds", 0.0)), 3),
        "granted_h": _hours(online, "grantedSeconds"),
        "preemptions": round(float(online.get("preemptions", 0))),
    }


def _hours(part: Object, key: str) -> float:
    return round(float(part.get(key, 0.0)) / 3600.0, 3)
