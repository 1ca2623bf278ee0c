"""A real kubelet and containerd: online pods get the shim, offline work runs beside them and stops for their requests.

One node with one emulated GPU; its processes are restarted under running pods, and killed before new ones start.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster_helm import Helm
from node_pods import OfflinePod, OnlinePod
from valve_kube import names
from valve_tools.cluster.api import ApiRefused
from valve_tools.cluster.controlplane import ControlPlane, wait_for
from valve_tools.cluster.node import NAME, RealNode
from valve_tools.cluster.webhook import start_webhook
from valve_tools.cluster.workpods import PODS
from valve_tools.emulator import node as emulated
from valve_tools.emulator.client import Emulator

from valved.cli.client import NodeClient

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

ONLINE = {names.ROLE: names.ONLINE}


@pytest.fixture(scope="module")
def valved(node: RealNode) -> RealNode:
    """valved on the node, injecting over NRI."""
    node.start_valved()
    wait_for(
        "slots on the node",
        lambda: names.RESOURCE in node.plane.api.get(f"/api/v1/nodes/{NAME}")["status"]["allocatable"],
    )
    return node


def status(node: RealNode) -> Any:
    connection = NodeClient(node.run_dir)
    try:
        return connection.status()
    finally:
        connection.close()


def service(node: RealNode, pod: str) -> Any:
    """The service of a pod once somebody in it is registered."""

    def look() -> Any:
        return next((one for one in status(node).services if one.name == f"default/{pod}" and one.pids), None)

    return wait_for(f"{pod} is registered", look)


def placed(node: RealNode) -> dict[str, Any]:
    """What webhook and scheduler would have written into an offline pod."""
    libraries = f"{node.shim_folder}/current/libvalve.so:{emulated.LIBRARIES}/libfakenv.so"
    return {
        "annotations": {names.ROLE: names.OFFLINE, names.GPUS: node.uuids[0]},
        "env": {"LD_PRELOAD": libraries},
        "limit": names.RESOURCE,
    }


def both(node: RealNode, suffix: str) -> tuple[OnlinePod, OfflinePod]:
    """An online pod and offline work beside it, running."""
    online = OnlinePod(node, f"chat-{suffix}", annotations=ONLINE)
    online.wait_ready()
    service(node, online.name)
    # Until its process had joined it was one that nobody hears, and the kubelet turns pods away from a guarded GPU.
    wait_for("the guard is off", lambda: not status(node).gpus[0].guarded_because)
    wait_for("a slot", lambda: node.allocatable(names.RESOURCE) == 1)
    offline = wait_for("the kubelet gives the GPU", lambda: admitted(node, f"batch-{suffix}"))
    offline.wait_beating()
    return online, offline


def admitted(node: RealNode, name: str) -> OfflinePod | None:
    """The kubelet hears a moment later than `status` that the GPU is open. It turns pods away until then, and who owns
    one makes another."""
    pod = OfflinePod(node, name, **placed(node))
    try:
        node.pods.wait_phase(pod.name)
    except AssertionError as ended:
        if "UnexpectedAdmissionError" not in str(ended):
            raise
        node.pods.delete(pod.name)
        return None
    return pod


def gates(node: RealNode, online: OnlinePod, offline: OfflinePod) -> bool:
    """A launch stops offline work, and it runs again afterwards. One that finds it stopped already, for whatever else
    holds the GPU a moment after a start, is followed by another."""
    before = service(node, online.name).preemptions

    def is_booked() -> bool:
        offline.wait_beating()
        online.launch()
        return bool(service(node, online.name).preemptions > before)

    wait_for("a launch is booked", is_booked)
    offline.wait_beating()
    return True


def standing(node: RealNode, offline: OfflinePod) -> int:
    """How far it came, once its GPU is gated, channels are off there and the card runs nothing in them; else 0.

    A GPU counts as gated from the order on: what runs may still beat until the driver call has returned."""
    if not status(node).gpus[0].gated:
        return 0
    with Emulator(node.folder / "emu") as emulator:
        off = emulator.state().disabled
    return offline.beats if off and not any(channel.active for channel in off) else 0


def valve(node: RealNode, *arguments: str) -> None:
    """The command, typed on the node."""
    command = [str(Path(sys.executable).parent / "valve"), *arguments]
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, "VALVE_RUN_DIR": str(node.run_dir)})


def of(entries: list[dict[str, Any]], **who: str) -> dict[str, Any]:
    return next((entry for entry in entries if entry.items() >= who.items()), {})


def starts(pod: dict[str, Any]) -> tuple[str, int]:
    return pod["metadata"]["uid"], sum(one["restartCount"] for one in pod["status"]["containerStatuses"])


def test_online_work_is_injected_as_it_is_created_and_offline_work_stops_for_its_requests(valved: RealNode) -> None:
    online, offline = both(valved, "nri")

    assert gates(valved, online, offline)
    assert [one["name"] for one in valved.pods.get(online.name)["spec"]["containers"][0]["env"]].count(
        "LD_PRELOAD"
    ) == 1
    roles = {one.name: one.role for one in status(valved).services}
    assert (roles["default/chat-nri"], roles["default/batch-nri"]) == (1, 2)
    # A report comes when it is due, so the last one may be of the pods of another test.
    reported = {"harvestable": True, "online": ["default/chat-nri"], "shim": True}
    wait_for("a report", lambda: [gpu for gpu in valved.report().get("gpus", []) if gpu.items() >= reported.items()])
    uid = valved.pods.get(offline.name)["metadata"]["uid"]
    wait_for("harvest on record", lambda: of(valved.report()["offline"], podUID=uid).get("harvestSeconds"))
    wait_for("what it lent", lambda: of(valved.report()["services"], pod="chat-nri").get("lentSeconds"))
    online.close()


@pytest.mark.parametrize("how", ["killed", "replaced"])
@pytest.mark.parametrize("victim", ["kubelet", "containerd", "gpuplugin", "valved"])
def test_nothing_is_lost_when_a_process_of_the_node_goes_and_comes_back_under_running_pods(
    valved: RealNode, victim: str, how: str
) -> None:
    online, offline = both(valved, f"{victim}-{how}")
    before = [starts(valved.pods.get(pod.name)) for pod in (online, offline)]

    with valved.back_afterwards(victim):
        if how == "replaced":
            valved.replace(victim)
        else:
            valved.plane.kill(victim)
            online.launch()  # nobody of the node is asked
            valved.plane.restart(victim)
    wait_for("the slots are back", lambda: valved.allocatable(names.RESOURCE) == 1, 240)
    wait_for("the GPU is", lambda: valved.allocatable(names.ONLINE_RESOURCE) == 1, 240)

    assert gates(valved, online, offline)
    assert [starts(valved.pods.get(pod.name)) for pod in (online, offline)] == before
    online.close()


def test_without_an_api_server_pods_run_on_and_the_node_is_paused_by_hand(valved: RealNode) -> None:
    online, offline = both(valved, "alone")
    before = [starts(valved.pods.get(pod.name)) for pod in (online, offline)]

    valved.plane.kill("kube-apiserver")
    try:
        assert gates(valved, online, offline)
        valve(valved, "pause")
        wait_for("offline stands", lambda: standing(valved, offline))
        online.launch()
        assert standing(valved, offline)
        valve(valved, "resume")
        offline.wait_beating()
    finally:
        valved.plane.restart("kube-apiserver")
    epoch = wait_for("the API server", lambda: valved.report()["epoch"])
    wait_for("a report again", lambda: valved.report()["epoch"] > epoch)

    assert gates(valved, online, offline)
    assert [starts(valved.pods.get(pod.name)) for pod in (online, offline)] == before
    online.close()


def test_an_upgrade_hands_running_pods_over_and_never_opens_the_gate_in_between(valved: RealNode) -> None:
    """An open request: offline work has to stand from the predecessor's last moment to the successor's first."""
    online, offline = both(valved, "upgrade")
    before = [starts(valved.pods.get(pod.name)) for pod in (online, offline)]
    online.begin(60_000_000)  # a minute of work: busy all the time
    beats = wait_for("offline stands", lambda: standing(valved, offline))

    with valved.back_afterwards("valved"):
        valved.upgrade_valved()
    wait_for("both are back", lambda: len([one for one in status(valved).services if one.pids]) == 2)

    assert [gpu.gated for gpu in status(valved).gpus] == [True]
    assert offline.beats == beats
    assert [starts(valved.pods.get(pod.name)) for pod in (online, offline)] == before
    online.close()


def test_no_deleted_pod_is_left_to_the_kubelet_with_its_channels_off(valved: RealNode) -> None:
    """Its process is the first of its container and has no handler: the kubelet's SIGTERM does not end it."""
    online, offline = both(valved, "deleted")
    online.begin(60_000_000)  # a minute of work: busy all the time
    wait_for("offline stands", lambda: standing(valved, offline))

    valved.plane.api.delete(f"{PODS}/{offline.name}", {"gracePeriodSeconds": 10})
    wait_for("its end", lambda: valved.pods.is_gone(offline.name), 120)

    # Only of one that was there to be killed. The file has it up to a second later, which may be after the pod's end.
    words, audit = f"the time of its pod default/{offline.name} is over", valved.run_dir / "audit.jsonl"
    wait_for("the audit has its end", lambda: words in audit.read_text())
    online.close()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_an_online_pod_starts_whatever_became_of_valved(valved: RealNode, how: signal.Signals) -> None:
    """Dead: nobody injects. Stopped: the runtime waits its 2 s for the plugin, once, and goes on without it."""
    victim = valved.plane.processes["valved"]
    # To one that was only stopped, the runtime alone has hung up.
    with valved.back_afterwards("valved" if how is signal.SIGKILL else "containerd"):
        victim.send_signal(how)
        if how is signal.SIGKILL:
            victim.wait()
        online = OnlinePod(valved, f"brave-{how.name.lower()}", annotations=ONLINE)
        online.wait_ready()
        online.launch()
        if how is signal.SIGSTOP:
            victim.send_signal(signal.SIGCONT)
        else:
            valved.plane.restart("valved")

    def named() -> bool:
        report = valved.report()
        bare = [one for one in report.get("conditions", []) if one["type"] == "OnlineUninjected"]
        gpu = report["gpus"][0]
        return (
            bool(bare) and bare[0]["status"] == "True" and online.name in bare[0]["message"] and not gpu["harvestable"]
        )

    wait_for("the pod without a shim is on record", named, 90)
    valved.pods.delete(online.name)
    wait_for("its GPU is not guarded any more", lambda: not valved.report()["gpus"][0]["online"], 60)
    online.close()


