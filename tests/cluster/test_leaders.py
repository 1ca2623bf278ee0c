"""Leaders that die while pods are bound, and leaders without extender: no GPU given twice, nothing placed without one.

In a module of its own: a scheduler that elects nobody, as other modules have, would place the same pods beside these.
VALVE_FAULTS says how often a leader dies (default 3).
"""

import functools
import os
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from cluster_pods import PODS, held_gpus, submit, wait_bound
from valve_tools.cluster.controlplane import ControlPlane, wait_for
from valve_tools.cluster.fleet import bound_pods, delete_pods, offline_pod

FAULTS = int(os.environ.get("VALVE_FAULTS", "3"))
PODS_AT_ONCE = 120
LEASE = "/apis/coordination.k8s.io/v1/namespaces/default/leases/valve-scheduler"

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300 + 90 * FAULTS)]


@pytest.fixture
def pair(control_plane: ControlPlane, nodes: int) -> Iterator[ControlPlane]:
    """Two schedulers with an extender each, as two pods of the Deployment, under one lease of two seconds."""
    if os.geteuid() != 0:
        pytest.skip("needs root: each scheduler gets a hostname of its own")
    for host in ("a", "b"):
        election = ("--lease-namespace=default",)
        port, probes = control_plane.start_extender(name=f"extender-{host}", arguments=election, hostname=host)
        wait_for("an extender", lambda probes=probes: urllib.request.urlopen(f"http://127.0.0.1:{probes}/healthz"))
        control_plane.start_scheduler(port, name=f"scheduler-{host}", lease="default", hostname=host)
    yield control_plane
    for name in [f"{kind}-{host}" for host in ("a", "b") for kind in ("scheduler", "extender")]:
        if name in control_plane.processes:
            control_plane.kill(name)
    control_plane.api.delete(LEASE)


def leader(plane: ControlPlane) -> str:
    def held() -> str:
        return str(plane.api.get(LEASE)["spec"].get("holderIdentity") or "")

    return str(wait_for("a leader", held)).partition("_")[0]


def is_other_leader(plane: ControlPlane, former: str) -> bool:
    return leader(plane) != former


def alive(plane: ControlPlane, name: str) -> bool:
    """As the kubelet would: a scheduler that lost its lease ends itself, and 2 s are soon lost on a busy machine."""
    if plane.processes[name].poll() is not None:
        plane.restart(name)

    return True


def wait_all_bound(plane: ControlPlane, left: str) -> list[dict[str, Any]]:
    def all_bound() -> list[dict[str, Any]]:
        found = list(bound_pods(plane.api))
        return found if alive(plane, left) and len(found) >= PODS_AT_ONCE else []

    return list(wait_for("the rest", all_bound, 240))


def test_a_leader_killed_while_it_binds_is_followed_by_one_that_knows_all_its_placements(
    pair: ControlPlane,
) -> None:
    for round_number in range(FAULTS):
        submit(pair.api, PODS_AT_ONCE)
        wait_bound(pair.api, 40)
        first = leader(pair)

        pair.kill(f"scheduler-{first}")
        pods = wait_all_bound(pair, f"scheduler-{'ab'.replace(first, '')}")

        assert set(held_gpus(pods).values()) == {1}, f"round {round_number}"
        wait_for("another leader", functools.partial(is_other_leader, pair, first))
        pair.restart(f"scheduler-{first}")
        delete_pods(pair.api)


def test_schedulers_without_their_extenders_place_nothing_and_go_on_when_those_return(pair: ControlPlane) -> None:
    """ignorable is false: kube-scheduler must not fall back to its own binder, which knows no GPUs."""
    for host in ("a", "b"):
        pair.kill(f"extender-{host}")
    try:
        pair.api.post(PODS, offline_pod("waits"))
        wait_for("a failed attempt", lambda: both_alive(pair) and refused(pair))
        placed = list(bound_pods(pair.api))
    finally:
        for host in ("a", "b"):
            pair.restart(f"extender-{host}")

    assert placed == []
    wait_for("the pod", lambda: both_alive(pair) and list(bound_pods(pair.api)), 120)
    assert set(held_gpus(wait_bound(pair.api, 1)).values()) == {1}


def both_alive(plane: ControlPlane) -> bool:
    return alive(plane, "scheduler-a") and alive(plane, "scheduler-b")


def refused(plane: ControlPlane) -> bool:
    return any('pod="default/waits"' in plane.log(f"scheduler-{host}") for host in ("a", "b"))
