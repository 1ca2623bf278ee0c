"""The Kubernetes room of the daemon against a kubelet and an API server that really listen: slots, identity, guards.

Sockets, gRPC and HTTP are real; gate and processes are those of the virtual node.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import pytest
from kube_node import (
    GIB,
    OFFLINE_UID,
    ONLINE_UID,
    RESOURCE,
    UIDS,
    WHOLE,
    group,
    kube_node,
    pod,
    registered,
    scenario,
    serve_online,
    until,
    uuid_of,
)
from node_world import World

from valved.clients.identity import NO_CLAIM, NOT_YET, Peer
from valved.kube.follower import Follower
from valved.machine.cards import CardUse
from valved.metrics import render
from valved.model.ids import Mode, Role
from valved.policy.report_rate import RateSettings

# Slots


@scenario
async def test_slots_are_offered_for_gpus_whose_every_user_is_heard(tmp_path):
    async with kube_node(tmp_path) as node:
        await registered(node)

        assert (node.kubelet.healthy, len(node.kubelet.devices)) == ([], 2)
        assert node.kubelet.registered[0].resource_name == RESOURCE
        assert node.kubelet.registered[0].options.pre_start_required

        serve_online(node)
        await until(lambda: len(node.kubelet.healthy) == 1)

        assert node.guarded() == []


@scenario
async def test_a_holder_without_the_shim_closes_its_gpu_until_it_is_heard(tmp_path):
    """Its process may launch at any moment, and nobody would hear it."""

    def held(node):
        node.kubelet.held.append(("default", "bare-0", "work", WHOLE, [uuid_of(node.world, 1)]))
        node.api.items = [pod("bare-0", ONLINE_UID, role="online", limit=WHOLE)]

    async with kube_node(tmp_path, prepare=held) as node:
        await registered(node)
        offline = node.world.offline(gpus=(0, 1))

        assert node.guarded() == [1]
        assert (node.world.gate.is_gated(0), node.world.gate.is_gated(1)) == (False, True)

        node.world.processes.add(300, cgroup=group(ONLINE_UID))
        connection = node.world.hello(300, wanted=Role.NONE)

        assert connection.last.role is Role.ONLINE
        await until(lambda: node.guarded() == [])

        node.world.register.leave(connection.client, "test")
        await until(lambda: node.guarded() == [1])
        assert offline in node.world.books.clients


@scenario
async def test_a_process_that_computes_unregistered_closes_its_gpu(tmp_path):
    async with kube_node(tmp_path) as node:
        await registered(node)
        info = node.world.gate.gpus()[0]
        node.world.processes.add(900, comm="sneaky", cgroup=group(UIDS[5]))
        node.cards.uses[info.uuid] = CardUse(total_bytes=80 * GIB, used_bytes=GIB, by_pid={900: GIB}, is_mig=False)

        await until(lambda: node.guarded() == [0])

        verdict = node.room.known.verdicts[0]
        assert verdict.reason == "process 900 (sneaky) uses the GPU without the shim"


@scenario
async def test_before_anybody_has_answered_every_gpu_is_guarded(tmp_path):
    """A daemon that starts beside running pods knows nothing yet: neither who is online nor who uses what."""
    async with kube_node(tmp_path, kubelet=False) as node:
        await asyncio.sleep(0)

        assert node.guarded() == [0, 1]
        assert not node.room.plugin.is_registered
        assert node.room.reports.missing() == "the kubelet has not reported which pod holds which GPU"


@scenario
async def test_pausing_draining_and_other_modes_take_the_slots_back(tmp_path):
    async with kube_node(tmp_path) as node:
        await registered(node)
        serve_online(node)
        await until(lambda: len(node.kubelet.healthy) == 1)

        for close, reopen in [
            (lambda: node.world.node.pause("test"), node.world.node.resume),
            (
                lambda: node.world.node.set_policy(Mode.OBSERVE, {}, 0),
                lambda: node.world.node.set_policy(Mode.HARVEST, {}, 0),
            ),
        ]:
            close()
            await until(lambda: node.kubelet.healthy == [])
            reopen()
            await until(lambda: len(node.kubelet.healthy) == 1)


@scenario
async def test_a_kubelet_that_restarts_is_registered_with_again(tmp_path):
    """It deletes every socket in its folder and forgets all plugins; ours must notice by itself."""
    async with kube_node(tmp_path) as node:
        await registered(node)
        serve_online(node)
        await until(lambda: len(node.kubelet.healthy) == 1)

        for _ in range(3):
            before = len(node.kubelet.registered)
            await node.kubelet.stop()
            await node.kubelet.start()
            await until(lambda before=before: len(node.kubelet.registered) > before and node.kubelet.healthy)


@scenario
async def test_a_plugin_that_ends_leaves_no_healthy_slot_and_no_socket(tmp_path):
    async with kube_node(tmp_path) as node:
        await registered(node)
        serve_online(node)
        await until(lambda: len(node.kubelet.healthy) == 1)

        await node.stop_room()
        await until(lambda: node.kubelet.streams_ended == 1)

        assert node.kubelet.healthy == []
        assert [path.name for path in node.kubelet.plugins.iterdir()] == ["kubelet.sock"]


@scenario
async def test_a_slot_outlasts_a_short_time_under_guard(tmp_path):
    """The kubelet fails a pod for good whose slot goes between its placement and its admission."""
    async with kube_node(tmp_path) as node:
        await registered(node)
        connection = serve_online(node)
        await until(lambda: len(node.kubelet.healthy) == 1)

        node.world.register.leave(connection.client, "its engine restarts")
        await until(lambda: node.guarded() == [0])

        assert len(node.kubelet.healthy) == 1
        assert node.room.reports.facts().harvestable == 0


# Allocation and start of offline containers


@scenario
async def test_an_allocation_brings_the_shim_and_no_gpu(tmp_path):
    async with kube_node(tmp_path) as node:
        await registered(node)

        given = await node.kubelet.allocate("valve-slot-00")

        shim = str(tmp_path / "shim")
        assert [(m.host_path, m.container_path, m.read_only) for m in given.mounts] == [
            (shim, shim, True),
            (str(tmp_path / "client"), "/run/valve", True),
            (f"{shim}/ld.so.preload", "/etc/ld.so.preload", True),
        ]
        assert (tmp_path / "shim/ld.so.preload").read_text() == f"{shim}/current/libvalve.so\n"
        assert dict(given.envs) == {
            "LD_PRELOAD": f"{shim}/current/libvalve.so",
            "VALVE_ROLE": "offline",
            "VALVE_REQUIRE": "1",
        }
        assert (tmp_path / "shim/current/libvalve.so").exists()
        assert not given.cdi_devices
        assert await node.kubelet.prefer(["valve-slot-01", "valve-slot-00"], 1) == ["valve-slot-00"]


@scenario
async def test_a_container_starts_when_its_pod_has_a_placement_of_its_own(tmp_path):
    async with kube_node(tmp_path) as node:
        await registered(node)
        uuid = uuid_of(node.world, 1)
        node.put(pod("batch-0", OFFLINE_UID, role="offline", gpus=uuid))
        node.kubelet.held.append(("default", "batch-0", "work", RESOURCE, ["valve-slot-01"]))

        assert await node.kubelet.pre_start("valve-slot-01") is None
        assert await node.kubelet.pre_start("valve-slot-01") is None  # its container restarts


@scenario
async def test_a_pod_that_the_watch_has_not_brought_yet_is_asked_for(tmp_path):
    async with kube_node(tmp_path) as node:
        await registered(node)
        node.api.items = [pod("batch-0", OFFLINE_UID, role="offline", gpus=uuid_of(node.world, 0))]
        node.kubelet.held.append(("default", "batch-0", "work", RESOURCE, ["valve-slot-00"]))

        assert await node.kubelet.pre_start("valve-slot-00") is None
        assert node.room.book.pods[OFFLINE_UID].role is Role.OFFLINE


@pytest.mark.parametrize(
    ("who", "why"),
    [
        ({}, "the API server knows no pod default/batch-0"),
        ({"role": "online"}, "default/batch-0 is not offline work"),
        ({"role": "offline"}, "has no placement"),
        ({"role": "offline", "gpus": "GPU-gone"}, "placed on GPU-gone, which this node does not have"),
    ],
)
def test_a_container_that_must_not_start_is_told_why(tmp_path, who, why):
    async def body():
        async with kube_node(tmp_path) as node:
            await registered(node)
            if who:
                node.api.items = [pod("batch-0", OFFLINE_UID, **who)]
            node.kubelet.held.append(("default", "batch-0", "work", RESOURCE, ["valve-slot-00"]))

            assert why in await node.kubelet.pre_start("valve-slot-00")
            assert "held by no pod" in await node.kubelet.pre_start("valve-slot-01")

    asyncio.run(asyncio.wait_for(body(), 100))


@scenario
async def test_two_pods_placed_on_one_gpu_the_later_does_not_start(tmp_path):
    """The scheduler's own mistake, or two schedulers: the node is the second net."""
    async with kube_node(tmp_path) as node:
        await registered(node)
        uuid = uuid_of(node.world, 0)
        for index, name in enumerate(("first", "second")):
            node.put(pod(name, UIDS[index], role="offline", gpus=uuid))
            node.kubelet.held.append(("default", name, "work", RESOURCE, [f"valve-slot-0{index}"]))

        assert await node.kubelet.pre_start("valve-slot-00") is None
        assert await node.kubelet.pre_start("valve-slot-01") == f"valve: {uuid} still belongs to default/first"

        node.put(pod("first", UIDS[0], role="offline", gpus=uuid, phase="Succeeded"))

        assert await node.kubelet.pre_start("valve-slot-01") is None


