"""From the JSON of the Kubernetes API to values, refusing what cannot be used by name. Pure."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import numpy as np
from valve_scheduler.model import (
    HISTOGRAM_BINS,
    MAX_GPUS,
    ThroughputCurve,
    WorkloadProfile,
    forecast,
    history_s,
    pair_indices,
    peak_mib,
    windows_of,
)
from valve_scheduler.model.curve import FloatArray

from valve_kube import names
from valve_kube.errors import UNUSABLE, InvalidObject, in_words
from valve_kube.node_wish import ANY_NODE, NodeWish, node_wish
from valve_kube.owners import owner_uid

Object = Mapping[str, Any]
KEPT_REPORT = "nodeReport"  # key of a GPUHarvestNode whose figures were read when it arrived
_COUNTS = frozenset(str(number) for number in range(1, MAX_GPUS + 1))
_LABEL_VALUE = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")


@dataclass(frozen=True, slots=True, kw_only=True)
class PodPlace:
    """Where a pod is and which GPUs are its own, as the API server has it.

    Never refused, whatever else it says.
    """

    uid: str
    node: str
    gpu_uuids: tuple[str, ...]
    finished: bool
    namespace: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflinePod:
    """What an offline pod asks for."""

    uid: str
    namespace: str
    name: str
    owner_uid: str
    gpus: int
    sla: float
    profile: str
    base: str = ""  # of a finetuning pod: nodes that serve it come first
    wish: NodeWish = ANY_NODE  # the nodes it may use


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReport:
    """Status of one GPUHarvestNode, as rows for the arrays of the fleet."""

    node: str
    phase: str
    gpu_model: str
    full_mib: float
    uuids: tuple[str, ...]
    harvestable: tuple[bool, ...]
    idle: FloatArray  # [8] what to count on
    recent: FloatArray  # [8] idle share of the last ten minutes, NaN where they were not seen
    hour: FloatArray
    day: FloatArray  # [8] of the last day
    history_s: FloatArray  # [8] time that stands behind them; 0 where no GPU is
    histogram: FloatArray  # [8, bins]
    online_peak: FloatArray  # [8] MiB that online uses at its peaks; 0: not seen, or its policy lets jobs in anyway
    alignment: FloatArray  # [8, 8]
    observed_at_s: float  # wall clock of the node
    theta: float | None = None  # alignment threshold of the node's policy
    epoch: int = 0  # rises with each report
    written_at_s: float | None = None  # when the report was written, by the clock of the API server


def annotation(pod: Object, key: str) -> str:
    """A pod's annotation, else the label of that name (role may be either), else empty."""
    metadata = pod.get("metadata") or {}
    found = (metadata.get("annotations") or {}).get(key) or (metadata.get("labels") or {}).get(key) or ""

    return str(found)


def names_gpus(container: Object) -> bool:
    """Whether it asks for whole GPUs by a resource that online pods use."""
    limits = (container.get("resources") or {}).get("limits") or {}
    return any(str(limits.get(resource, "0")) != "0" for resource in names.ONLINE_RESOURCES)


def asks_for_gpus(container: Object) -> bool:
    """The same, or by a claim. What is claimed is not known before the scheduler has allocated it."""
    return names_gpus(container) or bool((container.get("resources") or {}).get("claims"))


def resource_count(pod: Object, resource: str) -> int:
    """How many of an extended resource the pod takes.

    The sum of its containers, or its largest init container.
    """
    spec = pod.get("spec") or {}

    def of(container: Object) -> int:
        limits = (container.get("resources") or {}).get("limits") or {}
        try:
            return int(limits.get(resource, 0))
        except ValueError as error:
            raise InvalidObject(
                f"limit {resource} is {_short(str(limits[resource]))}, must be a whole number"
            ) from error

    running = sum(of(container) for container in spec.get("containers") or [])
    starting = max((of(container) for container in spec.get("initContainers") or []), default=0)

    return max(running, starting)


