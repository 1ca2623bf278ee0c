"""`valve cluster` against a real API server, as an operator types it."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cluster_pods import PODS, submit, wait_bound
from valve_scheduler.placement.rank import REASON_TEXT, Reason
from valve_tools.cluster.controlplane import ControlPlane
from valve_tools.cluster.fleet import offline_pod

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]


def valve(plane: ControlPlane, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).parent / "valve"), "cluster", *arguments, f"--kubeconfig={plane.kubeconfig}"]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def shown(plane: ControlPlane, *arguments: str) -> Any:
    done = valve(plane, *arguments, "--json")
    assert done.returncode == 0, done.stderr

    return json.loads(done.stdout)


def test_status_lists_every_node_with_what_it_offers(control_plane: ControlPlane, nodes: int) -> None:
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