@scenario
async def test_late_cdi_devices_hold_the_gpus_of_the_pod_that_got_the_slot(tmp_path):
    cdi_folder = tmp_path / "cdi"
    async with kube_node(tmp_path, backend="cdi", toolkit_folders=(str(cdi_folder),)) as node:
        await registered(node)
        cdi_folder.mkdir()
        uuids = [uuid_of(node.world, gpu) for gpu in (0, 1)]
        devices = [
            {"name": uuid, "containerEdits": {"deviceNodes": [{"path": f"/dev/nvidia{index}"}]}}
            for index, uuid in enumerate(uuids)
        ]
        (cdi_folder / "nvidia.json").write_text(json.dumps({"kind": "nvidia.com/gpu", "devices": devices}))
        node.put(pod("batch-0", OFFLINE_UID, role="offline", gpus=uuids[1]))
        node.kubelet.held.append(("default", "batch-0", "work", RESOURCE, ["valve-slot-00"]))

        given = await node.kubelet.allocate("valve-slot-00")

        assert [device.name for device in given.cdi_devices] == ["valve.gpu/gpu=valve-slot-00"]
        assert await node.kubelet.pre_start("valve-slot-00") is None
        written = json.loads((cdi_folder / "valve.gpu-valve-slot-00.json").read_text())
        assert written["devices"][0]["containerEdits"] == {"deviceNodes": [{"path": "/dev/nvidia1"}]}

        node.kubelet.held.clear()
        node.room.book.listener.pods_changed()
        await until(lambda: not (cdi_folder / "valve.gpu-valve-slot-00.json").exists())


