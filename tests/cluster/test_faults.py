"""API servers that die while pods are bound: nothing half done, no GPU given twice.

VALVE_FAULTS says how often (default 3).
"""

import os

import pytest
from cluster_pods import held_gpus, submit, wait_bound
from valve_tools.cluster.controlplane import ControlPlane
from valve_tools.cluster.fleet import delete_pods

FAULTS = int(os.environ.get("VALVE_FAULTS", "3"))

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300 + 90 * FAULTS)]

PODS_AT_ONCE = 120


def test_an_api_server_killed_while_pods_are_bound_comes_back_to_whole_placements(scheduling: ControlPlane) -> None:
    for round_number in range(FAULTS):
        submit(scheduling.api, PODS_AT_ONCE)
        wait_bound(scheduling.api, (5, 60, 30)[round_number % 3])

        scheduling.kill("kube-apiserver")
        scheduling.restart("kube-apiserver")

        pods = wait_bound(scheduling.api, PODS_AT_ONCE)
        assert set(held_gpus(pods).values()) == {1}, f"round {round_number}"
        delete_pods(scheduling.api)
