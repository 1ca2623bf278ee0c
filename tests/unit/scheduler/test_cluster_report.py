"""`valve cluster report`: figures from hand-made weeks, and a Prometheus of a few lines behind it."""

from __future__ import annotations

import json
import re
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from urllib.parse import parse_qs, urlsplit

import numpy as np
import pytest
from valve_kube.errors import SchedulerError
from valve_scheduler.cli.reporting import candidates, levels_of, pools_of, seconds_of
from valve_scheduler.report import page, prometheus
from valve_scheduler.report.worth import Findings, GpuHours, NodeAlignment, ServiceWeek, by_pool, pool_worth, price

from valved.kube.observed import Observed
from valved.machine.ports import GpuInfo
from valved.model.events import Event, EventKind
from valved.model.ids import GpuIndex, Role, ServiceId
from valved.state.journal import Watcher
from valved.state.registry import Books, ServiceEntry

FULL_MIB = 80000.0


def hours(idle, *, node="n1", uuid="GPU-1", free=FULL_MIB):
    count = len(idle)
    return GpuHours(node=node, uuid=uuid, idle=np.array(idle, float), free_mib=np.full(count, free), full_mib=FULL_MIB)


def test_a_gpu_that_is_always_half_idle_saves_half_a_gpu_up_to_that_sla():
    worth = pool_worth("a", [hours([0.5] * 48)], (0.2, 0.4, 0.6))

    assert [level.gpus_saved for level in worth.levels] == [0.5, 0.5, 0.0]
    assert [level.kept_share for level in worth.levels] == [1.0, 1.0, None]
    assert (worth.gpus, worth.nodes, worth.hours, worth.idle) == (1, 1, 47, 0.5)


def test_an_hour_that_breaks_the_promise_of_the_one_before_counts_as_not_kept():
    worth = pool_worth("a", [hours([1.0, 1.0, 0.0, 1.0])], (0.5,))

    (level,) = worth.levels
    assert (level.placed_share, level.kept_share) == (0.667, 0.5), "placed for hours 1 and 2; after the empty hour not"


def test_the_promise_is_of_the_hour_before_as_placement_has_it():
    """A service that went idle is counted on after an hour, not after a day; one that grew busy no longer than that."""
    grew_idle = pool_worth("a", [hours([0.0] * 24 + [1.0, 1.0])], (0.5,))
    grew_busy = pool_worth("a", [hours([1.0] * 24 + [0.0, 0.0])], (0.5,))

    assert grew_idle.levels[0].placed_share == 1 / 25
    assert grew_busy.levels[0].placed_share == 24 / 25


def test_hours_that_nobody_saw_are_neither_idle_nor_busy():
    nothing = pool_worth("a", [hours([np.nan] * 5)], (0.5,))
    part = pool_worth("a", [hours([0.8, np.nan, 0.8, 0.8])], (0.5,))

    assert (nothing.hours, nothing.levels[0].gpus_saved) == (0, 0.0)
    assert (part.hours, part.levels[0].gpus_saved) == (1, 0.8)


def test_a_card_that_is_full_saves_nothing_however_idle_it_is():
    assert pool_worth("a", [hours([1.0] * 5, free=0.0)], (0.2,)).levels[0].gpus_saved == 0.0


def test_the_fleet_comes_before_its_pools():
    gpus = [hours([0.5] * 5), hours([1.0] * 5, node="n2", uuid="GPU-2")]

    found = by_pool(gpus, {"n1": "a", "n2": "b"}, (0.2,))

    assert [one.pool for one in found] == ["all", "a", "b"]
    assert [one.levels[0].gpus_saved for one in found] == pytest.approx([1.5, 0.5, 1.0], abs=0.02)


def node_of(count, idle, aligned):
    """One node whose GPUs are idle as the rows say, every pair of them aligned so far."""
    gpus = [hours(row, uuid=f"GPU-{place}") for place, row in enumerate(idle)]
    pairs = np.full((8, 8), aligned)
    np.fill_diagonal(pairs, 1.0)
    return gpus, {"n1": NodeAlignment(uuids=tuple(f"GPU-{place}" for place in range(count)), pairs=pairs)}


def test_jobs_over_several_gpus_get_what_their_union_of_busy_time_leaves():
    gpus, together = node_of(4, [[0.6] * 5] * 4, 1.0)
    pairs, fours = pool_worth("a", gpus, (0.5,), together).sets

    assert (pairs.size, fours.size) == (2, 4)
    assert pairs.levels[0].gpus_saved == pytest.approx(4 * 0.6, abs=0.05), "two jobs of two"
    assert fours.levels[0].gpus_saved == pytest.approx(4 * 0.6, abs=0.05)
    assert (pairs.levels[0].placed_share, pairs.levels[0].kept_share) == (1.0, 1.0)