# Identity


@scenario
async def test_a_peer_is_what_its_pod_s_annotation_says(tmp_path):
    async with kube_node(tmp_path) as node:
        book = node.room.book
        for item in (
            pod("chat-0", UIDS[0], role="online"),
            pod("batch-0", UIDS[1], role="offline"),
            pod("other-0", UIDS[2]),
        ):
            node.put(item)

        def ask(cgroup):
            return book.claim_of(Peer(process=None, uid=0, chain=(), cgroup=cgroup, comm=""))

        assert (ask(group(UIDS[0])).role, ask(group(UIDS[0])).name) == (Role.ONLINE, "default/chat-0")
        assert ask(group(UIDS[1])).role is Role.OFFLINE
        assert ask(group(UIDS[2])) is NO_CLAIM
        assert ask("/user.slice") is NO_CLAIM
        assert ask(group(UIDS[3])) is NOT_YET


@scenario
async def test_an_update_that_says_nothing_new_wakes_nobody(tmp_path):
    """A busy node's pods change their conditions all the time; each look asks the kubelet."""
    async with kube_node(tmp_path) as node:
        await registered(node)
        node.put(pod("other-0", UIDS[2], phase="Running"))
        changes = []
        node.room.book.listener.pods_changed = lambda: changes.append(1)

        node.put({**pod("other-0", UIDS[2], phase="Running"), "status": {"phase": "Running", "conditions": [{}]}})
        assert changes == []

        node.put(pod("other-0", UIDS[2], phase="Succeeded"))
        assert changes == [1]


# Reports


