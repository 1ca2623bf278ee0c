"""Everything the cluster side counts, each described where it is defined."""

from collections.abc import Iterator
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector
from valve_kube import failures

_LATENCY_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.25, 1.0, 5.0)
REGISTRY = CollectorRegistry()
_counter = partial(Counter, registry=REGISTRY)
_gauge = partial(Gauge, registry=REGISTRY)
_histogram = partial(Histogram, registry=REGISTRY, buckets=_LATENCY_S)

requests = _histogram(
    "valve_extender_request_seconds",
    "Time to answer kube-scheduler, by verb and HTTP code; the promise is 20 ms for filter and prioritize",
    ["verb", "code"],
)
bind_waits = _histogram(
    "valve_extender_binding_seconds", "Part of a bind call: how long the API server took to store the Binding"
)
refusals = _counter(
    "valve_extender_refused_nodes",
    "Nodes refused in filter calls, by reason; with valve_extender_accepted_nodes_total they add up to all judged",
    ["reason"],
)
accepted = _counter("valve_extender_accepted_nodes", "Nodes that passed a filter call of Valve")
binds = _counter(
    "valve_extender_binds",
    "Bind calls by outcome: bound, refused (no Binding exists), undecided (no answer from the API server)",
    ["outcome"],
)
assumed = _gauge("valve_extender_assumed_pods", "Pods whose bind is under way or undecided")
oldest_report = _gauge(
    "valve_extender_oldest_report_seconds",
    "Age of the oldest node report; above 90 s that node takes no new offline work",
)
clock_skew = _gauge(
    "valve_extender_clock_skew_seconds", "Largest difference between the clock of a node and that of this process"
)
ready = _gauge("valve_extender_ready", "1 while this replica leads and its view is complete")
evictions = _counter(
    "valve_monitor_evictions",
    "Evictions of offline pods that missed their SLA, by result: evicted, blocked (disruption budget), failed",
    ["result"],
)
violations = _gauge("valve_monitor_violating_pods", "Running offline pods that persistently miss their SLA")
harvested = _gauge(
    "valve_account_harvested_gpu_seconds",
    "GPU time that offline work of a namespace used, since its account was opened; of the leader only",
    ["namespace"],
)
saved = _gauge(
    "valve_account_saved_gpu_seconds",
    "GPU time that the work would have cost on GPUs of its own, since the account was opened; of the leader only",
    ["namespace"],
)
saved_total = _counter(
    "valve_saved_gpu_seconds",
    "GPU time that offline work would have cost on GPUs of its own, counted by the leader since it leads",
    ["namespace"],
)
promised_total = _counter(
    "valve_promised_gpu_seconds",
    "SLA x time with demand x GPUs of offline pods, counted when a window of the monitor closes",
    ["namespace"],
)
kept_total = _counter(
    "valve_kept_gpu_seconds",
    "Speed reached, at most the SLA, x time with demand x GPUs: divided by valve_promised_gpu_seconds_total it says "
    "how far promises hold",
    ["namespace"],
)
admissions = _counter(
    "valve_webhook_admissions",
    "Pods seen by the webhook, by role and result: changed, unchanged, refused, skipped",
    ["role", "result"],
)
certificate_expiry = _gauge(
    "valve_webhook_certificate_expiry_timestamp_seconds",
    "When the webhook's certificate ends; it is renewed at two thirds of its life",
)


class Failures(Collector):
    """What was left behind by what reads the API server, which knows no metrics. A kind comes with its first failure:
    an alert looks for any."""

    def collect(self) -> Iterator[Metric]:
        text = "Objects from the API that could not be used or read, by kind; the log names the object, field and value"
        yield _family("valve_invalid_objects", text, "kind", failures.objects)
        text = "Rounds of work that ended with an error and were left to the next, by what they do; the log says why"
        yield _family("valve_failed_rounds", text, "round", failures.rounds)


def _family(name: str, text: str, label: str, counts: dict[str, int]) -> Metric:
    family = CounterMetricFamily(name, text, labels=[label])
    for value, count in sorted(counts.items()):
        family.add_metric([value], count)
    return family


REGISTRY.register(Failures())

# Known from the start: a panel or an alert over a counter that nothing has raised yet shows 0, not nothing.
for _result in ("evicted", "blocked", "failed"):
    evictions.labels(_result)
for _outcome in ("bound", "refused", "undecided"):
    binds.labels(_outcome)
