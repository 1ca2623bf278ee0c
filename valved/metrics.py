"""Prometheus metrics, made from one snapshot at each scrape: nothing is counted twice or costs between scrapes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

from valved.machine.priority import gate_threads
from valved.model.ids import Mode, Role
from valved.model.states import EngineState, GpuState, HistogramState, MemoryState, NodeState, ServiceState

More = Callable[[], Iterator[Metric]] | None  # families of a room that not every node has


class NodeCollector:
    """Turns a snapshot into metric families. The descriptions are the documentation."""

    def __init__(self, look: Callable[[], NodeState], more: More = None) -> None:
        self._look = look
        self._more = more

    def collect(self) -> Iterator[Metric]:
        """The caller may let the loop do something else between two families."""
        status = self._look()
        yield from _node(status)
        yield from _cores(status.pid)
        yield from _gpus(status.gpus)
        yield from _online([service for service in status.services if service.role is Role.ONLINE])
        yield from _offline([service for service in status.services if service.role is Role.OFFLINE])
        yield from _counts(status)
        if status.memory.managed:
            yield from _memory(status.memory)
        if self._more is not None:
            yield from list(self._more())


Rows = Mapping[tuple[str, ...], float]
Row = TypeVar("Row")
Figures = dict[str, tuple[str, Callable[[Row], float]]]
"""Name of a family -> (its description, its value of one row)."""


def _maker(kind: type[GaugeMetricFamily | CounterMetricFamily]) -> Callable[..., Metric]:
    def make(name: str, text: str, rows: Rows, labels: Sequence[str] = ()) -> Metric:
        family = kind(name, text, labels=labels)
        for values, value in rows.items():
            family.add_metric(values, value)
        return family

    return make


gauge, counter = _maker(GaugeMetricFamily), _maker(CounterMetricFamily)


def of_each(
    make: Callable[..., Metric], figures: Figures[Row], rows: Mapping[tuple[str, str], Row], labels: Sequence[str]
) -> Iterator[Metric]:
    for name, (text, value) in figures.items():
        yield make(name, text, {key: value(row) for key, row in rows.items()}, labels)


def _node(status: NodeState) -> Iterator[Metric]:
    modes: dict[tuple[str, ...], float] = {(mode.value,): float(mode is status.mode) for mode in Mode}
    yield gauge("valve_mode", "1 for the mode in force: off, observe or harvest", modes, ["mode"])
    yield gauge("valve_paused", "1 while harvesting is paused on this node", {(): float(status.paused)})
    yield gauge("valve_draining", "1 while valved drains: offline work must end", {(): float(status.draining)})
    text = "Files of valved that it cannot write; while one is the state file, counters stand still"
    yield gauge("valve_unwritten_files", text, {(): float(len(status.unwritten))})
    clients: dict[tuple[str, ...], float] = {(role.name.lower(),): 0.0 for role in Role if role is not Role.NONE}
    for client in status.clients:
        clients[(client.role.name.lower(),)] += 1
    yield gauge("valve_clients", "Connected processes by role", clients, ["role"])


def _cores(pid: int) -> Iterator[Metric]:
    """No row where the kernel does not say: 0 would look like cores that are always free."""
    try:
        threads = gate_threads(pid)
    except OSError:
        threads = None
    told = threads if threads is not None and threads.runs else None
    waited: Rows = {(): told.waited_ns / 1e9} if told else {}
    text = "Time in which threads of the gate were ready to run and waited for a core"
    yield counter("valve_gate_core_wait_seconds", text, waited)
    text = "Times that a thread of the gate got a core; a stop begins with one"
    yield counter("valve_gate_core_runs", text, {(): told.runs} if told else {})


GPU_GAUGES: Figures[GpuState] = {
    "valve_gate_closed": ("1 while offline channels of the GPU are off", lambda g: float(g.gated)),
    "valve_gate_holders": ("Online services that hold the GPU", lambda g: g.holders),
    "valve_offline_channels": ("Compute channels of offline work", lambda g: g.channels),
}
GPU_COUNTERS: Figures[GpuState] = {
    "valve_harvest_seconds": (
        "Time in which offline work was there and allowed to run",
        lambda g: g.harvest_ns / 1e9,
    ),
    "valve_gated_seconds": ("Time in which offline work was there and stopped", lambda g: g.gated_ns / 1e9),
    "valve_preemptions": (
        "Times a launch of online work found offline work running and stopped it",
        lambda g: g.preemptions,
    ),
}


def _gpus(gpus: Sequence[GpuState]) -> Iterator[Metric]:
    rows = {(str(gpu.index), gpu.uuid): gpu for gpu in gpus}
    labels = ["gpu", "uuid"]
    yield from of_each(gauge, GPU_GAUGES, rows, labels)
    yield from of_each(counter, GPU_COUNTERS, rows, labels)
    latency = HistogramMetricFamily(
        "valve_preemption_latency_seconds",
        "From the first online launch to offline channels off; 99 of 100 should take less than 1 ms",
        labels=labels,
    )
    for key, gpu in rows.items():
        latency.add_metric(list(key), _buckets(gpu.preempt_latency), gpu.preempt_latency.sum_us / 1e6)
    yield latency


def _buckets(histogram: HistogramState) -> list[tuple[str, float]]:
    total, buckets = 0, []
    bounds = [*(str(bound / 1e6) for bound in histogram.bound_us), "+Inf"]
    for bound, count in zip(bounds, histogram.count, strict=True):
        total += count
        buckets.append((bound, float(total)))
    return buckets


ONLINE_GAUGES: Figures[ServiceState] = {
    "valve_service_busy": ("1 while the service holds its GPUs", lambda s: float(s.busy)),
    "valve_service_cooldown_seconds": ("The service's cooldown now", lambda s: s.cooldown_ns / 1e9),
    "valve_service_open_requests": ("Open requests, as its engines report", lambda s: s.open_requests),
    "valve_service_max_preemptions_per_request": (
        "Most preemptions that one request had; an upper bound",
        lambda s: s.max_preemptions_per_request,
    ),
}
ONLINE_COUNTERS: Figures[ServiceState] = {
    "valve_service_preemptions": (
        "Preemptions that the service's launches caused; one counts once over all of its GPUs",
        lambda s: s.preemptions,
    ),
    "valve_service_delay_seconds": (
        "Delay that Valve caused the service: from launch to channels off, summed over its preemptions",
        lambda s: s.delay_ns / 1e9,
    ),
    "valve_service_busy_seconds": (
        "Time in which the service held its GPUs and valved looked whether it was idle, cooldown included",
        lambda s: s.busy_ns / 1e9,
    ),
    "valve_service_idle_seconds": (
        "Time in which the service did not hold its GPUs: offline work could have run",
        lambda s: s.idle_ns / 1e9,
    ),
    "valve_service_grants": (
        "Pauses of the service that were given to offline work; on the rung timeslice one is a stretch of many",
        lambda s: s.granted.grants,
    ),
    "valve_service_grants_broken": ("Pauses into which the service launched", lambda s: s.granted.broken),
    "valve_service_granted_seconds": (
        "Time of the pauses that were given to offline work; it counts as held, too",
        lambda s: s.granted.granted_ns / 1e9,
    ),
}


def _online(services: Sequence[ServiceState]) -> Iterator[Metric]:
    rows = {(str(service.id), service.name): service for service in services}
    labels = ["service", "name"]
    yield from of_each(gauge, ONLINE_GAUGES, rows, labels)
    yield from of_each(counter, ONLINE_COUNTERS, rows, labels)
    worths = {key: service.granted.worth_points for key, service in rows.items()}
    yield gauge(
        "valve_service_grant_worth_points",
        "Percent of a GPU that granted time would give for each ms of tpot, at most; absent while unknown",
        {key: points for key, points in worths.items() if points is not None},
        labels,
    )
    per_request = CounterMetricFamily(
        "valve_requests_by_preemptions",
        "Requests that ended, by how often each was preempted; the aim is at most once",
        labels=[*labels, "preemptions"],
    )
    for key, service in rows.items():
        last = len(service.preemptions_per_request) - 1
        for index, count in enumerate(service.preemptions_per_request):
            per_request.add_metric([*key, f"{index}+" if index == last else str(index)], count)
    yield per_request


OFFLINE_COUNTERS: Figures[ServiceState] = {
    "valve_owner_harvest_seconds": (
        "GPU time in which the channels of the owner were allowed to run",
        lambda s: s.harvest_ns / 1e9,
    ),
    "valve_owner_useful_tokens": (
        "Tokens that the owner's engines report, each counted once",
        lambda s: s.useful_tokens,
    ),
}


def _offline(services: Sequence[ServiceState]) -> Iterator[Metric]:
    rows = {(str(service.id), service.name): service for service in services}
    return of_each(counter, OFFLINE_COUNTERS, rows, ["service", "name"])


def _memory(memory: MemoryState) -> Iterator[Metric]:
    size = memory.handle_bytes
    parts = ("free", "moving", "orphaned", "online", "offline")
    pool: dict[tuple[str, ...], float] = {
        (str(gpu.index), part): getattr(gpu, part) * size for gpu in memory.gpus for part in parts
    }
    yield gauge("valve_kv_pool_bytes", "KV memory of the GPU, by holder", pool, ["gpu", "holder"])
    engines = {(str(engine.service), engine.role.name.lower()): engine for engine in memory.engines}
    yield from of_each(gauge, ENGINE_GAUGES, engines, ["service", "role"])
    yield gauge("valve_kv_reclaim_target", "Reclaims an hour that the operator accepts", {(): memory.target_per_hour})
    totals = {
        "valve_kv_reclaims": ("Reclaims from offline work", memory.reclaims),
        "valve_kv_reclaims_short": ("Reclaims that got less memory than was needed", memory.reclaims_short),
        "valve_kv_reclaimed_bytes": ("KV memory taken from offline work", memory.reclaimed_bytes),
        "valve_kv_lent_bytes": ("KV memory lent to offline work", memory.lent_bytes),
        "valve_kv_returned_bytes": ("KV memory that online services gave back", memory.returned_bytes),
        "valve_kv_full": ("Times that the driver had less memory for the pool than the card said", memory.full),
        "valve_kv_late_orders": ("Mapping orders that did not come back in time", memory.late_orders),
        "valve_kv_demotions": (
            "Processes that give memory between steps only, as the way set failed",
            memory.demotions,
        ),
        "valve_kv_lets": ("Lets: offline steps that end beside a request that waits for memory", memory.lets),
        "valve_kv_lets_again": ("Lets after the first one of a reclaim", memory.lets_again),
        "valve_kv_let_seconds": ("Time of all lets: offline work ran beside a request", memory.let_ns / 1e9),
        "valve_kv_lost_tokens": ("Tokens of lost blocks that were computed again", memory.lost_tokens),
    }
    for name, (text, value) in totals.items():
        yield counter(name, text, {(): value})
    trials: dict[tuple[str, ...], float] = {("passed",): memory.trials_passed, ("failed",): memory.trials_failed}
    yield counter("valve_kv_trials", "Processes tried: can memory be taken from outside", trials, ["outcome"])
    phases = HistogramMetricFamily("valve_kv_reclaim_seconds", "Duration of a reclaim, by phase", labels=["phase"])
    for phase in memory.phases:
        phases.add_metric([phase.name], _buckets(phase.latency), phase.latency.sum_us / 1e6)
    yield phases


ENGINE_GAUGES: Figures[EngineState] = {
    "valve_kv_blocks": ("KV blocks of the engine", lambda e: e.blocks),
    "valve_kv_backed_blocks": ("Blocks of the engine that have memory now", lambda e: e.backed_blocks),
    "valve_kv_used_blocks": ("Blocks in use, as the engine reports", lambda e: e.used_blocks),
    "valve_kv_wanted_blocks": ("Blocks that the engine would use now if it had them", lambda e: e.wanted_blocks),
    "valve_kv_headroom_bytes": ("Reserve beyond the engine's use", lambda e: e.headroom_columns * e.column_bytes),
    "valve_kv_reclaims_per_hour": ("Reclaims for the engine in the last window", lambda e: e.reclaims_per_hour),
}


def _counts(status: NodeState) -> Iterator[Metric]:
    counters = status.counters
    yield counter("valve_gates", "GPU gates closed, by launches and by valved itself", {(): counters.gates})
    yield counter("valve_wakes", "Times that a service dropped its hold", {(): counters.wakes})
    yield counter("valve_wakes_refused", "Wakes that a launch called off", {(): counters.wake_refused})
    yield counter("valve_gate_failures", "Disable calls that failed or hung", {(): counters.gate_failures})
    yield counter("valve_clients_welcomed", "Clients that valved has welcomed", {(): counters.clients})
    refusals: dict[tuple[str, ...], float] = {(why,): float(count) for why, count in counters.refusals.items()}
    yield counter("valve_refusals", "Clients and channels refused, by reason", refusals, ["reason"])
    yield counter("valve_malformed_packets", "Link packets that valved could not read", {(): counters.malformed})
    yield counter("valve_restarts", "Starts that took over a former valved's state", {(): counters.restarts})
    yield counter(
        "valve_channels_enabled_on_exit",
        "Channels that were off when their process ended, and that valved enabled",
        {(): counters.channels_enabled_on_exit},
    )
    yield counter("valve_stamps_lost", "Stops and wakes that are in no book", {(): counters.stamps_lost})


def render(look: Callable[[], NodeState], more: More = None) -> bytes:
    return b"".join(map(text_of, NodeCollector(look, more).collect()))


in_words: Callable[[float], str] = floatToGoString  # which states no types
ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})


def text_of(family: Metric) -> bytes:
    """What prometheus-client's generate_latest writes of it, in less time. A description is one plain line."""
    name = f"{family.name}_total" if family.type == "counter" else family.name
    lines = [f"# HELP {name} {family.documentation}\n# TYPE {name} {family.type}\n"]
    for sample in family.samples:
        pairs = [f'{label}="{value.translate(ESCAPES)}"' for label, value in sample.labels.items()]
        labels = f"{{{','.join(pairs)}}}" if pairs else ""
        lines.append(f"{sample.name}{labels} {in_words(sample.value)}\n")
    return "".join(lines).encode()
