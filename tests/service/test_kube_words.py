"""What a node tells the cluster beside figures: whom it cannot hear, whose breaker is open, why it is drained."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace

import numpy as np
import pytest
from kube_node import (
    GIB,
    OFFLINE_UID,
    ONLINE_UID,
    WHOLE,
    kube_node,
    pod,
    registered,
    scenario,
    serve_online,
    until,
    uuid_of,
)
from valve_scheduler.model import forecast, windows_of
from valve_scheduler.model.forecast import MOST_OVER_RECENT

from valved.kube.levels import Series
from valved.kube.series import NodeSeries
from valved.machine.cards import CardUse
from valved.machine.clock import LoopClock
from valved.metrics import render


@asynccontextmanager
async def reporting(tmp_path, **table):
    """A node that serves one online pod and has reported."""
    async with kube_node(tmp_path, **table) as node:
        await registered(node)
        serve_online(node)
        await until(lambda: node.api.reports, 60)
        yield node


@scenario
async def test_only_an_online_pod_that_nobody_injected_asks_for_offline_pods_to_leave_its_gpu(tmp_path):
    async with kube_node(tmp_path) as node:
        await registered(node)
        injected, bare = pod("chat-0", ONLINE_UID, role="online", limit=WHOLE), pod("own-0", OFFLINE_UID, limit=WHOLE)
        injected["metadata"]["annotations"]["valve.gpu/injection"] = "ok"
        node.put(injected)
        node.put(bare)
        node.kubelet.held += [
            ("default", name, "work", WHOLE, [uuid_of(node.world, gpu)]) for gpu, name in enumerate(("chat-0", "own-0"))
        ]
        node.room._wake.set()

        await until(lambda: node.api.reports and "onlineRisk" in node.api.reports[-1]["gpus"][1], 60)

        assert node.api.reports[-1]["gpus"][1]["onlineRisk"] == "default/own-0/work runs without the shim"
        assert node.api.reports[-1]["gpus"][1]["guarded"] is True
        assert "onlineRisk" not in node.api.reports[-1]["gpus"][0]


@scenario
async def test_a_service_whose_breaker_is_open_is_named_by_the_node(tmp_path):
    async with reporting(tmp_path) as node:
        (online,) = node.world.gating.online.values()
        online.breaker = replace(online.breaker, open_until_ns=1 << 62)

        await until(lambda: said(node, "BreakerOpen") == ("True", "default/chat-0"), 60)
        assert "valve_breakers_open 1.0" in render(node.world.node.status, node.room.metrics).decode()
        assert node.room.reports.missing() == ""


@scenario
async def test_what_an_online_pod_lent_is_reported_with_the_service_it_is_one_of(tmp_path):
    async with reporting(tmp_path) as node:
        owned = pod("chat-0", ONLINE_UID, role="online", limit=WHOLE, phase="Running")
        owned["metadata"]["ownerReferences"] = [{"kind": "StatefulSet", "name": "chat", "controller": True}]
        node.put(owned)

        await until(lambda: [one["service"] for one in node.api.reports[-1]["services"]] == ["chat"], 60)

        (lent,) = node.api.reports[-1]["services"]
        assert (lent["namespace"], lent["pod"]) == ("default", "chat-0")


@scenario
async def test_what_an_online_pod_uses_itself_is_told_apart_from_what_it_lends(tmp_path):
    """An autoscaler that went by the whole card would add replicas because batch work runs."""
    async with reporting(tmp_path) as node:
        card, offline = node.world.gate.gpus()[0], node.world.offline(gpus=(0,))
        batch = node.world.books.clients[offline].process.pid
        held = {200: 30 * GIB, batch: 40 * GIB}
        node.cards.uses[card.uuid] = CardUse(total_bytes=80 * GIB, used_bytes=72 * GIB, by_pid=held, is_mig=False)
        await until(lambda: node.room.known.cards.get(card.uuid, card) is node.cards.uses[card.uuid], 60)

        found = {
            (sample.name, sample.labels.get("pod", ""), sample.labels.get("gpu", "")): sample.value
            for family in node.room.metrics()
            for sample in family.samples
        }

        assert found["valve_gpu_online_memory_bytes", "", "0"] == 32 * GIB  # 2 GiB are of the driver, say
        assert found["valve_online_memory_bytes", "chat-0", "0"] == 30 * GIB
        (online,) = node.world.gating.online.values()
        now_ns = node.room._host.clock.now_ns()
        assert 0 < found["valve_online_busy_seconds_total", "chat-0", ""] <= online.hold_ns(now_ns) / 1e9


@scenario
async def test_a_report_tells_what_online_uses_while_it_holds_the_gpu_and_not_what_a_job_does(tmp_path):
    async with reporting(tmp_path) as node:
        card, offline = node.world.gate.gpus()[0], node.world.offline(gpus=(0,))
        batch = node.world.books.clients[offline].process.pid
        held = {200: 48 * GIB, batch: 20 * GIB}
        node.cards.uses[card.uuid] = CardUse(total_bytes=80 * GIB, used_bytes=70 * GIB, by_pid=held, is_mig=False)
        node.world.online(gpus=(0,))

        def told():
            return node.api.reports[-1]["gpus"][0].get("onlineMemory", {}).get("1h", [])

        await until(lambda: len(node.api.reports) > 1 and told() and told()[20] > 0.5, 90)  # 50 of 80 GiB

        assert sum(told()) == pytest.approx(1.0, abs=0.001)
        assert "onlineMemory" not in node.api.reports[-1]["gpus"][1]


def said(node, kind):
    return next((c["status"], c["message"]) for c in node.api.reports[-1]["conditions"] if c["type"] == kind)


@scenario
async def test_a_node_that_is_drained_says_why(tmp_path):
    async with reporting(tmp_path) as node:
        node.room.api.found({"spec": {"mode": "harvest", "resolved": {"drain": "a driver upgrade"}}})

        await until(lambda: node.api.reports[-1]["phase"] == "Off", 60)
        assert said(node, "Draining") == ("True", "a driver upgrade")
        await until(lambda: node.kubelet.healthy == [], 60)


@scenario
async def test_a_pod_that_is_lent_its_memory_in_steps_is_named_until_it_has_all_of_it(tmp_path):
    async with reporting(tmp_path) as node:
        node.put(pod("night-0", OFFLINE_UID, role="offline", phase="Running"))
        measured = node.room.offline.levels._series[OFFLINE_UID] = Series()
        await until(lambda: said(node, "Profiling") == ("True", "default/night-0"), 60)

        measured.end()

        await until(lambda: said(node, "Profiling")[0] == "False", 60)
        assert node.api.reports[-1]["mode"] == "harvest"


@scenario
async def test_a_clock_that_is_off_is_never_known_to_an_alert_alone_nor_written_more_often_for_it(tmp_path):
    async with reporting(tmp_path, report_s=1) as node:
        node.api.ahead_s = 90.0
        await until(lambda: said(node, "ClockSkew")[0] == "True", 60)
        (was,) = (c for c in node.api.reports[-1]["conditions"] if c["type"] == "ClockSkew")
        assert was["reason"] == "ClockOff"
        assert was["message"] in ("the clock of the node is 89 s behind", "the clock of the node is 90 s behind")

        node.api.ahead_s, since = 0.0, len(node.api.reports)
        await until(lambda: said(node, "ClockSkew")[0] == "False", 60)
        (first,) = (c for c in node.api.reports[0]["conditions"] if c["type"] == "ClockSkew")
        assert (first["status"], first["reason"]) == ("Unknown", "NotCompared")
        words = [{c["type"]: c["status"] for c in report["conditions"]} for report in node.api.reports]
        at = next(at for at in range(since, len(words)) if words[at]["ClockSkew"] == "False")
        assert at <= since + 1  # the one under way, and the next by its own pace


class LaterClock(LoopClock):
    """Of a machine that has been up for longer than a day."""

    AHEAD_NS = 10**15

    def now_ns(self):
        return super().now_ns() + self.AHEAD_NS

    def call_at_ns(self, when_ns, call):
        return super().call_at_ns(when_ns - self.AHEAD_NS, call)


def up_for_long(node):
    host = node.host
    node.host = lambda: replace(host(), clock=LaterClock(asyncio.get_running_loop()))


@scenario
async def test_a_daemon_that_restarts_never_forgets_what_placement_goes_by(tmp_path):
    """Its file is the one that it wrote as it ended; what it reports next is read as placement reads it."""
    async with kube_node(tmp_path, prepare=up_for_long) as node:
        await registered(node)
        past, end_s = NodeSeries(2), node.room._host.now_s()
        for minute in range(1440):
            left = 12.0 if minute >= 1430 else 36.0 if minute >= 1380 else 48.0
            past.book(end_s - 60.0 * (1440 - minute), [60.0, 60.0], [left, 60.0])
        assert node.room.counting.series.restore(past.saved(), end_s)
        await node.stop_room()
        node.api.reports.clear()
        node.start_room()
        await until(lambda: node.api.reports, 60)

        (first, second) = (gpu["idle"] for gpu in node.api.reports[-1]["gpus"])
        assert windows_of(first) == pytest.approx((0.2, 0.53, 0.79), abs=0.03)
        assert windows_of(second) == pytest.approx((1.0, 1.0, 1.0), abs=0.03)
        seen = [np.array([share]) for share in windows_of(first)]
        assert forecast(*seen) == pytest.approx(first["10m"] + MOST_OVER_RECENT)
