"""Schedulers, extenders and API servers that die while pods are bound: nothing half done, no GPU given twice."""

import os
import urllib.request
from collections.abc import Iterator

import pytest
from cluster_pods import PODS, held_gpus, submit, wait_bound
from valve_tools.cluster.controlplane import ControlPlane, wait_for
from valve_tools.cluster.fleet import bound_pods, delete_pods, offline_pod

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

PODS_AT_ONCE = 120
LEASE = "/apis/coordination.k8s.io/v1/namespaces/default/leases/valve-scheduler"


@pytest.mark.parametrize("already_bound", [5, 60])
def test_an_api_server_killed_while_pods_are_bound_comes_back_to_whole_placements(
    scheduling: ControlPlane, already_bound: int
) -> None:
    submit(scheduling.api, PODS_AT_ONCE)
    wait_bound(scheduling.api, already_bound)

    scheduling.kill("kube-apiserver")
    scheduling.restart("kube-apiserver")

    assert set(held_gpus(wait_bound(scheduling.api, PODS_AT_ONCE)).values()) == {1}


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
    for host in ("a", "b"):
        control_plane.kill(f"scheduler-{host}")
        control_plane.kill(f"extender-{host}")
    control_plane.api.delete(LEASE)


def leader(plane: ControlPlane) -> str:
    def held() -> str:
        return str(plane.api.get(LEASE)["spec"].get("holderIdentity") or "")

    return str(wait_for("a leader", held)).partition("_")[0]


def test_a_leader_killed_while_it_binds_is_followed_by_one_that_knows_all_its_placements(
    pair: ControlPlane,
) -> None:
    for round_number in range(2):
        submit(pair.api, PODS_AT_ONCE)
        wait_bound(pair.api, 40)
        first = leader(pair)

        pair.kill(f"scheduler-{first}")
        pods = wait_bound(pair.api, PODS_AT_ONCE)

        assert set(held_gpus(pods).values()) == {1}, f"round {round_number}"
        assert leader(pair) != first
        pair.restart(f"scheduler-{first}")
        delete_pods(pair.api)


def test_a_leader_without_its_extender_places_nothing_wrong_and_goes_on_when_it_returns(pair: ControlPlane) -> None:
    """ignorable is false: kube-scheduler must not fall back to its own binder, which knows no GPUs."""
    first = leader(pair)
    pair.kill(f"extender-{first}")
    pair.api.post(PODS, offline_pod("waits"))
    wait_for("a failed attempt", lambda: "waits" in pair.log(f"scheduler-{first}"))

    assert not list(bound_pods(pair.api))
    pair.restart(f"extender-{first}")

    assert set(held_gpus(wait_bound(pair.api, 1)).values()) == {1}