def sla_of(pod: Object) -> float:
    """The wanted share of standalone throughput; 0 when the pod states none (best effort)."""
    text = annotation(pod, names.SLA)
    if not text:
        return 0.0
    try:
        sla = float(text)
    except ValueError:
        sla = math.nan
    if not 0.0 < sla <= 1.0:
        raise InvalidObject(f"annotation {names.SLA} is {_short(text)}, must be a number in (0, 1], such as 0.30")

    return sla


def kind_of(pod: Object) -> str:
    """What kind of offline work the pod is, as its author says."""
    kind = annotation(pod, names.KIND) or names.BATCH
    if kind not in (names.BATCH, names.FINETUNE):
        raise InvalidObject(f"annotation {names.KIND} is {_short(kind)}, must be {names.BATCH} or {names.FINETUNE}")

    return kind


def base_of(pod: Object) -> str:
    """The model that a finetuning pod trains; empty when it names none. Online pods carry it as a label."""
    kind, base = kind_of(pod), annotation(pod, names.BASE)
    if base and kind != names.FINETUNE:
        raise InvalidObject(f"annotation {names.BASE} is for pods with {names.KIND}: {names.FINETUNE}")
    if base and not _LABEL_VALUE.fullmatch(base):
        raise InvalidObject(f"annotation {names.BASE} is {_short(base)}, which no label of a service can be")

    return base


def profile_of(pod: Object) -> str:
    """Name of the OfflineProfile; empty when the pod names none."""
    name = annotation(pod, names.PROFILE)
    if name and not _NAME.fullmatch(name):
        raise InvalidObject(f"annotation {names.PROFILE} is {_short(name)}, which is no name of an object")

    return name


def _short(text: str) -> str:
    """Of what a tenant wrote: it may be a quarter of a megabyte, and events, logs and answers hold it."""
    return repr(text if len(text) <= 40 else f"{text[:40]}...")


def gpus_wanted(pod: Object) -> int:
    count = resource_count(pod, names.RESOURCE)
    text = annotation(pod, names.GPUS_REQUIRED) or str(count)
    if text.lstrip("0") not in _COUNTS:  # as a text: one of 5,000 digits is no number for int()
        raise InvalidObject(
            f"the pod asks for {_short(text)} harvested GPUs, must be 1 to {MAX_GPUS} of one node "
            f"(limit {names.RESOURCE} or annotation {names.GPUS_REQUIRED})"
        )
    wanted = int(text.lstrip("0"))
    if count and wanted != count:
        raise InvalidObject(
            f"annotation {names.GPUS_REQUIRED} is {_short(text)} and limit {names.RESOURCE} is {count}; quotas and "
            "slots go by the limit, leave the annotation out"
        )
    return wanted


def pod_place(pod: Object) -> PodPlace:
    metadata = pod["metadata"]
    uuids = (metadata.get("annotations") or {}).get(names.GPUS, "")

    return PodPlace(
        uid=metadata["uid"],
        node=(pod.get("spec") or {}).get("nodeName") or "",
        gpu_uuids=tuple(uuid for uuid in uuids.split(",") if uuid),
        finished=(pod.get("status") or {}).get("phase") in ("Succeeded", "Failed"),
        namespace=metadata.get("namespace", ""),
        name=metadata.get("name", ""),
    )


def followed(pod: Object) -> Object:
    """The pod itself; raises InvalidObject for one that Valve's watches do not see: its GPUs would have no owner."""
    role = (pod["metadata"].get("labels") or {}).get(names.ROLE, "")
    if role != names.OFFLINE:
        raise InvalidObject(f"label {names.ROLE} of the pod is {role!r}, must be {names.OFFLINE}")

    return pod


def started_at_s(pod: Object) -> float:
    """Wall clock of the last start of the container that has the GPUs: not the pod's, which is before its image was
    pulled and stays when the container starts anew. A pod without one has just begun."""
    text = start_text(pod)
    return seconds_of(text) if text else math.inf


