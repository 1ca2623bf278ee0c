"""The extender killed at every step of bind, again and again: annotation and node agree, and no GPU is given twice.

VALVE_KILLS says how often per step (default 10; by hand 125, which is 500 in all).
"""

import os
import urllib.request
from collections.abc import Iterator

import pytest
from cluster_gauntlet import Gauntlet, Step
from cluster_pods import PODS, held_gpus, wait_bound
from valve_tools.cluster.controlplane import ControlPlane, wait_for
from valve_tools.cluster.fleet import bound_pods, delete_pods, offline_pod

KILLS = int(os.environ.get("VALVE_KILLS", "10"))
PER_ROUND = 3

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120 + 30 * KILLS)]


@pytest.fixture(scope="module")
def gauntlet(control_plane: ControlPlane, nodes: int) -> Iterator[Gauntlet]:
    """kube-scheduler, gauntlet, extender, gauntlet, API server."""
    access = control_plane.folder / "gauntlet.kubeconfig"
    port, probes = control_plane.start_extender(kubeconfig=access)
    control_plane.kill("extender")
    with Gauntlet(port, control_plane.port, lambda: control_plane.kill("extender")) as between:
        control_plane.write_kubeconfig(access, f"http://127.0.0.1:{between.to_api}")
        between.probes = probes
        start(control_plane, between)
        control_plane.start_scheduler(between.to_extender)
        yield between
        control_plane.kill("kube-scheduler")
        control_plane.kill("extender")


def start(plane: ControlPlane, between: Gauntlet) -> None:
    plane.restart("extender")
    wait_for("the extender", lambda: urllib.request.urlopen(f"http://127.0.0.1:{between.probes}/readyz"))


@pytest.mark.parametrize("step", list(Step), ids=[step.name.lower() for step in Step])
def test_an_extender_killed_in_the_middle_of_a_bind_leaves_it_done_or_undone(
    control_plane: ControlPlane, gauntlet: Gauntlet, nodes: int, step: Step
) -> None:
    submitted = 0
    for number in range(KILLS):
        if submitted + PER_ROUND > nodes * 8:
            delete_pods(control_plane.api)
            submitted = 0
        gauntlet.arm(step)
        for index in range(PER_ROUND):
            control_plane.api.post(PODS, offline_pod(f"k{number}-{index}"))
        assert gauntlet.killed.wait(60), f"round {number}: no bind came to this step"
        submitted += PER_ROUND

        start(control_plane, gauntlet)
        pods = wait_bound(control_plane.api, submitted)

        assert set(held_gpus(pods).values()) == {1}, f"round {number}"
        assert len(list(bound_pods(control_plane.api))) == submitted
