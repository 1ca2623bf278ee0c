"""What a node tells the cluster beside figures: whom it cannot hear, whose breaker is open, why it is drained."""

from __future__ import annotations

from dataclasses import replace

from kube_node import OFFLINE_UID, ONLINE_UID, WHOLE, kube_node, pod, registered, scenario, serve_online, until, uuid_of

from valved.metrics import render


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
    async with kube_node(tmp_path) as node:
        await registered(node)
        serve_online(node)
        await until(lambda: node.api.reports, 60)
        (online,) = node.world.keeper.online.values()
        online.breaker = replace(online.breaker, open_until_ns=1 << 62)

        await until(lambda: said(node, "BreakerOpen") == ("True", "default/chat-0"), 60)
        assert "valve_breakers_open 1.0" in render(node.world.node.status, node.room.metrics).decode()
        assert node.room.missing() == ""


@scenario
async def test_what_an_online_pod_lent_is_reported_with_the_service_it_is_one_of(tmp_path):
    async with kube_node(tmp_path) as node:
        await registered(node)
        serve_online(node)
        owned = pod("chat-0", ONLINE_UID, role="online", limit=WHOLE, phase="Running")
        owned["metadata"]["ownerReferences"] = [{"kind": "StatefulSet", "name": "chat", "controller": True}]
        node.put(owned)

        await until(lambda: node.api.reports and node.api.reports[-1]["services"], 60)

        (lent,) = node.api.reports[-1]["services"]
        assert (lent["namespace"], lent["pod"], lent["service"]) == ("default", "chat-0", "chat")


def said(node, kind):
    return next((c["status"], c["message"]) for c in node.api.reports[-1]["conditions"] if c["type"] == kind)


@scenario
async def test_a_node_that_is_drained_says_why(tmp_path):
    async with kube_node(tmp_path) as node:
        await registered(node)
        serve_online(node)
        await until(lambda: node.api.reports, 60)

        node.room.api.found({"spec": {"mode": "harvest", "resolved": {"drain": "a driver upgrade"}}})

        await until(lambda: node.api.reports[-1]["phase"] == "Off", 60)
        assert said(node, "Draining") == ("True", "a driver upgrade")
        await until(lambda: node.kubelet.healthy == [], 60)