@scenario
async def test_the_report_says_what_can_be_harvested_and_why_not(tmp_path):
    async with kube_node(tmp_path) as node:
        await registered(node)
        serve_online(node)
        await until(lambda: any(report["harvestableGPUs"] == 1 for report in node.api.reports), 60)

        report = next(report for report in node.api.reports if report["harvestableGPUs"] == 1)
        assert node.api.created[0]["spec"] == {}
        assert (report["phase"], report["memoryMiB"]) == ("Harvesting", node.world.gate.gpus()[0].total_bytes >> 20)
        first, second = report["gpus"]
        assert (first["harvestable"], first["shim"], first["online"]) == (True, True, ["default/chat-0"])
        assert (second["harvestable"], second["reason"]) == (False, "no online pod holds it")
        conditions = {condition["type"]: condition["status"] for condition in report["conditions"]}
        assert conditions["Guarded"] == "False"


@scenario
async def test_a_gpu_whose_service_is_idle_is_reported_idle_before_any_offline_work_came(tmp_path):
    async with kube_node(tmp_path) as node:
        await registered(node)
        client = serve_online(node).client
        node.world.add_channel(client, gpu=0)
        await until(lambda: len(node.kubelet.healthy) == 1)

        node.world.work(client, ms=5)
        node.world.run(1000)

        assert [one.holding for one in node.world.gating.online.values()] == [False]


@scenario
async def test_the_room_s_figures_stand_beside_those_of_the_node(tmp_path):
    async with kube_node(tmp_path) as node:
        await registered(node)
        serve_online(node)
        await until(lambda: len(node.kubelet.healthy) == 1)

        page = render(node.world.node.status, node.room.metrics).decode()

        for line in (
            'valve_gpu_harvestable{gpu="0"} 1.0',
            'valve_gpu_guarded{gpu="1"} 0.0',
            "valve_slots_healthy 1.0",
            "valve_online_uninjected 0.0",
            'valve_reports_total{result="failed"} 0.0',
        ):
            assert line in page.splitlines()


@scenario
async def test_the_cluster_s_word_on_the_mode_is_followed(tmp_path):
    def observed(node):
        node.api.own = [{"metadata": {"name": "node-1", "resourceVersion": "1"}, "spec": {"mode": "observe"}}]

    async with kube_node(tmp_path, prepare=observed) as node:
        await until(lambda: node.world.brake.mode is Mode.OBSERVE)
        await registered(node)
        serve_online(node)
        await until(lambda: node.api.reports)

        assert node.api.reports[0]["phase"] == "Observing"
        assert node.kubelet.healthy == []


@scenario
async def test_a_policy_s_mode_gives_way_to_the_node_s_own_and_both_to_nothing(tmp_path):
    async with kube_node(tmp_path) as node:
        before = node.world.brake.mode
        for spec, expected in (
            ({"resolved": {"mode": "observe"}}, Mode.OBSERVE),
            ({"mode": "off", "resolved": {"mode": "observe"}}, Mode.OFF),
            ({"mode": "harvest", "resolved": {"drain": "a driver upgrade"}}, Mode.OFF),
            ({"mode": "nonsense"}, Mode.OFF),
            ({}, before),
        ):
            node.room.api.found({"spec": spec})
            assert node.world.brake.mode is expected


@scenario
async def test_a_pod_to_be_profiled_gets_its_memory_in_steps_from_its_first_second(tmp_path):
    async with kube_node(tmp_path) as node:
        ceiling = node.world.kv.lender._share
        node.room.api.found({"spec": {"resolved": {"profile": [OFFLINE_UID]}}})
        node.put(pod("batch-0", OFFLINE_UID, role="offline"))
        node.world.processes.add(400, cgroup=group(OFFLINE_UID))

        client = node.world.hello(400, Role.OFFLINE).client
        service = node.world.books.clients[client].service

        assert ceiling(service) == 0.25
        node.room.api.found({"spec": {}})
        assert ceiling(service) == 1.0


@scenario
async def test_of_pod_and_namespace_the_stricter_mode_holds(tmp_path):
    async with kube_node(tmp_path) as node:
        await registered(node)
        serve_online(node)
        await until(lambda: len(node.kubelet.healthy) == 1, 60)

        everybody = {"name": "*", "mode": "off"}
        node.room.api.found({"spec": {"resolved": {"namespaces": [everybody, {"name": "default", "mode": "observe"}]}}})
        await until(lambda: node.guarded() == [0], 60)
        assert node.room.known.verdicts[0].reason == "mode observe for default/chat-0/work"

        node.room.api.found({"spec": {}})
        await until(lambda: node.guarded() == [] and len(node.kubelet.healthy) == 1, 60)

        item = pod("chat-0", ONLINE_UID, role="online", limit=WHOLE, phase="Running")
        item["metadata"]["annotations"]["valve.gpu/mode"] = "off"
        node.put(item)
        await until(lambda: node.guarded() == [0], 60)