def start_text(pod: Object) -> str:
    """RFC 3339 with Z, as all of an API server, so the later text is the later time."""
    status = pod.get("status") or {}
    working = {
        container.get("name")
        for container in (pod.get("spec") or {}).get("containers") or []
        if names.RESOURCE in ((container.get("resources") or {}).get("limits") or {})
    }
    running = (
        ((one.get("state") or {}).get("running") or {}).get("startedAt") or ""
        for one in status.get("containerStatuses") or []
        if one.get("name") in working
    )
    return max([status.get("startTime") or "", *running])


def created_at_s(pod: Object) -> float:
    text = pod["metadata"].get("creationTimestamp")
    return seconds_of(text) if text else -math.inf


def offline_pod(pod: Object) -> OfflinePod:
    """Read a pod that asks for harvested GPUs; raises InvalidObject for annotations that cannot be used."""
    metadata = pod["metadata"]

    return OfflinePod(
        uid=metadata["uid"],
        namespace=metadata["namespace"],
        name=metadata["name"],
        owner_uid=owner_uid(pod),
        gpus=gpus_wanted(pod),
        sla=sla_of(pod),
        profile=profile_of(pod),
        base=base_of(pod),
        wish=node_wish(pod.get("spec") or {}),
    )


def workload_profile(profile: Object) -> WorkloadProfile | None:
    """The measured part of an OfflineProfile; None until it is Ready."""
    if (profile.get("status") or {}).get("phase") != "Ready":
        return None
    spec = profile.get("spec") or {}
    try:
        points = sorted(spec.get("curve") or [], key=lambda point: float(point["freeMiB"]))
        return WorkloadProfile(
            standalone_tokens_per_s=float(spec.get("standaloneTokensPerSecond", 0.0)),
            curve=ThroughputCurve(
                free_mib=tuple(float(point["freeMiB"]) for point in points),
                tokens_per_s=tuple(float(point["tokensPerSecond"]) for point in points),
            ),
            fit_mib=float(spec.get("fitMiB", 0.0)),
            need_mib=float(spec.get("requiredMiB", 0.0)),
            deficit_cost=float(spec.get("deficitCost", 0.0)),
            gpu_model=str((spec.get("workload") or {}).get("gpuModel", "")),
        )
    except UNUSABLE as error:
        name = profile.get("metadata", {}).get("name", "?")
        raise InvalidObject(f"OfflineProfile {name}: {error}") from error


def node_report(harvest_node: Object) -> NodeReport:
    """Read a GPUHarvestNode; a report with any impossible part is refused as a whole."""
    if isinstance(kept := harvest_node.get(KEPT_REPORT), NodeReport):
        return kept
    node = harvest_node["metadata"]["name"]
    status = harvest_node.get("status") or {}
    try:
        return _node_report(node, status, harvest_node.get("spec") or {}, _written_at_s(harvest_node["metadata"]))
    except UNUSABLE as error:
        raise InvalidObject(f"GPUHarvestNode {node}: status cannot be used: {in_words(error)}") from error


def _written_at_s(metadata: Object) -> float | None:
    """When the status was written last, as the API server keeps it for each writer."""
    times = [entry["time"] for entry in metadata.get("managedFields") or [] if entry.get("subresource") == "status"]
    return max(map(seconds_of, times), default=None)