def test_an_idle_service_s_gpu_is_known_as_idle_before_any_offline_work_came(valved: RealNode) -> None:
    """From a daemon that begins under it, as after an upgrade: nothing it measured is older than the service."""
    online = OnlinePod(valved, "chat-idle", annotations=ONLINE)
    online.wait_ready()
    service(valved, online.name)
    with valved.back_afterwards("valved"):
        valved.plane.kill("valved")
        valved.plane.restart("valved")
    before = valved.report()["epoch"]

    def measured() -> Any:
        report = valved.report()
        gpu = report["gpus"][0]
        return (
            report["epoch"] > before + 1
            and gpu["online"]
            and max(gpu["idle"].values(), default=0.0) > 0
            and sum(gpu["freeMemory"]) > 0.9
        )

    wait_for("idle and free", measured)
    online.close()


def test_an_offline_pod_without_a_placement_is_kept_from_starting(valved: RealNode) -> None:
    """Nobody chose GPUs for it: it was bound past our scheduler."""
    online = OnlinePod(valved, "chat-open", annotations=ONLINE)
    online.wait_ready()
    wait_for("a slot", lambda: valved.allocatable(names.RESOURCE) == 1)
    stray = {**placed(valved), "annotations": {names.ROLE: names.OFFLINE}}
    OfflinePod(valved, "stray", **stray)

    def refused() -> str:
        events = valved.plane.api.get("/api/v1/namespaces/default/events")["items"]
        texts = [one["message"] for one in events if one["involvedObject"]["name"] == "stray"]
        return next((text for text in texts if "has no placement" in text), "")

    assert wait_for("an event that says why", refused)
    online.close()