def test_gpus_that_are_busy_at_other_times_serve_no_job_together():
    """The mean of their idle time would promise what no job over both ever gets."""
    gpus, apart = node_of(2, [[0.6] * 5] * 2, 0.3)

    assert pool_worth("a", gpus, (0.2,), apart).sets[0].levels[0].gpus_saved == 0.0


def test_no_gpu_is_in_two_jobs_at_once():
    gpus, together = node_of(3, [[1.0] * 5] * 3, 1.0)

    assert pool_worth("a", gpus, (0.2,), together).sets[0].levels[0].gpus_saved == pytest.approx(2.0, abs=0.02)


def test_gpus_of_a_node_that_reports_nothing_are_in_no_set():
    gpus, known = node_of(2, [[1.0] * 5] * 2, 1.0)

    assert pool_worth("a", gpus, (0.2,)).sets == ()
    assert pool_worth("a", [*gpus, hours([1.0] * 5, uuid="GPU-9")], (0.2,), known).sets[0].levels[0].placed_share == 1.0


def test_a_service_pays_one_stop_for_each_time_it_lets_go():
    paid = price(ServiceWeek(namespace="serving", pod="chat-0", busy_s=100.0, idles=1000.0), 0.001)

    assert (paid.preemptions, paid.delay_s, paid.share) == (1000, 1.0, 0.01)


def test_jobs_on_whole_gpus_are_candidates_and_services_are_not():
    def pod(name, kind, phase="Running", role=""):
        labels = {"valve.gpu/role": role} if role else {}
        owner = [{"kind": kind, "name": name, "uid": "u", "controller": True}]
        limits = {"resources": {"limits": {"nvidia.com/gpu": "1"}}}
        metadata = {"namespace": "ns", "name": f"{name}-1", "labels": labels, "ownerReferences": owner}
        return {"metadata": metadata, "spec": {"containers": [limits]}, "status": {"phase": phase}}

    pods = [
        pod("batch", "Job"),
        pod("chat", "ReplicaSet"),
        pod("queued", "ReplicaSet", "Pending"),
        pod("b", "Job", role="offline"),
    ]

    assert [(one.owner, one.pods) for one in candidates(pods)] == [("batch", 1), ("queued", 1)]


def test_a_node_without_a_pool_label_is_named_by_its_cards():
    nodes = [{"metadata": {"name": "n1", "labels": {"pool": "a"}}}, {"metadata": {"name": "n2"}}]
    reports = [{"metadata": {"name": "n2"}, "status": {"gpuModel": "H100"}}]

    assert pools_of(nodes, reports, "") == {"n1": "a", "n2": "H100"}


@pytest.mark.parametrize("text", ["7", "0d", "d", "7m", "-1d"])
def test_a_time_that_cannot_be_is_refused_by_name(text):
    with pytest.raises(SchedulerError, match="--since"):
        seconds_of(text)


@pytest.mark.parametrize("text", ["", "0", "1.5", "a,b"])
def test_levels_that_cannot_be_are_refused_by_name(text):
    with pytest.raises(SchedulerError, match="--sla"):
        levels_of(text)


def gpu_info():
    return GpuInfo(
        index=GpuIndex(0),
        uuid=bytes(16),
        name="H100",
        total_bytes=80 << 30,
        minor=0,
        gpu_id=0,
        device_instance=0,
    )


def test_every_metric_that_the_report_asks_for_is_exported_by_a_daemon():
    exported = {family.name for family in Observed([gpu_info()]).families()}
    others = {"valve_online_busy_seconds", "valve_preemption_latency_seconds", "valve_online_uninjected"}
    queries = " ".join(value for key, value in vars(prometheus).items() if key.isupper() and isinstance(value, str))

    asked = {re.sub("_(total|bucket)$", "", name) for name in re.findall(r"valve_\w+", queries)}

    assert asked <= exported | others
    assert exported <= asked, "and nothing is exported for a report that does not ask for it"


def test_a_daemon_counts_what_it_saw_and_each_time_a_service_let_go():
    observed, wakes = Observed([gpu_info()]), Watcher(frozenset({"wake"}), 10, lambda: None)
    books = books_of(7)
    for kind in (EventKind.WAKE, EventKind.HOLD, EventKind.WAKE):
        wakes.offer(Event(seq=1, t_ns=0, kind=kind, service=7))
    observed.book([1.0], [0.25], wakes, books, set())
    observed.book([1.0], [3.0], wakes, books, set())

    assert (observed.offers[0].seen_s, observed.offers[0].idle_s, idles(observed)) == (2.0, 1.25, {"chat-0": 2.0})