def _node_report(node: str, status: Object, spec: Object, written_at_s: float | None) -> NodeReport:
    gpus = status.get("gpus") or []
    count = len(gpus)
    if count > MAX_GPUS:
        raise ValueError(f"{count} GPUs, at most {MAX_GPUS} are handled")
    windows, history = np.full((3, MAX_GPUS), np.nan), np.zeros(MAX_GPUS)
    histogram = np.zeros((MAX_GPUS, HISTOGRAM_BINS))
    for row, gpu in enumerate(gpus):
        windows[:, row] = windows_of(gpu["idle"])
        history[row] = history_s(gpu["idle"], gpu.get("observedSeconds"), gpu.get("observedHourSeconds"))
        histogram[row] = gpu["freeMemory"]
    recent, hour, day = windows
    idle = forecast(recent, hour, day)
    totals = histogram.sum(axis=1, keepdims=True)
    if not np.isfinite(totals).all() or histogram.min() < 0 or not ((idle >= 0) & (idle <= 1)).all():
        raise ValueError("idle must be in [0, 1] and freeMemory must not be negative")
    resolved = spec.get("resolved") or {}
    slots = int(resolved.get("slotsPerGPU", 1))
    full_mib = float(status["memoryMiB"])
    peaks = _peaks(gpus, full_mib)
    return NodeReport(
        node=node,
        phase=phase_in_force(status, spec),
        gpu_model=status.get("gpuModel", ""),
        full_mib=full_mib,
        uuids=tuple(gpu["uuid"] for gpu in gpus),
        harvestable=tuple(bool(gpu.get("harvestable")) and slots > 0 for gpu in gpus),
        idle=idle,
        recent=recent,
        hour=hour,
        day=day,
        history_s=history,
        histogram=np.divide(histogram, totals, out=np.zeros_like(histogram), where=totals > 0),
        online_peak=np.zeros(MAX_GPUS) if resolved.get("allowCrowded") else peaks,
        alignment=_alignment(status.get("alignment") or [], count),
        observed_at_s=seconds_of(status["observedAt"]),
        epoch=int(status.get("epoch", 0)),
        written_at_s=written_at_s,
        theta=float(resolved["alignmentThreshold"]) if "alignmentThreshold" in resolved else None,
    )


def _peaks(gpus: Sequence[Object], full_mib: float) -> FloatArray:
    """[8]: the larger one of the last hour's and the last day's. A node of a former release reports none."""
    peaks, unseen = np.zeros(MAX_GPUS), (0.0,) * HISTOGRAM_BINS
    seen = [(gpu.get("onlineMemory") or {}).get(window, unseen) for gpu in gpus for window in ("1h", "24h")]
    if any(len(one) != HISTOGRAM_BINS for one in seen):
        raise ValueError(f"onlineMemory must be {HISTOGRAM_BINS} numbers")
    if seen:
        histograms = np.array(seen, dtype=np.float64)
        if not np.isfinite(histograms).all() or histograms.min() < 0:
            raise ValueError(f"onlineMemory must be {HISTOGRAM_BINS} numbers, none of them negative")
        peaks[: len(gpus)] = peak_mib(histograms, full_mib).reshape(-1, 2).max(axis=1)

    return peaks


def seconds_of(text: str) -> float:
    """Of a time as the API server writes it: before Python 3.11 `fromisoformat` takes no Z."""
    return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()


def mode_in_force(spec: Object) -> str:
    """What the spec of a GPUHarvestNode says; empty leaves it to the daemon's own configuration."""
    resolved = spec.get("resolved") or {}
    return "off" if resolved.get("drain") else str(spec.get("mode") or resolved.get("mode") or "")


def phase_in_force(status: Object, spec: Object) -> str:
    """The node's own word, unless its spec already forbids what the daemon has not read yet."""
    if spec.get("paused"):
        return "Paused"
    if mode_in_force(spec) in ("off", "observe") and status.get("phase") == "Harvesting":
        return "Observing"

    return str(status.get("phase", ""))


def _alignment(pairs: list[float], count: int) -> FloatArray:
    """The upper triangle by rows, (0,1), (0,2), ..., as a symmetric matrix.

    Pairs that were not reported never align.
    """
    expected = count * (count - 1) // 2
    if len(pairs) != expected:
        raise ValueError(f"{len(pairs)} alignment values for {count} GPUs, must be {expected}")
    values = np.array(pairs, dtype=np.float64)
    if not ((values >= 0) & (values <= 1)).all():
        raise ValueError("alignment values must be in [0, 1]")
    matrix = np.eye(MAX_GPUS)
    rows, columns = pair_indices(count)
    matrix[rows, columns] = values
    matrix[columns, rows] = values

    return matrix
