"""Offline work that uses a GPU of a real node without the shim: found, frozen, reported, evicted by the controller."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from node_pods import OfflinePod
from valve_kube import names
from valve_tools.cluster.api import ApiRefused
from valve_tools.cluster.controlplane import wait_for
from valve_tools.cluster.node import NAME, RealNode
from valve_tools.cluster.workpods import PODS

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]


@pytest.fixture
def watched(node: RealNode) -> Iterator[RealNode]:
    """valved on the node; the controller is started by the test."""
    node.start_valved()
    wait_for(
        "slots on the node",
        lambda: names.RESOURCE in node.plane.api.get(f"/api/v1/nodes/{NAME}")["status"]["allocatable"],
    )
    yield node
    for name in ("controller", "valved"):
        if name in node.plane.processes:
            node.plane.kill(name)


def states_of(pod: OfflinePod) -> set[str]:
    """Of its processes, as /proc has them; T is one that stands."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if f"/{pod.name}/page".encode() in (entry / "cmdline").read_bytes():
                found.add((entry / "stat").read_text().rpartition(") ")[2][0])
        except OSError:  # it ended meanwhile
            continue
    return found


def is_gone(node: RealNode, name: str) -> bool:
    try:
        pod: dict[str, Any] = node.plane.api.get(f"{PODS}/{name}")
    except ApiRefused:
        return True
    return "deletionTimestamp" in pod["metadata"]


@pytest.mark.parametrize("said_by", ["labels", "annotations"])
def test_an_offline_pod_that_came_without_the_shim_never_runs_on(watched: RealNode, said_by: str) -> None:
    """It never asked for a slot, so nothing was mounted into it; the GPU it reached all the same.

    One that is offline by an annotation alone is not in the controller's watch."""
    name = f"sneak-{said_by}"
    sneak = OfflinePod(watched, name, **{said_by: {names.ROLE: names.OFFLINE}})
    uid = sneak.made["metadata"]["uid"]
    watched.pods.wait_phase(sneak.name)

    wait_for("it is frozen", lambda: states_of(sneak) == {"T"}, 45)
    report = wait_for("the report", lambda: (found := watched.report()).get("ungated") and found, 45)

    assert [one["podUID"] for one in report["ungated"]] == [uid]
    (said,) = (one for one in report["conditions"] if one["type"] == "OfflineUngated")
    assert (said["status"], f"default/{name}" in said["message"]) == ("True", True)
    assert not any(gpu["harvestable"] for gpu in report["gpus"])
    watched.plane.start_controller("--namespace=default", "--monitor-every=1")
    wait_for("its eviction", lambda: is_gone(watched, sneak.name), 45)
