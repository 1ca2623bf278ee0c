"""The status of this node's GPUHarvestNode, laid out from what the room knows. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from valve_kube import names

from valved.kube.levels import MemoryLevel
from valved.kube.series import WINDOWS_S, NodeSeries
from valved.kube.ungated import UngatedFacts
from valved.model.ids import Mode
from valved.policy.guard import GpuVerdict
from valved.policy.report_rate import RateSettings, side_of

Json = dict[str, Any]
MIB = 1 << 20
PHASES = {Mode.HARVEST: "Harvesting", Mode.OBSERVE: "Observing", Mode.OFF: "Off"}
_STATUS = {True: "True", False: "False", None: "Unknown"}
MAX_PODS = 64  # as the CRD has it
MAX_NAMED = 20  # in one condition; a node has room for a few dozen GPU pods


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFacts:
    uuid: str  # GPU-...
    name: str
    total_bytes: int
    verdict: GpuVerdict


@dataclass(slots=True, kw_only=True)
class OfflineFacts:
    """What one offline pod got since its start."""

    pod_uid: str
    useful_tokens: int | None = None  # None: no engine hook counts them
    harvest_s: float = 0.0
    runnable_s: float = 0.0
    demand_s: float = 0.0
    gated_s: float = 0.0
    preemptions: int = 0
    tokens_lost: int | None = None
    levels: tuple[MemoryLevel, ...] = ()  # of a profiling run


@dataclass(frozen=True, slots=True, kw_only=True)
class LentFacts:
    """What one online pod lent, and what that cost it."""

    pod_uid: str
    namespace: str
    pod: str
    service: str  # that the pod is one of; empty while nobody told us
    lent_s: float  # GPU time that offline work ran on its GPUs
    delay_s: float
    preemptions: int
    granted_s: float = 0.0  # of its pauses, by its consent


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    kind: str
    is_true: bool | None  # None: not known yet
    reason: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    mode: Mode
    is_paused: bool
    is_draining: bool
    gpus: tuple[GpuFacts, ...]
    offline: tuple[OfflineFacts, ...]
    lent: tuple[LentFacts, ...]
    bare: tuple[str, ...]  # online containers without the shim
    resting: tuple[str, ...]  # online services beside which the breaker stops all harvesting
    profiling: tuple[str, ...]  # offline pods that are lent their memory in steps
    ungated: tuple[UngatedFacts, ...]  # offline pods that use a GPU without the shim
    drain: str  # why the cluster wants no offline work here; empty: it does not mind
    refused: tuple[str, ...]  # words of the cluster that this node cannot obey
    clock_off: str | None  # how far; empty: no more than it may be; None: nobody has compared it yet
    is_serving: bool  # registered with the kubelet, and the last reconciliation went through

    @property
    def phase(self) -> str:
        if self.is_draining:
            return "Draining"
        return "Paused" if self.is_paused else PHASES[self.mode]

    @property
    def harvestable(self) -> int:
        """GPUs on which offline work may be placed now."""
        if self.phase != "Harvesting":
            return 0
        return sum(gpu.verdict.is_harvestable for gpu in self.gpus)


def conditions_of(facts: NodeFacts) -> tuple[Condition, ...]:
    left_out = [f"{gpu.uuid}: {gpu.verdict.reason}" for gpu in facts.gpus if not gpu.verdict.is_harvestable]
    guarded = [f"{gpu.uuid}: {gpu.verdict.reason}" for gpu in facts.gpus if gpu.verdict.is_guarded]
    ungated = [one.name for one in facts.ungated]
    drain = [facts.drain] if facts.drain else []
    named = (
        ("Guarded", guarded, "UnseenUse", "AllHeard", "every process that uses a GPU runs with the shim"),
        (
            "OnlineUninjected",
            facts.bare,
            "RunsWithoutShim",
            "AllInjected",
            "every online container with GPUs has the shim",
        ),
        ("OfflineUngated", ungated, "RunsWithoutShim", "AllGated", "every offline pod on a GPU can be stopped"),
        (
            "BreakerOpen",
            facts.resting,
            "DelayedTooMuch",
            "WithinBudget",
            "no online service is delayed beyond its budget",
        ),
        ("Profiling", facts.profiling, "MemoryInSteps", "NothingToMeasure", "no offline pod is measured"),
        ("Draining", drain, "Asked", "NotAsked", "offline pods may stay"),
        (
            "PolicyRefused",
            facts.refused,
            "NotPossibleHere",
            "Obeyed",
            "the settings of the HarvestPolicies are in force",
        ),
    )
    return (
        Condition(
            kind="Ready",
            is_true=facts.is_serving,
            reason="Serving" if facts.is_serving else "NoKubelet",
            message="registered with the kubelet" if facts.is_serving else "not registered with the kubelet",
        ),
        Condition(
            kind="AllHarvestable",
            is_true=not left_out,
            reason="AsExpected" if not left_out else "LeftOut",
            message=_some(left_out) or "every GPU can be harvested",
        ),
        *(_while_any(*one) for one in named),
        _clock(facts.clock_off),
    )


def _while_any(kind: str, found: Sequence[str], reason: str, other: str, message: str) -> Condition:
    """True while something is found; `other` and `message` are the reason and the words while nothing is."""
    return Condition(kind=kind, is_true=bool(found), reason=reason if found else other, message=_some(found) or message)


def _clock(off: str | None) -> Condition:
    reason, message = "ClockRight", "the clock of the node agrees with the API server's"
    if off is None:
        reason, message = "NotCompared", "no report was stored yet, so the clocks were not compared"
    elif off:
        reason, message = "ClockOff", off
    return Condition(kind="ClockSkew", is_true=None if off is None else bool(off), reason=reason, message=message)


def standing(
    facts: NodeFacts, series: NodeSeries, before: tuple[object, ...], settings: RateSettings
) -> tuple[object, ...]:
    """What placement decisions depend on: a change of it is written early."""
    old = dict(before[2]) if len(before) == 3 else {}  # type: ignore[call-overload]
    sides = tuple(
        (gpu.uuid, side_of(series.idle(index, 600), old.get(gpu.uuid), settings))
        for index, gpu in enumerate(facts.gpus)
    )
    verdicts = tuple((gpu.verdict.reason, gpu.verdict.risk) for gpu in facts.gpus)
    ungated = tuple(one.pod_uid for one in facts.ungated)
    return facts.phase, (verdicts, facts.resting, ungated, facts.refused), sides


def build(facts: NodeFacts, series: NodeSeries, epoch: int, now: str, since: Mapping[str, str]) -> Json:
    """`now` and `since` (last change per condition) are RFC 3339."""
    total = max((gpu.total_bytes for gpu in facts.gpus), default=0)
    return {
        "phase": facts.phase,
        "mode": facts.mode.value,
        "gpuModel": facts.gpus[0].name.removeprefix("NVIDIA ")[:64] if facts.gpus else "",
        "memoryMiB": total // MIB,
        "harvestableGPUs": facts.harvestable,
        "offlinePods": len(facts.offline),
        "epoch": epoch,
        "observedAt": now,
        "gpus": [_gpu(gpu, index, facts, series) for index, gpu in enumerate(facts.gpus)],
        "alignment": series.alignment(),
        "offline": [_offline(pod) for pod in facts.offline[:MAX_PODS]],
        "ungated": [{"podUID": one.pod_uid, "seconds": round(one.seconds, 3)} for one in facts.ungated[:MAX_PODS]],
        "services": [_lent(pod) for pod in facts.lent[:MAX_PODS]],
        "conditions": [
            {
                "type": condition.kind,
                "status": _STATUS[condition.is_true],
                "reason": condition.reason,
                "message": condition.message,
                "lastTransitionTime": since.get(condition.kind, now),
            }
            for condition in conditions_of(facts)
        ],
    }


def apply_body(node: str, status: Json) -> Json:
    """For server-side apply."""
    return {
        "apiVersion": names.API_VERSION,
        "kind": "GPUHarvestNode",
        "metadata": {"name": node},
        "status": status,
    }


def _gpu(gpu: GpuFacts, index: int, facts: NodeFacts, series: NodeSeries) -> Json:
    verdict = gpu.verdict
    is_harvestable = verdict.is_harvestable and facts.harvestable > 0
    entry: Json = {
        "uuid": gpu.uuid,
        "harvestable": is_harvestable,
        "slots": 1 if is_harvestable else 0,
        "shim": verdict.is_heard,
        "online": list(verdict.online),
        "idle": dict(series.windows(index)),
        "observedSeconds": round(series.seen_s(index, WINDOWS_S["24h"])),
        "observedHourSeconds": round(series.seen_s(index, WINDOWS_S["1h"])),
        "freeMemory": series.histogram(index),
    }
    if online := series.online_memory(index):
        entry["onlineMemory"] = online
    if verdict.reason:
        entry["reason"] = verdict.reason[:256]
    if verdict.is_guarded:
        entry["guarded"] = True
    if verdict.risk:
        entry["onlineRisk"] = verdict.risk[:256]
    return entry


def _offline(pod: OfflineFacts) -> Json:
    entry: Json = {
        "podUID": pod.pod_uid,
        "harvestSeconds": round(pod.harvest_s, 3),
        "runnableSeconds": round(pod.runnable_s, 3),
        "demandSeconds": round(pod.demand_s, 3),
        "gatedSeconds": round(pod.gated_s, 3),
        "preemptions": pod.preemptions,
    }
    if pod.useful_tokens is not None:
        entry["usefulTokens"] = pod.useful_tokens
    if pod.tokens_lost is not None:
        entry["tokensLost"] = pod.tokens_lost
    if pod.levels:
        entry["levels"] = [
            {
                "limitMiB": round(level.limit_mib),
                "usefulTokens": level.tokens,
                "runnableSeconds": round(level.runnable_s, 3),
            }
            for level in pod.levels
        ]
    return entry


def _lent(pod: LentFacts) -> Json:
    return {
        "podUID": pod.pod_uid,
        "namespace": pod.namespace,
        "pod": pod.pod,
        "service": pod.service,
        "lentSeconds": round(pod.lent_s, 3),
        "delaySeconds": round(pod.delay_s, 6),
        "grantedSeconds": round(pod.granted_s, 3),
        "preemptions": pod.preemptions,
    }


def _some(items: Sequence[str]) -> str:
    more = len(items) - MAX_NAMED
    return "; ".join(items[:MAX_NAMED]) + (f"; and {more} more" if more > 0 else "")