@pytest.fixture
def scheduled(control_plane: ControlPlane, valved: RealNode, helm: Helm) -> Iterator[RealNode]:
    """The whole of it: the chart's webhook and policies, a stock kube-scheduler with the extender."""
    api = control_plane.api
    runtime = {"apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass", "metadata": {"name": "nvidia"}}
    api.post("/apis/node.k8s.io/v1/runtimeclasses", runtime | {"handler": "nvidia"})
    helm.install()
    dry = {
        "metadata": {"name": "dry", "annotations": {names.ROLE: names.OFFLINE}},
        "spec": {"containers": [{"name": "a", "image": "i"}]},
    }
    port, _ = control_plane.start_extender()
    control_plane.start_scheduler(port)
    try:
        start_webhook(
            control_plane,
            f"--shim-folder={valved.shim_folder}",
            f"--client-folder={valved.run_dir}/client",
        )
        api.patch("/api/v1/namespaces/default", {"metadata": {"labels": {names.INJECT: "enabled"}}})
        wait_for("the webhook", lambda: api.post(f"{PODS}?dryRun=All", dry))
        yield valved
    finally:
        for name in ("webhook", "kube-scheduler", "extender"):
            if name in control_plane.processes:
                control_plane.kill(name)
        api.patch("/api/v1/namespaces/default", {"metadata": {"labels": {names.INJECT: None}}})
        helm.uninstall()
        api.delete("/apis/node.k8s.io/v1/runtimeclasses/nvidia")
        # The API server goes on refusing for a moment what policies and webhook refused that are gone.
        dry["metadata"]["annotations"] |= {names.GPUS: valved.uuids[0]}
        wait_for("nobody refuses a placement", lambda: api.post(f"{PODS}?dryRun=All", dry))


