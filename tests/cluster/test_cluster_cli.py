"""`valve cluster` against a real API server, as an operator types it."""

import asyncio
import contextlib
import json
import subprocess
import sys
import time
from datetime import datetime, timezone
from pathlib import Path

import numpy as np
import pytest
from cluster_cli import shown, valve
from cluster_pods import PODS, submit, wait_bound
from valve_kube import names
from valve_kube.access import from_kubeconfig
from valve_kube.client import KubeClient
from valve_scheduler.placement.promise import YOUNG_TEXT
from valve_scheduler.placement.rank import REASON_TEXT, Reason
from valve_tools.cluster.controlplane import ControlPlane, wait_for
from valve_tools.cluster.fleet import MEMORY_MIB, create_nodes, node_name, offline_pod, report

from valved.kube.apiserver import ApiServer
from valved.kube.pods import PodBook

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

NODES = f"{names.API_PATH}/gpuharvestnodes"
PROFILES = f"/apis/{names.API_VERSION}/namespaces/default/offlineprofiles"


def test_status_lists_every_node_with_what_it_offers(control_plane: ControlPlane, nodes: int) -> None:
    owners = f"{names.API_PATH}/namespaces/default/offlineworkloads"
    for earlier in control_plane.api.get(owners)["items"]:  # of other tests
        control_plane.api.delete(f"{owners}/{earlier['metadata']['name']}")

    rows = shown(control_plane, "status")["nodes"]

    assert len(rows) == nodes
    assert {(row["phase"], row["harvestable"]) for row in rows} == {("Harvesting", 8)}
    told = valve(control_plane, "status").stdout
    assert "gpu-0039" in told
    assert "No offline job with an SLA has run yet." in told


def test_explain_says_what_the_scheduler_said(scheduling: ControlPlane) -> None:
    [name] = submit(scheduling.api, 1)
    wait_bound(scheduling.api, 1)
    scheduling.api.post(PODS, offline_pod("wishful", sla="0.5", profile="missing"))

    placed, waiting = shown(scheduling, "explain", name), shown(scheduling, "explain", "default/wishful")

    assert (placed["state"], len(placed["gpus"])) == ("placed", 1)
    assert waiting["state"] == "unplaceable"
    assert [refusal["text"] for refusal in waiting["refusals"]] == [REASON_TEXT[Reason.PROFILE]]
    assert "default/wishful is unplaceable" in valve(scheduling, "explain", "wishful").stdout


def test_an_sla_is_never_promised_by_the_first_minutes_of_a_node(scheduling: ControlPlane) -> None:
    """A node that is the only one the pod may use; its report goes through the schema of the API server."""
    api, name = scheduling.api, node_name(970)
    create_nodes(api, 1, first=970)
    profile = {"standaloneTokensPerSecond": 1_000, "curve": [{"freeMiB": 0, "tokensPerSecond": 1_000}]}
    body = {"apiVersion": names.API_VERSION, "kind": "OfflineProfile", "metadata": {"name": "young"}}
    api.post(PROFILES, body | {"spec": {"workload": {"model": "any"}, **profile}})
    api.patch(f"{PROFILES}/young/status", {"status": {"phase": "Ready"}})
    told = report(970, np.random.default_rng(1), idle=0.9)
    for gpu in told["gpus"]:
        gpu |= {"idle": {"1m": 0.9}, "observedSeconds": 120, "observedHourSeconds": 120}
    api.patch(f"{NODES}/{name}/status", {"status": told})
    pod = offline_pod("hopeful", sla="0.5", profile="young")
    pod["spec"]["nodeSelector"] = {"kubernetes.io/hostname": name}
    api.post(PODS, pod)

    wait_for("the refusal", lambda: YOUNG_TEXT in json.dumps(api.get(f"{PODS}/hopeful")["status"]))
    found = shown(scheduling, "explain", "hopeful")
    assert YOUNG_TEXT in [refusal["text"] for refusal in found["refusals"]]
    for gpu in told["gpus"]:
        gpu |= {"idle": {"1m": 0.9, "10m": 0.9, "1h": 0.9}, "observedSeconds": 3600, "observedHourSeconds": 3600}
    api.patch(f"{NODES}/{name}/status", {"status": {"gpus": told["gpus"]}})
    api.patch(f"/api/v1/nodes/{name}", {"metadata": {"annotations": {names.EPOCH: "1"}}})  # as the controller does
    wait_for("the place", lambda: api.get(f"{PODS}/hopeful")["spec"].get("nodeName") == name)
    api.delete(f"{PROFILES}/young")
    for path in (f"/api/v1/nodes/{name}", f"{NODES}/{name}"):
        api.delete(path)


