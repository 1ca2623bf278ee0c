"""Everything the cluster side counts, each described where it is defined."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

REGISTRY = CollectorRegistry()

_LATENCY_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.25, 1.0, 5.0)

requests = Histogram(
    "valve_extender_request_seconds",
    "Time to answer kube-scheduler, by verb and HTTP code; the promise is 20 ms for filter and prioritize",
    ["verb", "code"],
    buckets=_LATENCY_S,
    registry=REGISTRY,
)
bind_waits = Histogram(
    "valve_extender_binding_seconds",
    "Of the answer to a bind: how long the API server took to store the Binding",
    buckets=_LATENCY_S,
    registry=REGISTRY,
)
refusals = Counter(
    "valve_extender_refused_nodes",
    "Nodes refused in filter calls, by reason; with valve_extender_accepted_nodes_total they add up to all judged",
    ["reason"],
    registry=REGISTRY,
)
accepted = Counter("valve_extender_accepted_nodes", "Nodes that passed a filter call of Valve", registry=REGISTRY)
binds = Counter(
    "valve_extender_binds",
    "Bind calls by outcome: bound, refused (no Binding exists), undecided (no answer from the API server)",
    ["outcome"],
    registry=REGISTRY,
)
invalid = Counter(
    "valve_invalid_objects",
    "Objects from the API that could not be used, by kind; the log names field and value",
    ["kind"],
    registry=REGISTRY,
)
assumed = Gauge("valve_extender_assumed_pods", "Pods with a bind under way or undecided", registry=REGISTRY)
oldest_report = Gauge(
    "valve_extender_oldest_report_seconds",
    "Age of the oldest node report; above 90 s that node takes no new offline work",
    registry=REGISTRY,
)
clock_skew = Gauge(
    "valve_extender_clock_skew_seconds",
    "Difference between a node's clock and ours, of the node that is off most",
    registry=REGISTRY,
)
ready = Gauge("valve_extender_ready", "1 while this replica leads and its view is complete", registry=REGISTRY)
evictions = Counter(
    "valve_monitor_evictions",
    "Evictions of offline pods that missed their SLA, by result: evicted, blocked (disruption budget), failed",
    ["result"],
    registry=REGISTRY,
)
violations = Gauge(
    "valve_monitor_violating_pods", "Running offline pods that persistently miss their SLA", registry=REGISTRY
)
harvested = Gauge(
    "valve_account_harvested_gpu_seconds",
    "GPU time that offline work of a namespace used, since its account was opened; of the leader only",
    ["namespace"],
    registry=REGISTRY,
)
saved = Gauge(
    "valve_account_saved_gpu_seconds",
    "GPU time that the work would have cost on GPUs of its own, since the account was opened; of the leader only",
    ["namespace"],
    registry=REGISTRY,
)
saved_total = Counter(
    "valve_saved_gpu_seconds",
    "GPU time that offline work would have cost on GPUs of its own, counted by the leader since it leads",
    ["namespace"],
    registry=REGISTRY,
)
promised_total = Counter(
    "valve_promised_gpu_seconds",
    "SLA x time with demand x GPUs of offline pods, counted when a window of the monitor closes",
    ["namespace"],
    registry=REGISTRY,
)
kept_total = Counter(
    "valve_kept_gpu_seconds",
    "The same with what was reached, at most the SLA: over valve_promised_gpu_seconds_total it is how far "
    "promises hold",
    ["namespace"],
    registry=REGISTRY,
)
admissions = Counter(
    "valve_webhook_admissions",
    "Pods seen by the webhook, by role and result: changed, unchanged, refused, skipped",
    ["role", "result"],
    registry=REGISTRY,
)
certificate_expiry = Gauge(
    "valve_webhook_certificate_expiry_timestamp_seconds",
    "When the webhook's certificate ends; it is renewed at two thirds of its life",
    registry=REGISTRY,
)

# Known from the start: a panel or an alert over a counter that nothing has raised yet shows 0, not nothing.
for _result in ("evicted", "blocked", "failed"):
    evictions.labels(_result)
for _outcome in ("bound", "refused", "undecided"):
    binds.labels(_outcome)