def test_from_two_plain_pods_to_harvested_time(scheduled: RealNode) -> None:
    """What a user writes, through webhook, scheduler, kubelet and containerd, to kernels that stop for requests."""
    online = OnlinePod(scheduled, "chat-0", annotations=ONLINE)
    stored = online.made
    preload = next(one["value"] for one in stored["spec"]["containers"][0]["env"] if one["name"] == "LD_PRELOAD")
    online.wait_ready()
    service(scheduled, "chat-0")
    wait_for("a harvestable GPU", lambda: scheduled.report().get("harvestableGPUs") == 1)

    offline = OfflinePod(scheduled, "batch-0", annotations={names.ROLE: names.OFFLINE}, on_node=False)
    pod = scheduled.pods.wait_phase("batch-0")
    offline.wait_beating()

    assert preload.startswith(f"{scheduled.shim_folder}/current/libvalve.so:")
    assert stored["metadata"]["annotations"][names.INJECTION] == "ok"
    assert pod["metadata"]["annotations"][names.GPUS] == scheduled.uuids[0]
    assert gates(scheduled, online, offline)
    online.close()


def test_the_daemon_needs_no_rights_but_those_of_its_account_on_its_node(scheduled: RealNode) -> None:
    """With the token of a pod of this node, as the kubelet mounts it, under the chart's RBAC and policies."""
    pods = "/api/v1/namespaces/valve-system/pods"
    stand_in = scheduled.pods.make("daemon", ["/box/sleep", "1000"], serviceAccountName="valve-daemon")
    pod = scheduled.plane.api.post(pods, stand_in)
    access = scheduled.plane.account_kubeconfig("valve-system", "valve-daemon", pod)
    said = len(scheduled.plane.log("valved"))
    scheduled.plane.kill("valved")
    try:
        scheduled.start_valved(kubeconfig=access)
        epoch = wait_for("a report", lambda: scheduled.report().get("epoch"))
        wait_for("the next report", lambda: scheduled.report()["epoch"] > epoch)
        online = OnlinePod(scheduled, "chat-rights", annotations=ONLINE)
        online.wait_ready()
        service(scheduled, online.name)  # its role came over the watch, or over NRI
        log = scheduled.plane.log("valved")[said:]

        assert "403 Forbidden" not in log
        assert "report not written" not in log
        online.close()
    finally:
        scheduled.plane.kill("valved")
        scheduled.start_valved()
        scheduled.plane.api.delete(f"{pods}/daemon", {"gracePeriodSeconds": 0})