def test_a_node_whose_clock_is_off_is_never_shown_as_silent(control_plane: ControlPlane, nodes: int) -> None:
    """The node's own words, with the clock of a machine that is two minutes behind."""
    api, name = control_plane.api, node_name(971)
    gpu = {"uuid": "GPU-0", "harvestable": True, "idle": {"1h": 0.5}, "freeMemory": [0.0] * 31 + [1.0]}
    status = {"phase": "Harvesting", "memoryMiB": MEMORY_MIB, "gpus": [gpu], "alignment": []}

    def behind_s() -> float:
        return time.time() - 120.0

    async def write(server: ApiServer, epoch: int) -> None:
        state = {None: "Unknown", False: "False", True: "True"}[server.clock.is_off]
        skew = {"type": "ClockSkew", "status": state, "reason": "ClockOff", "message": server.clock.text or ""}
        now = {"observedAt": text_of(behind_s()), "epoch": epoch}
        assert await server.write(status | now | {"conditions": [skew | {"lastTransitionTime": now["observedAt"]}]})

    async def twice() -> str:
        client = KubeClient(from_kubeconfig(str(control_plane.kubeconfig)))
        with contextlib.closing(client):
            server = ApiServer(client, name, PodBook(), lambda _: None, found=lambda _: None, wall_s=behind_s)
            await write(server, 1)
            await write(server, 2)
            return server.clock.text

    said = asyncio.run(twice())
    (row,) = [one for one in shown(control_plane, "status")["nodes"] if one["node"] == name]
    api.delete(f"{NODES}/{name}")

    assert said in [f"the clock of the node is {seconds} s behind" for seconds in (119, 120)]
    assert row["clock"] in ("119 s behind", "120 s behind", "121 s behind")
    assert -2.0 <= row["report_age_s"] < 60.0
    assert row["worth_gpus"] == pytest.approx(0.5, abs=0.05)


def text_of(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, timezone.utc).isoformat(timespec="milliseconds")


def test_top_shows_every_offline_pod_beside_the_fleet(scheduling: ControlPlane, nodes: int) -> None:
    submitted = submit(scheduling.api, 2)
    wait_bound(scheduling.api, 2)

    found = shown(scheduling, "top")

    assert {row["pod"] for row in found["pods"]} == {f"default/{name}" for name in submitted}
    assert all(row["node"].startswith("gpu-") and float(row["predicted"]) > 0 for row in found["pods"])
    assert found["fleet"]["gpus"] == nodes * 8
    assert f"default/{submitted[1]}" in valve(scheduling, "top", "--once").stdout


def test_explain_pod_is_the_same_by_either_name(scheduling: ControlPlane) -> None:
    [name] = submit(scheduling.api, 1)
    wait_bound(scheduling.api, 1)
    command = [str(Path(sys.executable).parent / "valve"), "explain", "pod", name]
    access = f"--kubeconfig={scheduling.kubeconfig}"

    done = subprocess.run([*command, access], capture_output=True, text=True, check=False)

    assert done.stdout == valve(scheduling, "explain", name).stdout
    assert f"default/{name} is placed on gpu-" in done.stdout


def test_pods_without_a_shim_fail_the_check_before_an_upgrade(control_plane: ControlPlane) -> None:
    bare = {"limits": {"nvidia.com/gpu": "1"}}
    container = {"name": "serve", "image": "example.invalid/online:1", "resources": bare}
    metadata = {"name": "bare", "annotations": {"valve.gpu/role": "online"}}
    spec = {"containers": [container], "nodeName": "anywhere", "terminationGracePeriodSeconds": 0}
    assert valve(control_plane, "coverage").returncode == 0

    control_plane.api.post(PODS, {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})
    done = valve(control_plane, "coverage")

    assert done.returncode == 1
    assert "default/bare" in done.stdout
    assert "the webhook did not see it" in done.stdout


def test_a_pod_that_does_not_exist_is_an_error_that_names_it(control_plane: ControlPlane) -> None:
    done = valve(control_plane, "explain", "nobody")

    assert (done.returncode, done.stdout) == (1, "")
    assert 'pods "nobody" not found' in done.stderr