@scenario
async def test_a_pause_of_the_cluster_is_lifted_by_the_cluster_and_one_of_the_node_is_not(tmp_path):
    async with kube_node(tmp_path) as node:
        brake = node.world.brake
        await until(lambda: node.room.api.brake.synced, 60)
        node.room.api.found({"spec": {"paused": True}})
        assert (brake.is_paused, brake.paused_by) == (True, "GPUHarvestNode")
        node.room.api.found({"spec": {"paused": False}})
        assert not brake.is_paused

        brake.pause("an operator")
        node.room.api.found({"spec": {"paused": True}})
        node.room.api.found({"spec": {"paused": False}})
        assert brake.is_paused


def fleet_pause(**spec):
    return {"metadata": {"name": "valve-pause"}, "spec": {"paused": True, **spec}}


@scenario
async def test_the_brake_of_the_fleet_holds_at_once_whatever_the_own_object_says(tmp_path):
    async with kube_node(tmp_path) as node:
        brake, policies = node.world.brake, node.room.api.brake.sink
        await until(lambda: node.room.api.own.synced and node.room.api.brake.synced, 60)
        node.room.api.found({"spec": {}})
        policies.put(fleet_pause())
        assert (brake.is_paused, brake.paused_by) == (True, "HarvestPolicy valve-pause")

        node.room.api.found({"spec": {"mode": "harvest"}})
        assert brake.is_paused
        node.room.api.found({"spec": {"paused": True}})
        policies.drop(fleet_pause())
        assert brake.is_paused  # another policy wants it still

        node.room.api.found({"spec": {}})
        assert not brake.is_paused


@scenario
async def test_an_end_that_meets_the_first_list_of_pods_is_the_end(tmp_path):
    """Regression: before Python 3.12 wait_for swallows a cancellation that comes with its answer; SIGTERM then hung."""
    async with kube_node(tmp_path) as node:
        synced, running = asyncio.Event(), node._running
        node.room.api.pods.wait_synced = synced.wait  # the room has not made its first step
        await until(lambda: synced._waiters, 60)
        synced.set()
        await asyncio.sleep(0)  # now the list is there, and the room has not heard

        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

        assert running.cancelled()


@scenario
async def test_a_brake_for_some_nodes_is_left_to_the_controller(tmp_path):
    async with kube_node(tmp_path) as node:
        await until(lambda: node.room.api.brake.synced, 60)
        node.room.api.brake.sink.put(fleet_pause(nodeSelector={"pool": "a"}))
        assert not node.world.brake.is_paused


def test_a_pause_that_a_restart_found_is_lifted_only_when_everybody_was_heard(tmp_path):
    world = World(tmp_path)
    world.brake.pause("HarvestPolicy valve-pause")
    follower = Follower(world.brake, world.gating)

    follower.obey({"spec": {}})
    assert world.brake.is_paused  # whether the brake is still there, nobody has said

    follower.obey_brake(False)
    assert not world.brake.is_paused


@scenario
async def test_a_paused_node_says_so_whatever_its_bucket_holds(tmp_path):
    async with kube_node(tmp_path) as node:
        await until(lambda: node.api.reports and node.api.reports[-1]["phase"] == "Harvesting", 60)
        node.room.reports._settings = RateSettings(period_ns=3600 * 10**9)
        node.room.reports.rate = replace(node.room.reports.rate, tokens=0.0)
        node.room.api.brake.sink.put(fleet_pause())
        await until(lambda: node.api.reports[-1]["phase"] == "Paused", 60)


@scenario
async def test_an_api_server_that_is_away_stops_nothing_on_the_node(tmp_path):
    def away(node):
        node.api.is_away = True

    async with kube_node(tmp_path, prepare=away) as node:
        node.room.book.heard(ONLINE_UID, "default", "chat-0", {"annotations": {"valve.gpu/role": "online"}})
        node.kubelet.held.append(("default", "chat-0", "work", WHOLE, [uuid_of(node.world, 0)]))
        node.world.processes.add(200, cgroup=group(ONLINE_UID))

        assert node.world.hello(200, wanted=Role.NONE).last.role is Role.ONLINE
        await until(lambda: len(node.kubelet.healthy) == 1, 60)
