"""Which HarvestPolicy holds where, and what the cluster side does with it."""

from typing import Any

import pytest
from reports import NOW_S, harvest_node
from valve_kube.objects import mode_in_force, node_report
from valve_kube.policies import NamespaceRule, Policies, merge_patch, node_spec, read_policies
from valve_scheduler.controller.monitor import MonitorSettings, with_policy
from valve_scheduler.placement.rank import Job, PlacementSettings, Reason, rank
from valve_scheduler.placement.state import ClusterState

Json = dict[str, Any]


def policy(name: str, **spec: Any) -> Json:
    return {"metadata": {"name": name}, "spec": spec}


def policies(*items: Json) -> Policies:
    return read_policies(items)


def test_the_policy_with_the_most_matching_labels_serves_a_node() -> None:
    found = policies(
        policy("all", mode="observe"),
        policy("pool", nodeSelector={"pool": "a"}, mode="harvest"),
        policy("other", nodeSelector={"pool": "b", "zone": "1"}, mode="off"),
    )

    assert found.of_node({"pool": "a", "zone": "1"})["mode"] == "harvest"
    assert found.of_node({"pool": "c"})["mode"] == "observe"


def test_of_equal_policies_the_first_by_name_holds_whatever_their_order() -> None:
    items = policy("b", mode="off"), policy("a", mode="harvest")

    assert policies(*items).of_node({})["mode"] == policies(*reversed(items)).of_node({})["mode"] == "harvest"


def test_a_node_gets_only_what_its_policy_says() -> None:
    found = policies(policy("all", reclaimsPerHour=10, sla={"windows": 2}, namespaces=[{"name": "web", "mode": "off"}]))

    assert node_spec(found, {}) == {
        "paused": False,
        "resolved": {"reclaimsPerHour": 10, "namespaces": [{"name": "web", "mode": "off"}]},
    }


def test_any_policy_can_pause_a_node_and_none_can_lift_it() -> None:
    found = policies(policy("night", paused=True), policy("pool", nodeSelector={"pool": "a"}, paused=False))

    assert node_spec(found, {"pool": "a"})["paused"]


@pytest.mark.parametrize(
    ("labels", "why"),
    [
        ({"pool": "a"}, "HarvestPolicy away"),
        ({"pool": "b"}, ""),
        ({"nvidia.com/gpu.deploy.client": "true", "nvidia.com/gpu.deploy.device-plugin": "false"}, ""),
        (
            {"nvidia.com/gpu.deploy.client": "paused-for-driver-upgrade"},
            "nvidia.com/gpu.deploy.client=paused-for-driver-upgrade",
        ),
        (
            {"nvidia.com/gpu.deploy.device-plugin": "paused-for-mig-change"},
            "nvidia.com/gpu.deploy.device-plugin=paused-for-mig-change",
        ),
    ],
)
def test_a_node_is_drained_by_a_policy_or_for_the_driver_whatever_its_own_mode(labels: Json, why: str) -> None:
    found = policies(policy("away", nodeSelector={"pool": "a"}, drain=True), policy("all", mode="harvest"))

    spec = {"mode": "harvest", **node_spec(found, labels)}

    assert spec["resolved"].get("drain", "") == why
    assert mode_in_force(spec) == ("off" if why else "harvest")


def test_the_brake_is_heard_by_everybody_and_written_to_nobody() -> None:
    assert policies(policy("valve-pause", paused=True)).brake
    assert not node_spec(policies(policy("valve-pause", paused=True)), {})["paused"]


@pytest.mark.parametrize("spec", [{}, {"paused": False}, {"paused": True, "nodeSelector": {"pool": "a"}}])
def test_a_policy_named_like_the_brake_that_is_none_is_a_policy_like_others(spec: Json) -> None:
    found = policies(policy("valve-pause", **spec))

    assert not found.brake
    assert node_spec(found, {"pool": "a"})["paused"] is bool(spec.get("paused"))


def test_namespaces_are_read_from_policies_of_the_whole_cluster() -> None:
    found = policies(
        policy("all", namespaces=[{"name": "*", "maxGPUs": 4}, {"name": "batch", "maxGPUs": 16}]),
        policy("pool", nodeSelector={"pool": "a"}, namespaces=[{"name": "batch", "maxGPUs": 99}]),
    )

    assert found.rule("batch") == NamespaceRule(max_gpus=16)
    assert found.rule("research") == NamespaceRule(max_gpus=4)
    assert Policies().rule("research") == NamespaceRule()


def test_sla_windows_follow_the_node_and_the_rest_stays_as_it_was() -> None:
    base = MonitorSettings()
    found = policies(
        policy("all", eviction={"budgetPercent": 10, "maxPerOwner": 2, "avoidSeconds": 60}),
        policy("pool", nodeSelector={"pool": "a"}, sla={"windowSeconds": 120, "windows": 2}),
    )

    fleet, node = (with_policy(base, spec) for spec in (found.of_cluster(), found.of_node({"pool": "a"})))

    assert (fleet.budget_share, fleet.max_rounds, fleet.avoid_s, fleet.window_s) == (0.1, 2, 60.0, base.window_s)
    assert (node.window_s, node.windows, node.backoff_s) == (120.0, 2, base.backoff_s)


def test_a_merge_patch_takes_out_what_is_gone_at_any_depth() -> None:
    before = {"paused": True, "resolved": {"mode": "off", "cooldown": {"maxMilliseconds": 1, "minMilliseconds": 2}}}
    after = {"paused": False, "resolved": {"cooldown": {"minMilliseconds": 3}}}

    assert merge_patch(before, after) == {
        "paused": False,
        "resolved": {"mode": None, "cooldown": {"maxMilliseconds": None, "minMilliseconds": 3}},
    }


def reason(node: Json, gpus: int = 1) -> Reason:
    job = Job(gpus=gpus)
    state = ClusterState(PlacementSettings())
    state.put_report(node_report(node), NOW_S)
    fleet = state.fleet(NOW_S)

    return Reason(rank(fleet, state.sets(job.gpus), job, state.settings).reason[state.row("n1")])


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ({}, Reason.NONE),
        ({"mode": "harvest"}, Reason.NONE),
        ({"mode": "observe"}, Reason.OFF),
        ({"resolved": {"mode": "off"}}, Reason.OFF),
        ({"mode": "harvest", "resolved": {"mode": "off"}}, Reason.NONE),
        ({"paused": True}, Reason.OFF),
        ({"resolved": {"slotsPerGPU": 0}}, Reason.NO_FREE_GPUS),
    ],
)
def test_the_scheduler_obeys_the_spec_before_the_daemon_has_read_it(spec: Json, expected: Reason) -> None:
    assert reason(harvest_node() | {"spec": spec}) is expected


@pytest.mark.parametrize(
    ("theta", "expected"), [(0.5, Reason.NONE), (0.9, Reason.NOT_ALIGNED), (None, Reason.NOT_ALIGNED)]
)
def test_each_node_has_the_alignment_threshold_of_its_policy(theta: float | None, expected: Reason) -> None:
    node = harvest_node(alignment=[0.7] * 28)
    spec = {} if theta is None else {"resolved": {"alignmentThreshold": theta}}

    assert reason(node | {"spec": spec}, gpus=2) is expected