def test_late_cdi_devices_reach_the_container(node: RealNode, valved: RealNode) -> None:
    """containerd resolves the names that Allocate gave only when PreStart has written what they stand for."""
    folder = node.folder / "cdi"
    folder.mkdir(exist_ok=True)
    edits = {"env": ["PROOF=written-at-the-last-moment"]}
    toolkit = {
        "cdiVersion": "0.5.0",
        "kind": "nvidia.com/gpu",
        "devices": [{"name": node.uuids[0], "containerEdits": edits}],
    }
    (folder / "nvidia.json").write_text(json.dumps(toolkit))
    node.plane.kill("valved")
    node.start_valved(backend="cdi")
    try:
        online = OnlinePod(node, "chat-cdi", annotations=ONLINE)
        online.wait_ready()
        wait_for("a slot", lambda: node.allocatable(names.RESOURCE) == 1)
        node.pods.create(node.pods.make("batch-cdi", ["/box/sh", "-c", "echo $PROOF"], **placed(node)))
        node.pods.wait_phase("batch-cdi", "Succeeded")

        assert "written-at-the-last-moment" in node.pods.log("batch-cdi")
        wait_for("the description is gone", lambda: [path.name for path in folder.iterdir()] == ["nvidia.json"])
        online.close()
    finally:
        node.plane.kill("valved")
        node.start_valved()


def test_a_pod_to_which_its_node_cannot_give_its_gpus_is_moved_by_the_word_of_the_kubelet(
    node: RealNode, valved: RealNode
) -> None:
    """No CDI description, so valved refuses the pod; then one of a device file that is gone, so containerd does."""
    api, folder = node.plane.api, node.folder / "cdi"
    folder.mkdir(exist_ok=True)
    toolkit = folder / "nvidia.json"
    toolkit.unlink(missing_ok=True)
    gone = {"deviceNodes": [{"path": "/dev/nvidia-gone"}]}
    devices = [{"name": node.uuids[0], "containerEdits": gone}]
    often = {"apiVersion": names.API_VERSION, "kind": "HarvestPolicy", "metadata": {"name": "often"}}
    api.post(f"{names.API_PATH}/harvestpolicies", often | {"spec": {"eviction": {"budgetSeconds": 1}}})
    node.plane.kill("valved")
    node.start_valved(backend="cdi")
    node.plane.start_controller("--namespace=default", "--monitor-every=0.5", "--stuck-after=1")

    def why_evicted(name: str) -> str:
        events = api.get("/api/v1/namespaces/default/events")["items"]
        said = [one for one in events if (one["reason"], one["involvedObject"]["name"]) == ("PlaceLost", name)]
        return str(said[0]["message"]) if said else ""

    try:
        online = OnlinePod(node, "chat-denied", annotations=ONLINE)
        online.wait_ready()
        for name, words in (("undescribed", "keeps no CDI description"), ("fileless", "/dev/nvidia-gone")):
            wait_for("a slot", lambda: node.allocatable(names.RESOURCE) == 1)
            denied_pod(node, name)
            assert words in wait_for("its eviction", lambda name=name: why_evicted(name))
            wait_for("its end", lambda name=name: node.pods.is_gone(name))
            description = {"cdiVersion": "0.5.0", "kind": "nvidia.com/gpu", "devices": devices}
            toolkit.write_text(json.dumps(description))
        online.close()
    finally:
        toolkit.unlink(missing_ok=True)
        api.delete(f"{names.API_PATH}/harvestpolicies/often")
        node.plane.kill("controller")
        node.plane.kill("valved")
        node.start_valved()


def denied_pod(node: RealNode, name: str) -> None:
    """One that something would make anew: its owner exists, or the garbage collector would take the pod away."""
    kind, path = {"apiVersion": "v1", "kind": "ConfigMap"}, "/api/v1/namespaces/default/configmaps"
    uid = node.plane.api.post(path, kind | {"metadata": {"name": name}})["metadata"]["uid"]
    pod = node.pods.make(name, ["/box/sleep", "1000"], labels={names.ROLE: names.OFFLINE}, **placed(node))
    pod["metadata"]["ownerReferences"] = [{**kind, "name": name, "uid": uid, "controller": True}]
    node.pods.create(pod)


def test_a_user_may_not_forge_a_placement(scheduled: RealNode) -> None:
    forged = scheduled.pods.make(
        "thief", ["/box/sh"], annotations={names.ROLE: names.OFFLINE, names.GPUS: scheduled.uuids[0]}
    )

    with pytest.raises(ApiRefused):
        scheduled.pods.create(forged)
