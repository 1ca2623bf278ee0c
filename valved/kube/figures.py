"""The room's own metrics, beside those of the node's status."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from prometheus_client.core import Metric

from valved.kube.apiserver import ApiServer
from valved.kube.deviceplugin import Plugin, Slots
from valved.kube.nri import Injector
from valved.kube.observer import OnlineUse
from valved.machine.ports import GpuInfo
from valved.metrics import counter, gauge
from valved.model.ids import GpuIndex
from valved.policy.guard import GpuVerdict


def families(
    verdicts: tuple[GpuVerdict, ...],
    slots: Slots,
    plugin: Plugin,
    injector: Injector,
    api: ApiServer,
    resting: Sequence[str],
) -> Iterator[Metric]:
    guarded = {(str(one.gpu),): float(one.is_guarded) for one in verdicts}
    yield gauge("valve_gpu_guarded", "1 while a process unknown to valved may use the GPU", guarded, ["gpu"])
    offered = {(str(one.gpu),): float(one.is_harvestable) for one in verdicts}
    yield gauge("valve_gpu_harvestable", "1 while offline work may be placed there", offered, ["gpu"])
    healthy = sum(slots.health.values()) if plugin.is_registered else 0
    yield gauge("valve_slots_healthy", "Slots that the kubelet may hand out", {(): healthy})
    skipped = {(f"skipped-{why}",): count for why, count in injector.seen.skipped.items()}
    created = {("injected",): injector.seen.injected, **skipped}
    yield counter("valve_nri_containers", "Online containers created, by result", created, ["result"])
    bare = len(injector.bare())
    yield gauge("valve_online_uninjected", "Online containers that run without the shim", {(): bare})
    text = "Online services that Valve delayed beyond their budget, so that for now no offline work runs beside them"
    yield gauge("valve_breakers_open", text, {(): len(resting)})
    reports = {("written",): api.written, ("failed",): api.failed}
    yield counter("valve_reports", "Reports of the node, by outcome", reports, ["result"])


def leaving(leaving_s: float, ungated_s: float) -> Iterator[Metric]:
    text = "Time for which offline processes that must leave this node have stayed; they are stopped meanwhile"
    yield gauge("valve_offline_leaving_seconds", text, {(): leaving_s})
    text = "Time in which an offline pod used a GPU without the shim, so that valved could not stop it"
    yield counter("valve_offline_ungated_seconds", text, {(): ungated_s})


def without_offline(
    gpus: Iterable[GpuInfo], used_bytes: Mapping[GpuIndex, int], pods: Iterable[OnlineUse]
) -> Iterator[Metric]:
    """What DCGM would show if no offline work ran: for autoscalers, and for alerts on memory."""
    uuids = {gpu.index: gpu.uuid_text for gpu in gpus}
    card = {(str(gpu), uuids[gpu]): used for gpu, used in used_bytes.items()}
    text = "GPU memory in use, less that of offline processes"
    yield gauge("valve_gpu_online_memory_bytes", text, card, ["gpu", "uuid"])
    uses, labels = list(pods), ["namespace", "pod"]
    busy = {(use.namespace, use.pod): use.busy_s for use in uses}
    text = "Time in which the online pod held its GPUs, cooldown included"
    yield counter("valve_online_busy_seconds", text, busy, labels)
    memory = {
        (use.namespace, use.pod, str(gpu), uuids[gpu]): held for use in uses for gpu, held in use.bytes_on.items()
    }
    text = "GPU memory of the online pod's own processes"
    yield gauge("valve_online_memory_bytes", text, memory, [*labels, "gpu", "uuid"])