def books_of(*services):
    books = Books()
    for service in services:
        key = ServiceId(service)
        books.services[key] = ServiceEntry(id=key, role=Role.ONLINE, name="serving/chat-0", root=None)
    return books


def idles(observed):
    (family,) = [one for one in observed.families() if one.name == "valve_online_idles"]
    return {sample.labels["pod"]: sample.value for sample in family.samples}


def test_the_idles_of_a_pod_never_fall_when_one_of_its_services_leaves():
    """Prometheus would take the smaller sum for a reset, and count the rest again."""
    observed, wakes = Observed([gpu_info()]), Watcher(frozenset({"wake"}), 10, lambda: None)
    for service in (7, 8, 8):
        wakes.offer(Event(seq=1, t_ns=0, kind=EventKind.WAKE, service=service))
    observed.book([1.0], [0.0], wakes, books_of(7, 8), {"serving/chat-0"})
    wakes.offer(Event(seq=2, t_ns=0, kind=EventKind.WAKE, service=8))

    observed.book([1.0], [0.0], wakes, books_of(7), {"serving/chat-0"})
    assert idles(observed) == {"chat-0": 4.0}, "what it did before it left counts, too"
    observed.book([1.0], [0.0], wakes, books_of(), {"serving/chat-0"})
    assert idles(observed) == {"chat-0": 4.0}

    observed.book([1.0], [0.0], wakes, books_of(), set())
    assert idles(observed) == {}, "the pod is gone"


class Played(BaseHTTPRequestHandler):
    """Answers as Prometheus does: one GPU that is half idle, one service, no measured stop."""

    def do_GET(self):
        url = urlsplit(self.path)
        query = {key: values[0] for key, values in parse_qs(url.query).items()}
        data = {"result": self.series(query, url.path.endswith("query_range"))}
        body = json.dumps({"status": "success", "data": data}).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)

    def series(self, query, is_range):
        asked, value, metric = query["query"], None, {"node": "n1", "uuid": "GPU-1"}
        for name, known in {
            "observed": 3600,
            "idle_seconds": 1800,
            "offered": 80 << 30,
            "valve_gpu_memory": 80 << 30,
        }.items():
            value = known if name in asked and value is None else value
        if "valve_online" in asked and "uninjected" not in asked:
            value, metric = 5.0, {"namespace": "serving", "pod": "chat-0"}
        if value is None:
            return []
        if not is_range:
            return [{"metric": metric, "value": [0, str(value)]}]
        times = range(int(query["start"]), int(query["end"]) + 1, int(query["step"]))
        return [{"metric": metric, "values": [[at, str(value)] for at in times]}]

    def log_message(self, *_):
        pass


@pytest.fixture
def source():
    server = HTTPServer(("127.0.0.1", 0), Played)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield prometheus.Prometheus(url=f"http://127.0.0.1:{server.server_port}")
    server.shutdown()
    thread.join()
    server.server_close()


def test_hours_of_a_prometheus_become_hours_of_gpus(source):
    (gpu,) = prometheus.gpu_hours(source, 3600, 3600 * 24)

    assert (gpu.node, gpu.uuid, gpu.full_mib) == ("n1", "GPU-1", 80 * 1024)
    assert gpu.idle.tolist() == [0.5] * 24
    assert prometheus.stop_seconds(source, 3600, 3600) is None
    assert [one.pod for one in prometheus.services(source, 3600, 3600)] == ["chat-0"]


def test_a_prometheus_that_is_not_there_is_an_error_that_names_it():
    with pytest.raises(SchedulerError, match="cannot be asked"):
        prometheus.gpu_hours(prometheus.Prometheus(url="http://127.0.0.1:1"), 0, 3600)


def test_the_page_says_the_decision_first_and_escapes_what_tenants_named(source):
    found = Findings(
        source="test",
        hours=24,
        stop_ms=1.0,
        stop_source="promised",
        pools=by_pool(prometheus.gpu_hours(source, 3600, 3600 * 24), {"n1": "<b>"}, (0.2, 0.6)),
        prices=(price(ServiceWeek(namespace="a", pod="<i>", busy_s=1.0, idles=1.0), 0.001),),
        candidates=(),
        uninjected=2.0,
    )

    text = page.html(found)

    assert "In 24 hours 1 GPUs on 1 nodes would have saved 0.5 at SLA 0.2, 0.0 at SLA 0.6" in text
    assert "2 online containers run without the shim" in text
    assert "<b>" not in text
    assert "<i>" not in text
    assert "0.5 (100%)" in text
