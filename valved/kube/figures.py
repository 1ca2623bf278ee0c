"""The room's own metrics, beside those of the node's status."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from valved.kube.apiserver import ApiServer
from valved.kube.deviceplugin import Plugin, Slots
from valved.kube.nri import Injector
from valved.kube.observer import OnlineUse
from valved.machine.ports import GpuInfo
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
    guarded = GaugeMetricFamily(
        "valve_gpu_guarded", "1 while a process unknown to valved may use the GPU", labels=["gpu"]
    )
    offered = GaugeMetricFamily("valve_gpu_harvestable", "1 while offline work may be placed there", labels=["gpu"])
    for verdict in verdicts:
        guarded.add_metric([str(verdict.gpu)], float(verdict.is_guarded))
        offered.add_metric([str(verdict.gpu)], float(verdict.is_harvestable))
    yield guarded
    yield offered
    healthy = sum(slots.health.values()) if plugin.is_registered else 0
    yield GaugeMetricFamily("valve_slots_healthy", "Slots that the kubelet may hand out", value=healthy)
    seen = injector.seen
    created = CounterMetricFamily("valve_nri_containers", "Online containers created, by result", labels=["result"])
    for result, count in {
        "injected": seen.injected,
        **{f"skipped-{why}": n for why, n in seen.skipped.items()},
    }.items():
        created.add_metric([result], float(count))
    yield created
    bare = len(injector.bare())
    yield GaugeMetricFamily("valve_online_uninjected", "Online containers that run without the shim", value=bare)
    text = "Online services that Valve delayed beyond their budget, so that for now no offline work runs beside them"
    yield GaugeMetricFamily("valve_breakers_open", text, value=len(resting))
    reports = CounterMetricFamily("valve_reports", "Reports of the node, by outcome", labels=["result"])
    reports.add_metric(["written"], float(api.written))
    reports.add_metric(["failed"], float(api.failed))
    yield reports


def leaving(leaving_s: float, ungated_s: float) -> Iterator[Metric]:
    text = "Time for which offline processes that must leave this node have stayed; they are stopped meanwhile"
    yield GaugeMetricFamily("valve_offline_leaving_seconds", text, value=leaving_s)
    text = "Time in which an offline pod used a GPU without the shim, so that valved could not stop it"
    yield CounterMetricFamily("valve_offline_ungated_seconds", text, value=ungated_s)


def without_offline(
    gpus: Iterable[GpuInfo], used_bytes: Mapping[GpuIndex, int], pods: Iterable[OnlineUse]
) -> Iterator[Metric]:
    """What DCGM would show if no offline work ran: for autoscalers, and for alerts on memory."""
    uuids = {gpu.index: gpu.uuid_text for gpu in gpus}
    card = GaugeMetricFamily(
        "valve_gpu_online_memory_bytes",
        "GPU memory in use, less that of offline processes",
        labels=["gpu", "uuid"],
    )
    for gpu, used in used_bytes.items():
        card.add_metric([str(gpu), uuids[gpu]], float(used))
    labels = ["namespace", "pod"]
    busy = CounterMetricFamily(
        "valve_online_busy_seconds", "Time in which the online pod held its GPUs, cooldown included", labels=labels
    )
    memory = GaugeMetricFamily(
        "valve_online_memory_bytes", "GPU memory of the online pod's own processes", labels=[*labels, "gpu", "uuid"]
    )
    for use in pods:
        busy.add_metric([use.namespace, use.pod], use.busy_s)
        for gpu, held in use.bytes_on.items():
            memory.add_metric([use.namespace, use.pod, str(gpu), uuids[gpu]], float(held))
    yield from (card, busy, memory)
