"""What a node tells the cluster beside figures: whom it cannot hear, whose breaker is open, why it is drained."""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import replace

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

from valved.kube.levels import Series
from valved.machine.cards import CardUse
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
        assert "onlineRisk" not in node.api.reports[-1]["gpus"][0]


@scenario
async def test_a_service_whose_breaker_is_open_is_named_by_the_node(tmp_path):
    async with reporting(tmp_path) as node:
        (online,) = node.world.gating.online.values()
        online.breaker = replace(online.breaker, open_until_ns=1 << 62)

        await until(lambda: said(node, "BreakerOpen") == ("True", "default/chat-0"), 60)
        assert "valve_breakers_open 1.0" in render(node.world.node.status, node.room.metrics).decode()
        assert node.room.missing() == ""


@scenario
async def test_what_an_online_pod_lent_is_reported_with_the_service_it_is_one_of(tmp_path):
    async with reporting(tmp_path, report_s=1) as node:
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
        await until(lambda: node.room._memory.cards.get(card.uuid, card) is node.cards.uses[card.uuid], 60)

        found = {
            (sample.name, sample.labels.get("pod", ""), sample.labels.get("gpu", "")): sample.value
            for family in node.room.metrics()
            for sample in family.samples
        }

        assert found["valve_gpu_online_memory_bytes", "", "0"] == 32 * GIB  # 2 GiB are of the driver, say
        assert found["valve_online_memory_bytes", "chat-0", "0"] == 30 * GIB
        (online,) = node.world.gating.online.values()
        now_ns = node.room._host.clock.now_ns()
        assert 0 < found["valve_online_busy_seconds_total", "chat-0", ""] <= online.busy_ns(now_ns) / 1e9


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
    async with reporting(tmp_path, report_s=1) as node:
        node.put(pod("night-0", OFFLINE_UID, role="offline", phase="Running"))
        measured = node.room.offline.levels._series[OFFLINE_UID] = Series()
        await until(lambda: said(node, "Profiling") == ("True", "default/night-0"), 60)

        measured.end()

        await until(lambda: said(node, "Profiling")[0] == "False", 60)
        assert node.api.reports[-1]["mode"] == "harvest"
